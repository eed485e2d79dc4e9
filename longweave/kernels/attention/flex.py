"""FlexAttention on CUDA, with a block mask made from the tasks.

    tasks ──▶ for each query, the intervals of keys that it sees      (what the mask function looks up)
          ──▶ for each block of queries, the blocks of keys that it sees in part, and those that it sees whole

A whole block needs no mask function. All of it is made once, in numpy, and uploaded once.

FlexAttention's own backward knows nothing of other partials, so the backward here recomputes the block's (out, lse)
with autograd and feeds it the gradients that the merge implies:

    w = e^(lse_block − lse)     d out_block = w · dO     d lse_block = w · (⟨dO, out_block⟩ − ⟨dO, out⟩)

No GPU has run this yet. FlexAttention's own unfused form has, on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longweave.kernels.attention.partial import Partial, QuerySide, TaskRows, Tasks
from longweave.tensors import Indices

BLOCK = 128

Ints = npt.NDArray[np.int64]


class Blocks(NamedTuple):
    """A mask over the queries `q` and keys `k`, (start, stop) each; everything in it counts from there.

    The arrays of `tables`: intervals (layers, queries, 2) of first and last keys; then four lists of blocks, each as
    counts (rows,) and numbers (rows, columns): of keys in part, of keys whole, of queries in part, of queries whole.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    tables: Indices


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if not _is_served(q.device):
        return f"tensors are on {q.device.type}"
    if q.dtype == torch.float64:
        return "it has no float64"
    return None


def _is_served(device: torch.device) -> bool:
    return device.type == "cuda"


# -- the mask ------------------------------------------------------------------------------------------


def compile_blocks(rows: TaskRows) -> Blocks:
    q, k = (int(rows[:, 0].min()), int(rows[:, 1].max())), (int(rows[:, 2].min()), int(rows[:, 3].max()))
    row, first, last = _spread(rows, q[0], k[0])
    intervals = _layers(row, first, last, q[1] - q[0])
    pairs = _pairs(row, first, last, q[1] - q[0], k[1] - k[0])
    # Blocks at the end that are not filled count as seen in part: only there are queries and keys held to the end.
    whole = pairs == BLOCK * BLOCK
    part = (pairs > 0) & ~whole
    lists = [table for seen in (part, whole, part.T, whole.T) for table in _ordered(seen)]
    return Blocks(q, k, Indices(intervals, *lists))


def _spread(rows: TaskRows, q_start: int, k_start: int) -> tuple[Ints, Ints, Ints]:
    """(query, first key, last key) for every query of every task, sorted."""
    q0, q1, k0, k1, lo, hi = rows.T
    task = np.repeat(np.arange(len(rows)), q1 - q0)
    q = np.arange(len(task)) - np.repeat(np.cumsum(q1 - q0) - q1, q1 - q0)
    first, last = np.maximum(k0[task], q + lo[task]), np.minimum(k1[task] - 1, q + hi[task])
    order = np.lexsort([first, q])
    return q[order] - q_start, first[order] - k_start, last[order] - k_start


def _layers(row: Ints, first: Ints, last: Ints, queries: int) -> npt.NDArray[np.int32]:
    """intervals[n, q] = (first key, last key) of the n-th interval of query q; (1, 0) where it has none."""
    depth = np.bincount(row, minlength=queries)
    layer = np.arange(len(row)) - np.repeat(np.cumsum(depth) - depth, depth)
    layers = 1 << (int(depth.max()) - 1).bit_length()  # each number of layers is compiled anew: there are few
    intervals = np.empty((layers, queries, 2), dtype=np.int32)
    intervals[:] = 1, 0
    intervals[layer, row, 0], intervals[layer, row, 1] = first, last
    return intervals


def _pairs(row: Ints, first: Ints, last: Ints, queries: int, keys: int) -> Ints:
    """For each block of queries and of keys, how many pairs of it are allowed."""
    shape = -(-queries // BLOCK), -(-keys // BLOCK) + 1
    left, right = first // BLOCK, last // BLOCK
    at_left, at_right = row // BLOCK * shape[1] + left, row // BLOCK * shape[1] + right

    def summed(place: Ints, weight: Ints) -> Ints:
        return np.bincount(place, weights=weight, minlength=shape[0] * shape[1]).astype(np.int64)

    # An interval fills all blocks from its first to its last, but for what lies before it and behind it.
    every = np.full(len(row), BLOCK)
    filled = (summed(at_left, every) - summed(at_right + 1, every)).reshape(shape).cumsum(1)
    missing = summed(at_left, first - left * BLOCK) + summed(at_right, (right + 1) * BLOCK - 1 - last)
    pairs: Ints = (filled - missing.reshape(shape))[:, :-1]
    return pairs


def _ordered(seen: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """How many columns of each row are marked, and which; the rest of a row is filler."""
    order = np.argsort(~seen, axis=1, kind="stable")
    return seen.sum(1, dtype=np.int32), np.ascontiguousarray(order, dtype=np.int32)


def mask_function(intervals: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's mask_mod for intervals (layers, queries, 2)."""

    def allowed(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k >= intervals[0, q, 0]) & (k <= intervals[0, q, 1])
        for layer in range(1, intervals.shape[0]):
            seen = seen | ((k >= intervals[layer, q, 0]) & (k <= intervals[layer, q, 1]))
        return seen

    return allowed


# -- forward and backward ------------------------------------------------------------------------------


def forward(into: Partial, q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, scale: float, softcap: float | None) -> None:
    blocks = tasks.compiled(compile_blocks)
    (a, b), (c, d) = blocks.q, blocks.k
    into.add(a, b, *_flex(q[a:b], k[c:d], v[c:d], blocks, scale, softcap))


def backward(
    into: tuple[Tensor, Tensor, Tensor],
    queries: QuerySide,
    k: Tensor,
    v: Tensor,
    tasks: Tasks,
    scale: float,
    softcap: float | None,
) -> None:
    blocks = tasks.compiled(compile_blocks)
    (a, b), (c, d) = blocks.q, blocks.k
    q, k, v = inputs = [x.detach().requires_grad_() for x in (queries.q[a:b], k[c:d], v[c:d])]
    with _recorded():
        block_out, block_lse = _flex(q, k, v, blocks, scale, softcap)
    lse, delta = queries.lse[:, a:b], queries.delta[:, a:b]
    grad = queries.grad_out[a:b].to(lse.dtype)
    weight = torch.where(lse > -torch.inf, torch.exp(block_lse.detach().to(lse.dtype) - lse), 0.0)
    own = (grad * block_out.detach().to(lse.dtype)).sum(-1).t()
    grad_out, grad_lse = weight.t()[..., None] * grad, weight * (own - delta)
    grads = torch.autograd.grad(
        (block_out, block_lse), inputs, (grad_out.to(block_out.dtype), grad_lse.to(block_lse.dtype))
    )
    for total, part, (start, stop) in zip(into, grads, (blocks.q, blocks.k, blocks.k), strict=True):
        total[start:stop] += part


@contextmanager
def _recorded() -> Iterator[None]:
    """Autograd records what runs here, also inside a registered operator, whose body lies below autograd."""
    below = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "ADInplaceOrView"):
        below = below.remove(getattr(torch._C.DispatchKey, key))
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), below):
        yield


def _flex(
    q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """out (Tq, H, Dv) and natural-log lse (H, Tq) of one FlexAttention call."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    def cap(score: Tensor, *_: Any) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    make: Any = BlockMask
    intervals, *lists = blocks.tables.on(q.device)
    block_mask = make(
        (len(q), len(k)),
        *(table[None, None] for table in lists),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_function(intervals),
    )
    out, aux = _compiled(flex_attention)(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),  # views: heads come first there
        score_mod=None if softcap is None else cap,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out[0].transpose(0, 1), aux.lse[0]


@lru_cache(maxsize=1)  # one function, for the life of the process
def _compiled(flex_attention: Any) -> Any:
    return torch.compile(flex_attention, dynamic=True)
