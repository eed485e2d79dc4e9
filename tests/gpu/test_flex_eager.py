"""The flex backend with PyTorch's own FlexAttention in its unfused form, which runs on a CPU: forward and backward."""

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from attention_cases import MASKS
from reference import Problem, solve, worst
from torch.nn.attention import flex_attention

import longweave as lw
from longweave.kernels.attention import attend, attend_backward, choose, flex
from longweave.kernels.attention.partial import NO_LIMIT, Partial, QuerySide, Tasks
from longweave.plan.tasks import fuse

MORE = {
    "aligned": lw.Mask.full([0, 256, 512]),
    "blind": lw.Mask.from_slices(500, [((0, 100), (0, 100), "causal"), ((300, 500), (200, 400), "full")]),
    "full": lw.Mask.full([0, 300, 301, 700]),
    "prefix": lw.Mask.prefix_causal([0, 400, 600], [150, 20]),
    "shared": lw.Mask.shared_prefix(200, [120, 1, 300, 46]),
    "far": lw.Mask.from_slices(900, [((300, 400), (500, 600), "full"), ((300, 500), (700, 900), (350, 420))]),
}


@pytest.fixture
def eager() -> Iterator[None]:
    """FlexAttention as it is, where it says that it has no backward: that is true of its fused form on CPUs."""
    with (
        patch.object(flex, "_is_served", lambda device: True),
        patch.object(flex, "_compiled", lambda function: function),
        patch.object(flex_attention, "_validate_device", lambda *tensors: None),
        patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
    ):
        yield


@pytest.mark.parametrize("name", MASKS | MORE)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_values(eager: None, name: str, softcap: float | None) -> None:
    mask = (MASKS | MORE)[name]
    problem = Problem.random(mask.total, heads=4, kv_heads=2, dim=16, v_dim=8, dtype=torch.float32)
    expected = solve(problem, mask, softcap=softcap)
    tasks = Tasks(fuse(mask.rows))
    out, lse = attend(problem.q, problem.k, problem.v, tasks, softcap=softcap, backend="flex")
    side = QuerySide(problem.grad, problem.q, out, lse)
    grads = attend_backward(side, problem.k, problem.v, tasks, softcap=softcap, backend="flex")
    for which, value in zip(("out", "lse", "dq", "dk", "dv"), (out, lse.t(), *grads), strict=True):
        assert worst(value, expected[which]) < 1e-5, which


def test_parts_make_the_whole(eager: None) -> None:
    """Two calls over different keys, merged: the backward of each takes the merged results."""
    mask = lw.Mask.causal([0, 150, 400])
    problem = Problem.random(mask.total, dtype=torch.float32)
    expected = solve(problem, mask)
    q, k, v = problem.q, problem.k, problem.v
    halves = [
        Tasks(np.array([[0, 150, 0, 150, -NO_LIMIT, 0], [200, 400, 150, 200, -NO_LIMIT, NO_LIMIT]])),
        Tasks(np.array([[150, 200, 150, 200, -NO_LIMIT, 0], [200, 400, 200, 400, -NO_LIMIT, 0]])),
    ]
    kernel, result = choose(q, k, v, 16**-0.5, None, "flex"), Partial.empty(q, 16)
    grads = tuple(torch.zeros_like(x) for x in (q, k, v))
    for tasks in halves:
        kernel.forward(result, q, k, v, tasks)
    for tasks in halves:
        kernel.backward(grads, QuerySide(problem.grad, q, result.out, result.lse), k, v, tasks)
    for which, value in zip(("out", "lse", "dq", "dk", "dv"), (result.out, result.lse.t(), *grads), strict=True):
        assert worst(value, expected[which]) < 1e-5, which


@pytest.mark.parametrize("name", MASKS | MORE)
def test_blocks(name: str) -> None:
    """The lists name just the blocks with allowed pairs, and as whole those in which nothing is missing."""
    mask = (MASKS | MORE)[name]
    blocks = flex.compile_blocks(fuse(mask.rows))
    intervals, *lists = blocks.tables.arrays
    assert all(table.dtype == np.int32 for table in (intervals, *lists))
    dense = mask.dense()[slice(*blocks.q), slice(*blocks.k)]
    q, k = (torch.arange(n) for n in dense.shape)
    seen = flex.mask_function(torch.from_numpy(intervals))(None, None, q[:, None], k[None])
    assert np.array_equal(seen.numpy(), dense)
    filled = np.pad(dense, [(0, -n % flex.BLOCK) for n in dense.shape])
    tiles = filled.reshape(-(-dense.shape[0] // flex.BLOCK), flex.BLOCK, -1, flex.BLOCK).swapaxes(1, 2)
    whole, some = tiles.all((2, 3)), tiles.any((2, 3))
    wanted = (some & ~whole, whole, (some & ~whole).T, whole.T)
    for counts, numbers, marked in zip(lists[::2], lists[1::2], wanted, strict=True):
        assert numbers.shape == marked.shape
        for count, order, row in zip(counts, numbers, marked, strict=True):
            assert order[:count].tolist() == np.flatnonzero(row).tolist()


def test_in_the_registered_operator(eager: None) -> None:
    """Its body lies below autograd, which the backward here needs all the same."""
    pack = lw.Pack([0, 60, 200])
    problem = Problem.random(200, dtype=torch.float32)
    leaves = [x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    expected = solve(problem, lw.Mask.causal(pack.cu_seqlens))
    out = lw.attention(*leaves, pack, backend="flex")
    grads = torch.autograd.grad(out, leaves, problem.grad)
    for which, value in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        assert worst(value, expected[which]) < 1e-5, which
