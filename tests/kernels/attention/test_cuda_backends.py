"""CUDA backends, as far as they go without a GPU: their arguments, with stand-ins for the kernels."""

import itertools

import numpy as np
import pytest
import torch
from attention_cases import MASKS
from reference import Problem, solve, worst

from longweave.kernels.attention import Kernel, cuda_flash, flex, zeros_like_sum
from longweave.kernels.attention.partial import Partial, QuerySide, Tasks
from longweave.plan.tasks import fuse


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
    kernel.backward(grads, QuerySide(grad, q, result.out, result.lse), k, v, tasks)
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
    kernel.backward(grads, QuerySide(grad, q, result.out, result.lse), k, v, tasks)
    for got, which in zip(grads, ("dq", "dk", "dv"), strict=True):
        assert worst(got.transpose(0, 1), expected[which]) < 1e-12, which
    counts, blocks = flex.touched_blocks(tasks.rows, mask.total)
    for i, (count, row) in enumerate(zip(counts, blocks, strict=True)):
        dense = mask.dense()[128 * i : 128 * (i + 1)]
        assert sorted(row[:count].tolist()) == sorted({int(k) // 128 for k in np.flatnonzero(dense.any(0))})
