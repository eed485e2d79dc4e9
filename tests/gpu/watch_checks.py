"""What the watch counts, on operations whose cost is known.

python -m fake_cuda watch_checks, as test_fake_cuda.py runs it, prints "counted" if all is as it should be.
"""

from collections.abc import Callable

import torch
from fake_cuda.watch import Tally, UnknownValueError, Watch
from torch import Tensor

N = 1024


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def launches_and_traffic(watch: Watch) -> None:
    x, y, index = on_device(N, N), on_device(N, N), on_device(16, dtype=torch.int64)
    size = 4 * N * N
    for cost, run in [
        ((0, 0), lambda: x.t()[3:].unsqueeze(0).expand(2, -1, -1)),
        ((0, 0), lambda: torch.empty_like(x)),
        ((1, 3 * size), lambda: x + y),
        ((1, 3 * size), lambda: x.add_(y)),
        ((1, 2 * size), lambda: x.copy_(y)),
        ((1, size), lambda: x.zero_()),
        ((1, size + size // 2), lambda: x.bfloat16()),
        ((1, 2 * 16 * 4 * N + 128), lambda: x.index_select(0, index)),
        ((1, 2 * 16 * 4 * N + 128), lambda: torch.index_select(x, 0, index, out=y[:16])),
        ((1, 3 * 16 * 4 * N + 128), lambda: x.index_add_(0, index, y[:16])),
        ((1, 4 * N + 2 * size), lambda: x * y[0]),
        ((1, 0), lambda: x @ y),
        ((1, 3 * size // 2), lambda: x[: N // 2].__iadd__(y[: N // 2])),
    ]:
        with watch.during(Tally()) as tally:
            run()
        assert (tally.launches, tally.traffic) == cost, (tally.launches, tally.traffic, cost)
    with watch.during(Tally()) as tally:
        x[: N // 2] += y[: N // 2]  # ends with a copy of a view onto itself
    assert (tally.launches, tally.traffic) == (1, 3 * size // 2)


def memory(watch: Watch) -> None:
    x = on_device(N, N)
    with watch.during(Tally()) as tally:
        y = x + 1
        z = y * 2
        del y
        w = z.view(-1)
        del z
        w = w + 1
    assert tally.peak - tally.before == 2 * 4 * N * N
    live = watch.live
    del w, x
    assert live - watch.live == 2 * 4 * N * N


def waiting(watch: Watch) -> None:
    x = on_device(N)
    for name, run in [("_local_scalar_dense", lambda: x.sum().item()), ("nonzero", lambda: x.nonzero())]:
        with watch.during(Tally()) as tally:
            assert "watch_checks.py" in refused(run, UnknownValueError)
        assert [site.op for site in tally.syncs] == [name], tally.syncs
    with watch.during(Tally()) as tally:
        x.cpu()
    assert [site.op for site in tally.syncs] == ["download"]


def uploads(watch: Watch) -> None:
    values = torch.arange(8)
    for free, run in [
        (False, lambda: values.to("cuda")),
        (False, lambda: values.to("cuda", non_blocking=True)),
        (False, lambda: values.pin_memory().to("cuda")),
        (True, lambda: values.pin_memory().to("cuda", non_blocking=True)),
        (True, lambda: on_device(8, dtype=torch.int64).copy_(values.pin_memory(), non_blocking=True)),
        (False, lambda: torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], device="cuda")),
    ]:
        with watch.during(Tally()) as tally:
            run()
        assert [(size, how) for _, size, how in tally.uploads] == [(64, free)], tally.uploads
        assert not tally.syncs
        assert tally.launches == 0


def gradients(watch: Watch) -> None:
    """Autograd's own threads are watched, too."""
    x = on_device(N).requires_grad_()
    y = x.exp()
    with watch.during(Tally()) as tally:
        y.backward(on_device(N))
    assert tally.launches == 1
    assert x.grad is not None
    assert x.grad.is_cuda


def triton_kernels(watch: Watch) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def doubled(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

    x, y = on_device(N), on_device(N)
    with watch.during(Tally()) as tally:
        doubled[lambda meta: (triton.cdiv(N, meta["BLOCK"]),)](x, y, N, BLOCK=128)
        doubled[(0,)](x, y, N, BLOCK=128)  # nothing to launch
    assert [(site.op, n) for site, n in tally.calls.items()] == [("doubled", 1)]
    for wrong, arguments in [("without n", {"BLOCK": 128}), ("on the grid", {"n": N, "BLOCK": 128})]:
        assert wrong in refused(lambda given=arguments: doubled[(1.5,)](x, y, **given), TypeError)


def refused(run: Callable[[], object], kind: type[Exception]) -> str:
    """The text of the error that must come."""
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    with Watch() as watch:
        for check in (launches_and_traffic, memory, waiting, uploads, gradients, triton_kernels):
            check(watch)
    print("counted")
