"""Attention over task lists in Triton's interpreter, against the reference in float64. Run by test_spans_values."""

import numpy as np
import pytest
import torch
from reference import Problem, worst
from torch import Tensor

import longweave as lw
from longweave.kernels.attention import reference, spans
from longweave.kernels.attention.partial import Partial, QuerySide, Tasks
from longweave.kernels.attention.spans import Tiles
from longweave.kernels.triton_launch import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set"),
    # numpy says so where a row has seen nothing; hidden rows are looked at here
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

# The interpreter takes a millisecond for every few operations of a program: cases are as small as they can be.
RAGGED = [0, 1, 1, 36, 39, 40, 70]  # one token, none, and longer than a block
MASKS = {
    "causal": lw.Mask.causal(RAGGED),
    "one long document": lw.Mask.causal([0, 3, 69, 70]),
    "full": lw.Mask.full(RAGGED),
    "window": lw.Mask.sliding_window([0, 50, 70], 7),
    "wide window": lw.Mask.sliding_window([0, 70], 40),
    "chunks": lw.Mask.causal([0, 12, 24, 36, 48, 60, 70]),
    "shared prefix": lw.Mask.shared_prefix(35, [3, 20, 1, 11]),
    "prefix": lw.Mask.prefix_causal(RAGGED, [1, 0, 20, 3, 0, 5]),
    "blind rows": lw.Mask.from_slices(70, [((3, 20), (40, 70), (35, 50)), ((50, 60), (0, 10), "full")]),
    "nothing before": lw.Mask.from_slices(70, [((40, 70), (0, 70), "causal")]),
}
SHAPES = {
    "softcap, MLA": (2.0, {"heads": 2, "kv_heads": 2, "dim": 24, "v_dim": 16}),
    "odd": (None, {"heads": 3, "kv_heads": 1, "dim": 72, "v_dim": 80}),
    "softcap, single": (1.0, {"heads": 1, "kv_heads": 1, "dim": 1, "v_dim": 3}),
}
SMALL = {"heads": 2, "kv_heads": 1, "dim": 16, "dtype": torch.float32}
NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a hundred tokens are several blocks of several steps."""
    monkeypatch.setattr(spans, "tiles_for", lambda *_: Tiles(32, 16, 4, 1))


def run(problem: Problem, stages: list[Tasks], softcap: float | None = None, kernel: object = spans) -> list[Tensor]:
    """out, lse, dq, dk, dv of tasks that come in several calls."""
    q, k, v = problem.q, problem.k, problem.v
    scale = q.shape[-1] ** -0.5
    into = Partial.empty(q, v.shape[-1])
    for i, tasks in enumerate(stages):
        fresh = () if kernel is reference else (i == 0,)
        kernel.forward(into, q, k, v, tasks, scale, softcap, *fresh)
    queries = QuerySide(problem.grad, q, into.out.to(q.dtype), into.lse)
    grads = tuple(torch.zeros(x.shape, dtype=into.out.dtype) for x in (q, k, v))
    for tasks in stages:
        kernel.backward(grads, queries, k, v, tasks, scale, softcap)
    return [into.out, into.lse, *grads]


def expected(problem: Problem, mask: lw.Mask, softcap: float | None = None) -> list[Tensor]:
    wide = Problem(*(x.double() for x in (problem.q, problem.k, problem.v, problem.grad)), None)
    return run(wide, [Tasks(mask.rows)], softcap, reference)


def check(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    errors = {name: worst(a, b) for name, a, b in zip(NAMES, got, want, strict=True)}
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str) -> None:
    mask = MASKS[name]
    problem = Problem.random(mask.total, **SMALL)
    check(run(problem, [Tasks(mask.rows)]), expected(problem, mask), 2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape: str) -> None:
    mask = MASKS["one long document"]
    softcap, shapes = SHAPES[shape]
    problem = Problem.random(mask.total, dtype=torch.float32, **shapes)
    check(run(problem, [Tasks(mask.rows)], softcap), expected(problem, mask, softcap), 2e-6)


@pytest.mark.parametrize("name", ["causal", "blind rows"])
def test_half_precision(name: str) -> None:
    mask = MASKS[name]
    problem = Problem.random(mask.total, **{**SMALL, "dtype": torch.float16})
    check(run(problem, [Tasks(mask.rows)]), expected(problem, mask), 3e-3)


def split(rows: np.ndarray, at: int) -> list[Tasks]:
    """Tasks over the keys before `at`, and over the rest; cut rows stay tight."""
    stages = []
    for a, b in ((0, at), (at, 1 << 40)):
        some = []
        for q0, q1, k0, k1, lo, hi in rows.tolist():
            k0, k1 = max(k0, a), min(k1, b)
            q0, q1 = max(q0, k0 - hi), min(q1, k1 - lo)
            if k0 < k1 and q0 < q1:
                some.append((q0, q1, k0, k1, lo, hi))
        stages.append(Tasks(np.array(some, dtype=np.int64).reshape(-1, 6)))
    return stages


@pytest.mark.parametrize("name", ["causal", "wide window"])
def test_calls_merge(name: str) -> None:
    mask = MASKS[name]
    problem = Problem.random(mask.total, **SMALL)
    check(run(problem, split(mask.rows, 37)), expected(problem, mask), 2e-6)


def test_rows_of_other_tasks_keep_their_bits() -> None:
    """The rows of a block that no task names are not as much as rounded."""
    problem = Problem.random(32, dtype=torch.float32)
    into = Partial(torch.randn(32, 4, 16), torch.randn(4, 32) * 9)
    into.lse[:, 5] = -torch.inf
    into.out[5] = 0
    before = Partial(into.out.clone(), into.lse.clone())
    tasks = Tasks(np.array([[8, 9, 0, 20, -(1 << 40), 1 << 40]]))
    spans.forward(into, problem.q, problem.k, problem.v, tasks, 1.0, None, False)
    rest = torch.arange(32) != 8
    assert torch.equal(into.out[rest], before.out[rest])
    assert torch.equal(into.lse[:, rest], before.lse[:, rest])
    assert (into.lse[:, 8] > before.lse[:, 8]).all()


def test_tensors_as_they_lie() -> None:
    """K, V and their gradients are halves of one buffer; q, out and dq are slices of the heads of larger tensors."""
    mask = MASKS["causal"]
    problem = Problem.random(mask.total, v_dim=8, **{**SMALL, "heads": 4, "kv_heads": 2})
    want = expected(problem, mask)
    total, heads, dim = problem.q.shape
    kv = torch.cat([problem.k, problem.v], -1)
    dkv = torch.ones_like(kv)
    wide_q, wide_dq = torch.randn(2 * total, heads + 3, dim), torch.ones(total, heads + 3, dim)
    q, k, v = wide_q[::2, 2:-1], kv[..., :dim], kv[..., dim:]
    q.copy_(problem.q)
    whole = Partial(torch.zeros(total, heads + 3, 11)[..., :8], torch.full((heads + 3, total + 9), -torch.inf))
    into = Partial(whole.out[:, 1:-2], whole.lse[1:-2, :total])
    tasks = Tasks(mask.rows)
    spans.forward(into, q, k, v, tasks, dim**-0.5, None, True)
    # A gradient of a sum is one number, seen many times.
    grad = torch.ones(()).expand(total, heads, 8)
    problem.grad = grad.contiguous()
    want = expected(problem, mask)
    queries = QuerySide(grad, q, into.out, into.lse)
    grads = wide_dq[:, 2:-1], dkv[..., :dim], dkv[..., dim:]
    spans.backward(grads, queries, k, v, tasks, dim**-0.5, None)
    check([into.out, into.lse, *(x - 1 for x in grads)], want, 2e-6)
    assert (whole.out[:, [0, -2, -1]] == 0).all()
    assert (whole.lse[[0, -2, -1]] == -torch.inf).all()
    assert (whole.lse[:, total:] == -torch.inf).all()
    assert (wide_dq[:, [0, 1, -1]] == 1).all()


def test_the_same_bits_every_time() -> None:
    mask = MASKS["chunks"]
    problem = Problem.random(mask.total, **SMALL)
    first, second = (run(problem, [Tasks(mask.rows)]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_sinks_come_at_the_end() -> None:
    mask = MASKS["blind rows"]
    problem = Problem.random(mask.total, sinks=True, **SMALL)
    problem.sinks[1] = -torch.inf
    results = []
    for kernel, dtype in ((spans, torch.float32), (reference, torch.float64)):
        q, k, v = (x.to(dtype) for x in (problem.q, problem.k, problem.v))
        into = Partial.empty(q, v.shape[-1])
        options = (True,) if kernel is spans else ()
        kernel.forward(into, q, k, v, Tasks(mask.rows), 0.25, None, *options)
        results.append((into.finish(problem.sinks, dtype), into.lse))
    (out, lse), (want_out, want_lse) = results
    assert worst(out, want_out) < 2e-6
    assert worst(lse, want_lse) < 2e-6
    assert torch.equal(lse[0, :3], problem.sinks[0].expand(3))


def test_nothing_to_do() -> None:
    problem = Problem.random(4, dtype=torch.float32)
    got = run(problem, [Tasks(np.zeros((0, 6), dtype=np.int64))])
    assert (got[1] == -torch.inf).all()
    assert all((x == 0).all() for i, x in enumerate(got) if i != 1)


def test_backend_by_name() -> None:
    """`lw.attention` in one process takes it by name, on the CPU only in the interpreter."""
    problem = Problem.random(10, dtype=torch.float32)
    assert spans.why_not(problem.q, problem.k, problem.v) is None
    wide = torch.zeros(10, 4, 512)
    assert "up to 256" in spans.why_not(wide, wide, wide)
    assert "one dtype" in spans.why_not(problem.q, problem.k.half(), problem.v)
    assert "float64" in spans.why_not(*(x.double() for x in (problem.q, problem.k, problem.v)))
