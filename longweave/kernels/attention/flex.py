"""FlexAttention on CUDA, with a block mask made from the tasks.

A query row carries the list of key intervals that it may see; the mask function looks them up. FlexAttention's own
backward knows nothing of other partials, so the backward here recomputes the block's (out, lse) with autograd and feeds
it the gradients that the merge implies:

    w = e^(lse_block − lse)     d out_block = w · dO     d lse_block = w · (⟨dO, out_block⟩ − ⟨dO, out⟩)

No GPU has run this yet: the mask is tested, and the backward formula with a stand-in for the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longweave.kernels.attention.partial import NO_LIMIT, Partial, QuerySide, TaskRows, Tasks

BLOCK = 128


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if q.device.type != "cuda":
        return f"tensors are on {q.device.type}"
    if q.dtype == torch.float64:
        return "it has no float64"
    return None


def compile_intervals(rows: TaskRows) -> tuple[int, npt.NDArray[np.int64]]:
    """(number of queries, intervals): intervals[n, q] = (first key, last key) of the n-th task that has query q."""
    queries = int(rows[:, 1].max())
    depth = np.zeros(queries, dtype=np.int64)
    layers: list[npt.NDArray[np.int64]] = []
    for q0, q1, k0, k1, lo, hi in rows.tolist():
        level = int(depth[q0:q1].max())
        if level == len(layers):
            layers.append(np.tile(np.array([1, 0]), (queries, 1)))  # an empty interval
        q = np.arange(q0, q1)
        layers[level][q0:q1, 0] = np.maximum(k0, q + lo) if lo > -NO_LIMIT else k0
        layers[level][q0:q1, 1] = np.minimum(k1 - 1, q + hi) if hi < NO_LIMIT else k1 - 1
        depth[q0:q1] = level + 1
    return queries, np.stack(layers)


def mask_function(intervals: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's mask_mod for intervals (layers, queries, 2)."""

    def allowed(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k >= intervals[0, q, 0]) & (k <= intervals[0, q, 1])
        for layer in range(1, intervals.shape[0]):
            seen = seen | ((k >= intervals[layer, q, 0]) & (k <= intervals[layer, q, 1]))
        return seen

    return allowed


def forward(into: Partial, q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, scale: float, softcap: float | None) -> None:
    count, _ = tasks.compiled(compile_intervals)
    out, lse = flex_call(q[:, :count], k, v, tasks, scale, softcap)
    into.add_some(0, count, out, lse)


def backward(
    into: tuple[Tensor, Tensor, Tensor],
    queries: QuerySide,
    k: Tensor,
    v: Tensor,
    tasks: Tasks,
    scale: float,
    softcap: float | None,
) -> None:
    count, _ = tasks.compiled(compile_intervals)
    inputs = queries.q[:, :count].detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
    with torch.enable_grad():
        block_out, block_lse = flex_call(*inputs, tasks, scale, softcap)
    lse, grad = queries.lse[:, :count], queries.grad_out[:, :count].to(queries.lse.dtype)
    weight = torch.where(lse > -torch.inf, torch.exp(block_lse.detach().to(lse.dtype) - lse), 0.0)
    grad_block_out = weight[..., None] * grad
    own = (grad * block_out.detach().to(lse.dtype)).sum(-1)
    grad_block_lse = weight * (own - queries.delta[:, :count])
    grads = torch.autograd.grad(
        (block_out, block_lse), inputs, (grad_block_out.to(block_out.dtype), grad_block_lse.to(block_lse.dtype))
    )
    into[0][:, :count] += grads[0]
    into[1].add_(grads[1])
    into[2].add_(grads[2])


def flex_call(
    q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """out (H, Tq, Dv) and natural-log lse (H, Tq) of one FlexAttention call."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def cap(score: Tensor, *_: Any) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    block_mask = tasks.compiled(_block_mask_on(q.device, k.shape[1]))
    out, aux = _compiled(flex_attention)(
        q[None],
        k[None],
        v[None],
        score_mod=None if softcap is None else cap,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[0] != k.shape[0],
        return_aux=AuxRequest(lse=True),
    )
    return out[0], aux.lse[0]


@lru_cache(maxsize=1)  # one function, for the life of the process
def _compiled(flex_attention: Any) -> Any:
    return torch.compile(flex_attention, dynamic=True)


@dataclass(frozen=True)
class _block_mask_on:  # noqa: N801 - used as a function; equal arguments find the mask that was made
    device: torch.device
    keys: int

    def __call__(self, rows: TaskRows) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        queries, intervals = compile_intervals(rows)
        counts, indices = (torch.from_numpy(x)[None, None].to(self.device) for x in touched_blocks(rows, self.keys))
        table = torch.from_numpy(intervals).to(self.device)
        return BlockMask.from_kv_blocks(
            counts, indices, BLOCK_SIZE=BLOCK, mask_mod=mask_function(table), seq_lengths=(queries, self.keys)
        )


def touched_blocks(rows: TaskRows, keys: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """For each block of queries, how many blocks of keys its tasks touch, and which (the rest of the row is filler)."""
    queries = int(rows[:, 1].max())
    touched = np.zeros((-(-queries // BLOCK), -(-keys // BLOCK)), dtype=bool)
    for q0, q1, k0, k1, lo, hi in rows.tolist():
        for block in range(q0 // BLOCK, -(-q1 // BLOCK)):
            first, last = max(q0, block * BLOCK), min(q1, (block + 1) * BLOCK)
            left = max(k0, first + lo) if lo > -NO_LIMIT else k0
            right = min(k1, last + hi) if hi < NO_LIMIT else k1
            touched[block, left // BLOCK : -(-right // BLOCK)] = True
    order = np.argsort(~touched, axis=1, kind="stable").astype(np.int32)
    return touched.sum(1, dtype=np.int32), order
