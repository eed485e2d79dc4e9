"""Attention on one rank against dense attention: calls, strips, gradients, the choice of a backend."""

import logging

import numpy as np
import pytest
import torch
from attention_cases import MASKS
from reference import Problem, solve, worst
from torch._subclasses.fake_tensor import FakeTensorMode

import longweave as lw
from longweave.kernels.attention import attend, attend_backward, choose, cpu_flash
from longweave.kernels.attention.partial import QuerySide, Tasks
from longweave.plan.tasks import fuse


def pairs(calls: tuple[cpu_flash.FlashCall, ...], total: int) -> np.ndarray:
    """How often each pair is computed."""
    seen = np.zeros((total, total), dtype=int)
    for c in calls:
        distance = np.arange(c.k1 - c.k0)[None, :] - np.arange(c.q1 - c.q0)[:, None]
        low, high = c.band or (-(1 << 40), 0 if c.causal else 1 << 40)
        for shift in range(0, c.blocks * c.step, c.step) if c.blocks > 1 else [0]:
            block = seen[c.q0 + shift : c.q1 + shift, c.k0 + shift : c.k1 + shift]
            block += (distance >= low) & (distance <= high)
    return seen


@pytest.mark.parametrize("name", MASKS)
def test_calls_cover_every_pair_once(name: str) -> None:
    mask = MASKS[name]
    calls = cpu_flash.compile_calls(fuse(mask.rows))
    assert np.array_equal(pairs(calls, mask.total), mask.dense().astype(int))
    for i, call in enumerate(calls):
        assert call.first == (not any(c.q0 < call.reach and call.q0 < c.reach for c in calls[:i]))


@pytest.mark.parametrize("backend", ["cpu_flash", "reference"])
@pytest.mark.parametrize("name", MASKS)
def test_against_dense(name: str, backend: str) -> None:
    mask = MASKS[name]
    for heads in ({"heads": 4, "kv_heads": 2, "dim": 16, "v_dim": 8}, {"heads": 2, "kv_heads": 2, "dim": 16}):
        problem = Problem.random(mask.total, **heads)
        expected = solve(problem, mask)
        q, k, v, grad = problem.q, problem.k, problem.v, problem.grad
        tasks = Tasks(mask.rows)
        out, lse = attend(q, k, v, tasks, backend=backend)
        assert worst(out, expected["out"]) < 1e-12
        assert worst(lse.t(), expected["lse"]) < 1e-12
        grads = attend_backward(QuerySide(grad, q, out, lse), k, v, tasks, backend=backend)
        for got, which in zip(grads, ("dq", "dk", "dv"), strict=True):
            assert worst(got, expected[which]) < 1e-12, which


@pytest.mark.parametrize("size", [1, 63, 127, 128, 129, 191, 256, 700, 1000, 1025])
@pytest.mark.parametrize(("before", "behind"), [(0, 0), (5, 0), (0, 70), (300, 3)])
def test_triangles_are_halved(size: int, before: int, behind: int) -> None:
    """`before` keys that all rows see, `behind` rows that see all keys."""
    rows, keys = size + behind, size + before
    mask = lw.Mask.from_slices(rows + keys, [((keys, keys + rows), (0, keys), (-(1 << 40), before - keys))])
    calls = cpu_flash.compile_calls(mask.rows)
    assert np.array_equal(pairs(calls, mask.total), mask.dense().astype(int))
    computed = sum(c.blocks * (c.q1 - c.q0) * (c.k1 - c.k0) for c in calls)
    assert computed <= mask.area + size * cpu_flash.LEAF, "little of it is thrown away"
    assert len(calls) <= 2 + 0.5 * size.bit_length() ** 2


def test_queries_that_see_nothing() -> None:
    problem = Problem.random(6, heads=2, kv_heads=1, sinks=True)
    mask = lw.Mask.from_slices(6, [((2, 4), (0, 3), "full")])
    q, k, v = problem.q, problem.k, problem.v
    for backend in ("cpu_flash", "reference"):
        out, lse = attend(q, k, v, Tasks(mask.rows), backend=backend)
        assert (out[[0, 1, 4, 5]] == 0).all()
        assert (lse[:, [0, 1, 4, 5]] == -torch.inf).all()
        out, lse = attend(q, k, v, Tasks(mask.rows), backend=backend, sinks=problem.sinks)
        assert (out[[0, 1, 4, 5]] == 0).all()
        assert torch.equal(lse[:, 0], problem.sinks)


def test_the_reference_needs_no_quadratic_memory() -> None:
    """The largest tensor it makes is a block of logits, not queries × keys."""
    tokens, heads = 4000, 2
    problem = Problem.random(tokens, heads=heads, kv_heads=1, dim=8, dtype=torch.float32)
    q, k, v = problem.q, problem.k, problem.v
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else [result]:
                if isinstance(x, torch.Tensor):
                    Largest.numel = max(Largest.numel, x.numel())
            return result

    with Largest():
        attend(q, k, v, Tasks(lw.Mask.causal([0, tokens]).rows), backend="reference", softcap=5.0)
    assert Largest.numel <= heads * 128 * 512


def test_backends_are_chosen_named_and_refused(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(2, 3, 8)
    with caplog.at_level(logging.DEBUG, logger="longweave.kernels"):
        assert choose(x, x, x, 1.0, None).backend == "cpu_flash"
    assert "attention backend cpu_flash" in caplog.text
    assert choose(x, x, x, 1.0, 5.0).backend == "reference"
    for name, reason in {
        "aten_flash": "on cpu",
        "flash_attn": "on cpu",
        "flex": "on cpu",
    }.items():
        with pytest.raises(lw.BackendError, match=f"{name}.*{reason}"):
            choose(x, x, x, 1.0, None, name)
    with pytest.raises(lw.BackendError, match="no softcap"):
        choose(x, x, x, 1.0, 5.0, "cpu_flash")
    with pytest.raises(lw.InputError, match="backend is 'magic'"):
        choose(x, x, x, 1.0, None, "magic")


@pytest.mark.parametrize("backend", ["cpu_flash", "reference"])
def test_float32_holds_the_contract(backend: str) -> None:
    for mask in (MASKS["long causal"], MASKS["window"]):
        exact = Problem.random(mask.total, heads=4, kv_heads=2, dim=16)
        expected = solve(exact, mask)
        q, k, v, grad = (x.float() for x in (exact.q, exact.k, exact.v, exact.grad))
        out, lse = attend(q, k, v, Tasks(mask.rows), backend=backend)
        grads = attend_backward(QuerySide(grad, q, out, lse), k, v, Tasks(mask.rows), backend=backend)
        for got, which in zip((out, *grads), ("out", "dq", "dk", "dv"), strict=True):
            error = (got.double() - expected[which]).abs().max()
            assert error < 1e-5 * expected[which].abs().max(), which


def test_strip_masks_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long jobs meet many windows: what is kept of them does not grow, and wide ones need no wide mask."""
    masks = cpu_flash._Masks()
    monkeypatch.setattr(cpu_flash, "_masks", masks)
    monkeypatch.setattr(cpu_flash, "MASK_BYTES", 3 << 20)
    q, k, v = (torch.rand(2500, 1, 8) for _ in range(3))
    most = 0
    for window in (*range(100, 1100, 100), 2100, 2499):
        tasks = Tasks(lw.Mask.sliding_window([0, 2500], window).rows)
        out, _ = attend(q, k, v, tasks, backend="cpu_flash")
        assert worst(out, attend(q, k, v, tasks, backend="reference")[0]) < 1e-5
        assert sum(mask.nbytes for mask in masks._made.values()) <= 3 << 20
        most = max(most, len(masks._made))
    assert most > 1, "some are kept"


def test_a_fake_run_leaves_no_mask_behind() -> None:
    """The masks of strips are kept for the life of the process: a fake one would spoil every later run."""
    tasks = Tasks(lw.Mask.sliding_window([0, 300], 71).rows)
    cpu_flash._masks._made.clear()
    with FakeTensorMode():
        attend(*(torch.rand(300, 2, 8) for _ in range(3)), tasks, backend="cpu_flash")
    out, _ = attend(*(torch.rand(300, 2, 8) for _ in range(3)), tasks, backend="cpu_flash")
    assert type(out) is torch.Tensor
    assert bool(out.isfinite().all())
