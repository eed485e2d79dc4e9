"""The kernels of one rank against dense attention: calls, strips, sinks, gradients."""

import itertools
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Problem, dense_attention, solve, worst

import longweave as lw
from longweave.kernels import cpu_flash, cuda_flash, flex
from longweave.kernels import merge as merge_module
from longweave.kernels.attention import Kernel, attend, attend_backward, choose, zeros_like_sum
from longweave.kernels.merge import Partial
from longweave.kernels.tasks import Tasks
from longweave.plan.work import fuse

MASKS = {
    "causal": lw.Mask.causal([0, 5, 6, 60]),
    "long causal": lw.Mask.causal([0, 500, 1000]),
    "window": lw.Mask.sliding_window([0, 400, 700], 37),
    "wide window": lw.Mask.sliding_window([0, 700], 300),
    "slices": lw.Mask.from_slices(300, [((0, 200), (50, 250), (-30, 150)), ((200, 300), (0, 10), "full")]),
    "late": lw.Mask.from_slices(900, [((400, 900), (0, 900), "causal")]),
}


def pairs(calls: tuple[cpu_flash.Call, ...], total: int) -> np.ndarray:
    """How often each pair is computed."""
    seen = np.zeros((total, total), dtype=int)
    for c in calls:
        distance = np.arange(c.k1 - c.k0)[None, :] - np.arange(c.q1 - c.q0)[:, None]
        low, high = c.band or (-(1 << 40), 0 if c.causal else 1 << 40)
        seen[c.q0 : c.q1, c.k0 : c.k1] += (distance >= low) & (distance <= high)
    return seen


@pytest.mark.parametrize("name", MASKS)
def test_calls_cover_every_pair_once(name: str) -> None:
    mask = MASKS[name]
    calls = cpu_flash.compile_calls(fuse(mask.rows))
    assert np.array_equal(pairs(calls, mask.total), mask.dense().astype(int))
    for i, call in enumerate(calls):
        shared = any(j != i and c.q0 < call.q1 and call.q0 < c.q1 for j, c in enumerate(calls))
        assert call.alone == (not shared)


@pytest.mark.parametrize("backend", ["cpu_flash", "reference"])
@pytest.mark.parametrize("name", MASKS)
def test_against_dense(name: str, backend: str) -> None:
    mask = MASKS[name]
    for heads in ({"heads": 4, "kv_heads": 2, "dim": 16, "v_dim": 8}, {"heads": 2, "kv_heads": 2, "dim": 16}):
        problem = Problem.random(mask.total, **heads)
        expected = solve(problem, mask)
        q, k, v, grad = (x.transpose(0, 1) for x in (problem.q, problem.k, problem.v, problem.grad))
        tasks = Tasks(mask.rows)
        out, lse = attend(q, k, v, tasks, backend=backend)
        assert worst(out.transpose(0, 1), expected["out"]) < 1e-12
        assert worst(lse.t(), expected["lse"]) < 1e-12
        grads = attend_backward(grad, q, k, v, out, lse, tasks, backend=backend)
        for got, which in zip(grads, ("dq", "dk", "dv"), strict=True):
            assert worst(got.transpose(0, 1), expected[which]) < 1e-12, which


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(0, 4))
def test_merge_in_any_order_and_with_nothing(parts: list[int], seed: int) -> None:
    """Keys dealt to three parts, some of which a query does not see at all."""
    problem = Problem.random(9, heads=2, kv_heads=2, dim=4, seed=seed)
    mask = lw.Mask.causal([0, 9])
    kernel = Kernel("reference", 0.5)
    q, k, v = (x.transpose(0, 1) for x in (problem.q, problem.k, problem.v))
    whole = Partial.empty(q, 4)
    for part in sorted(range(3), key=lambda p: parts[p % len(parts)]):
        kernel.forward(whole, q, k, v, Tasks(mask.cut([(0, 9)], [(3 * part, 3 * part + 3)])))
    out, lse = dense_attention(problem.q, problem.k, problem.v, mask, scale=0.5)
    assert worst(whole.out.transpose(0, 1), out) < 1e-12
    assert worst(whole.lse.t(), lse) < 1e-12


def test_middle_sized_causal_tasks_go_by_strips() -> None:
    causal = lambda n: cpu_flash.compile_calls(lw.Mask.causal([0, n]).rows)  # noqa: E731
    assert len(causal(1000)) == 8
    assert all(call.q1 - call.q0 <= 128 and not call.causal for call in causal(1000))
    assert [call.causal for call in causal(200)] == [True]
    assert [call.causal for call in causal(5000)] == [True]


def test_the_merge_adds_in_float32() -> None:
    """A thousand equal bf16 partials: their mean is exact in float32 and lost in bf16."""
    result = Partial.empty(torch.zeros(1, 1, 4, dtype=torch.bfloat16), 1)
    assert result.out.dtype == torch.float32
    g = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=g).bfloat16()
    for value in values:
        result.add(0, 1, value.view(1, 1, 1), torch.zeros(1, 1, dtype=torch.bfloat16))
    assert abs(float(result.out) - float(values.double().mean())) < 1e-5


def test_sinks_of_minus_infinity_change_nothing() -> None:
    problem = Problem.random(6, heads=2, kv_heads=1)
    q, k, v = (x.transpose(0, 1) for x in (problem.q, problem.k, problem.v))
    tasks = Tasks(lw.Mask.from_slices(6, [((2, 4), (0, 3), "full")]).rows)
    plain, sunk = attend(q, k, v, tasks), attend(q, k, v, tasks, sinks=torch.full((2,), -torch.inf))
    assert torch.equal(plain[0], sunk[0])
    assert torch.equal(plain[1], sunk[1])


def test_the_merge_compiles() -> None:
    """In one graph; what a GPU runs is the same graph."""
    merge = torch.compile(merge_module._merge, dynamic=True, fullgraph=True, backend="aot_eager")
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 5, 4, generator=g) for _ in range(2))
    la, lb = (torch.randn(2, 5, generator=g) for _ in range(2))
    expected = Partial(a.clone(), la.clone())
    expected.add(0, 5, b, lb)
    merge(a, la, b, lb)
    assert torch.allclose(a, expected.out)
    assert torch.allclose(la, expected.lse)


def test_queries_that_see_nothing() -> None:
    problem = Problem.random(6, heads=2, kv_heads=1, sinks=True)
    mask = lw.Mask.from_slices(6, [((2, 4), (0, 3), "full")])
    q, k, v = (x.transpose(0, 1) for x in (problem.q, problem.k, problem.v))
    for backend in ("cpu_flash", "reference"):
        out, lse = attend(q, k, v, Tasks(mask.rows), backend=backend)
        assert (out[:, [0, 1, 4, 5]] == 0).all()
        assert (lse[:, [0, 1, 4, 5]] == -torch.inf).all()
        out, lse = attend(q, k, v, Tasks(mask.rows), backend=backend, sinks=problem.sinks)
        assert (out[:, [0, 1, 4, 5]] == 0).all()
        assert torch.equal(lse[:, 0], problem.sinks)


def test_the_reference_needs_no_quadratic_memory() -> None:
    """The largest tensor it makes is a block of logits, not queries × keys."""
    tokens, heads = 4000, 2
    problem = Problem.random(tokens, heads=heads, kv_heads=1, dim=8, dtype=torch.float32)
    q, k, v = (x.transpose(0, 1).contiguous() for x in (problem.q, problem.k, problem.v))
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
        "flash_attn": "not installed",
        "flex": "on cpu",
    }.items():
        with pytest.raises(lw.BackendError, match=f"{name}.*{reason}"):
            choose(x, x, x, 1.0, None, name)
    with pytest.raises(lw.BackendError, match="no softcap"):
        choose(x, x, x, 1.0, 5.0, "cpu_flash")
    with pytest.raises(lw.InputError, match="backend is 'magic'"):
        choose(x, x, x, 1.0, None, "magic")


# -- CUDA backends, as far as they go without a GPU ------------------------------------------------


def varlen_stand_in(q, k, v, cu_q, cu_k, window, scale):
    """What flash attention with cu_seqlens and a bottom-right aligned window computes."""
    outs, lses = [], []
    left, right = window
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        shift = (d - c) - (b - a)
        i, j = torch.arange(b - a)[:, None] + shift, torch.arange(d - c)[None, :]
        seen = torch.ones(b - a, d - c, dtype=torch.bool)
        if left >= 0:
            seen &= j >= i - left
        if right >= 0:
            seen &= j <= i + right
        groups = q.shape[1] // k.shape[1]
        logits = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d].repeat_interleave(groups, 1)) * scale
        logits = logits.masked_fill(~seen, -torch.inf)
        lses.append(torch.logsumexp(logits, -1))
        outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), v[c:d].repeat_interleave(groups, 1)))
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("name", MASKS)
def test_flash_waves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = MASKS[name]
    problem = Problem.random(mask.total, heads=2, kv_heads=1, dim=8, v_dim=4)
    expected = solve(problem, mask)

    def forward(a, wave, scale, softcap, backend):
        assert max(a["cu_q"].diff()) == a["max_q"]
        assert max(a["cu_k"].diff()) == a["max_k"]
        return varlen_stand_in(a["q"], a["k"], a["v"], a["cu_q"].tolist(), a["cu_k"].tolist(), wave.window, scale)

    def backward(a, merged, lse, wave, scale, softcap, backend):
        leaves = [a[n].detach().requires_grad_() for n in ("q", "k", "v")]
        with torch.enable_grad():
            out, own = varlen_stand_in(*leaves, a["cu_q"].tolist(), a["cu_k"].tolist(), wave.window, scale)
        weight = torch.exp(own - lse).t()[..., None].detach()
        grad = merged["grad_out"]
        d_own = weight[..., 0] * ((grad * out).sum(-1) - (grad * merged["out"]).sum(-1)).detach()
        return torch.autograd.grad((out, own), leaves, (weight * grad, d_own.t()))

    monkeypatch.setattr(cuda_flash, "_call_forward", forward)
    monkeypatch.setattr(cuda_flash, "_call_backward", backward)
    q, k, v, grad = (x.transpose(0, 1) for x in (problem.q, problem.k, problem.v, problem.grad))
    kernel, tasks = Kernel("aten_flash", 8**-0.5), Tasks(fuse(mask.rows))
    for wave in tasks.compiled(cuda_flash.compile_waves):
        queries = [i for a, b in wave.q for i in range(a, b)]
        assert len(queries) == len(set(queries)), "a query once per call"
    result = Partial.empty(q, 4)
    kernel.forward(result, q, k, v, tasks)
    assert worst(result.out.transpose(0, 1), expected["out"]) < 1e-12
    grads = tuple(zeros_like_sum(x) for x in (q, k, v))
    kernel.backward(grads, grad, q, k, v, result.out, result.lse, tasks)
    for got, which in zip(grads, ("dq", "dk", "dv"), strict=True):
        assert worst(got.transpose(0, 1), expected[which]) < 1e-6, which  # lse is float32 on this path


@pytest.mark.parametrize("name", MASKS)
def test_flex_mask_and_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = MASKS[name]
    tasks = Tasks(fuse(mask.rows))
    queries, intervals = tasks.compiled(flex.compile_intervals)
    allowed = flex.mask_function(torch.from_numpy(intervals))
    q_index, k_index = torch.arange(queries)[:, None], torch.arange(mask.total)[None, :]
    seen = allowed(None, None, q_index, k_index)
    assert np.array_equal(seen.numpy(), mask.dense()[:queries])

    def stand_in(q, k, v, tasks, scale, softcap):
        groups = q.shape[0] // k.shape[0]
        logits = torch.einsum("hqd,hkd->hqk", q, k.repeat_interleave(groups, 0)) * scale
        logits = logits.masked_fill(~seen, -torch.inf)
        lse = torch.logsumexp(logits, -1)
        weights = torch.exp(logits - lse.clamp_min(-1e300)[..., None])
        return weights @ v.repeat_interleave(groups, 0), lse

    monkeypatch.setattr(flex, "flex_call", stand_in)
    problem = Problem.random(mask.total, heads=2, kv_heads=1, dim=8)
    expected = solve(problem, mask)
    q, k, v, grad = (x.transpose(0, 1) for x in (problem.q, problem.k, problem.v, problem.grad))
    result, kernel = Partial.empty(q, 8), Kernel("flex", 8**-0.5)
    kernel.forward(result, q, k, v, tasks)
    assert worst(result.out.transpose(0, 1), expected["out"]) < 1e-12
    grads = tuple(zeros_like_sum(x) for x in (q, k, v))
    kernel.backward(grads, grad, q, k, v, result.out, result.lse, tasks)
    for got, which in zip(grads, ("dq", "dk", "dv"), strict=True):
        assert worst(got.transpose(0, 1), expected[which]) < 1e-12, which
    counts, blocks = flex.touched_blocks(tasks.rows, mask.total)
    for i, (count, row) in enumerate(zip(counts, blocks, strict=True)):
        dense = mask.dense()[128 * i : 128 * (i + 1)]
        assert sorted(row[:count].tolist()) == sorted({int(k) // 128 for k in np.flatnonzero(dense.any(0))})
