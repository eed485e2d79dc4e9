"""Attention over a list of tasks in Triton: one launch, whatever the tasks are.

    forward     a program for each block of queries and head ──▶ merged with out and lse in its registers
    backward    a program for each block of queries and head ──▶ added to dq
                a program for each block of keys and K/V head ──▶ added to dk and dv

Any mask, softcap, grouped heads, head dims up to 256 that need not be equal. Nothing is gathered, padded or copied, and
nothing is added in an order that could change: the same input gives the same bits. Short documents may share a tile, so
that an infinite value in one makes its neighbours NaN, too. The lists that programs walk over are made once for each
list of tasks (`span_lists`); the kernels are in `span_kernels`.
"""

from __future__ import annotations

from bisect import bisect_left
from math import e, log2
from typing import NamedTuple

import torch
from torch import Tensor

from longweave.kernels import triton_launch
from longweave.kernels.attention.partial import Partial, QuerySide, Tasks
from longweave.kernels.attention.span_lists import ListsFor
from longweave.kernels.triton_launch import in_units, launch, unit_rows

MAX_DIM = 256
LOG2_E = log2(e)


class Tiles(NamedTuple):
    """Rows of a program's own block, rows of a step over the other side, warps, stages of the pipeline."""

    block: int
    step: int
    warps: int
    stages: int


# For 16-bit inputs, by compute capability and by what both padded head dims are together. Rows of 80 serve every other
# device, too: they fit 99 KB of shared memory. Tests compile all of these, and look at their memory and spills.
SIZES = (128, 256, 384, 512)
TILES: dict[str, dict[int, tuple[Tiles, ...]]] = {
    "forward": {
        80: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
        90: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
        100: (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2)),
    },
    "dq": {
        80: (Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),
        90: (Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
        100: (Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 1)),
    },
    "dkv": {
        80: (Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),
        90: (Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 16, 8, 2)),
        100: (Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1)),
    },
}
# float32 is for looking closely: without tensor cores, and small enough for every device.
FLOAT32_TILES = (Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1))


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The reason why this backend cannot serve, or None."""
    if reason := triton_launch.why_not(q):
        return reason
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; it takes one dtype"
    if max(q.shape[-1], v.shape[-1]) > MAX_DIM:
        return f"head dims are {q.shape[-1]} and {v.shape[-1]}; it takes up to {MAX_DIM}"
    return None


def tiles_for(kernel: str, dim: int, v_dim: int, dtype: torch.dtype, capability: int) -> Tiles:
    """The tiles of a kernel for these head dims on a device of this compute capability (80, 90, …)."""
    size = bisect_left(SIZES, padded(dim) + padded(v_dim))
    if dtype == torch.float32:
        return FLOAT32_TILES[size]
    family = 100 if 100 <= capability < 120 else 90 if capability == 90 else 80
    return TILES[kernel][family][size]


def padded(dim: int) -> int:
    """What tiles can have. Tensor cores want at least 16."""
    return max(16, triton_launch.power_of_two(dim))


def forward(
    into: Partial, q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, scale: float, softcap: float | None, fresh: bool
) -> None:
    """Add to `into` what q (Tq, H, D) sees in k (Tk, Hk, D), v (Tk, Hk, Dv). `fresh`: `into` has seen nothing yet."""
    from longweave.kernels.attention.span_kernels import forward_kernel

    q, k, v = unit_rows(q), unit_rows(k), unit_rows(v)
    tiles = tiles_for("forward", q.shape[-1], v.shape[-1], q.dtype, triton_launch.capability(q.device))
    lists = tasks.compiled(ListsFor(False, tiles.block, tiles.step))
    if not lists.programs:
        return
    unit, strides = in_units(q, k, v, into.out)
    launch(
        forward_kernel,
        (lists.programs * q.shape[1],),
        *(q, k, v, into.out, into.lse, *lists.array.on(q.device)),
        *_factors(scale, softcap),
        q.shape[0],
        *strides,
        into.lse.stride(0),
        **_meta(q, k, v, q.shape[1], tiles, softcap),
        UNIT=unit,
        FRESH=fresh,
    )


def backward(
    into: tuple[Tensor, Tensor, Tensor],
    queries: QuerySide,
    k: Tensor,
    v: Tensor,
    tasks: Tasks,
    scale: float,
    softcap: float | None,
) -> None:
    """Add to `into` = (dq, dk, dv), in float32, what these tasks contribute."""
    from longweave.kernels.attention.span_kernels import dkv_kernel, dq_kernel

    dq, dk, dv = into
    q, k, v, grad_out = (unit_rows(x) for x in (queries.q, k, v, queries.grad_out))
    lse, delta = queries.lse, queries.delta
    shape = q.shape[-1], v.shape[-1], q.dtype, triton_launch.capability(q.device)

    tiles = tiles_for("dq", *shape)
    lists = tasks.compiled(ListsFor(False, tiles.block, tiles.step))
    if not lists.programs:
        return
    unit, strides = in_units(dq, q, k, v, grad_out)
    launch(
        dq_kernel,
        (lists.programs * q.shape[1],),
        *(dq, q, k, v, grad_out, lse, delta, *lists.array.on(q.device)),
        *(*_factors(scale, softcap), scale),
        q.shape[0],
        *strides,
        *(lse.stride(0), delta.stride(0)),
        **_meta(q, k, v, q.shape[1], tiles, softcap),
        UNIT=unit,
    )
    tiles = tiles_for("dkv", *shape)
    lists = tasks.compiled(ListsFor(True, tiles.block, tiles.step))
    unit, strides = in_units(dk, dv, q, k, v, grad_out)
    launch(
        dkv_kernel,
        (lists.programs * k.shape[1],),
        *(dk, dv, q, k, v, grad_out, lse, delta, *lists.array.on(q.device)),
        *(*_factors(scale, softcap), scale),
        k.shape[0],
        *strides,
        *(lse.stride(0), delta.stride(0)),
        **_meta(q, k, v, k.shape[1], tiles, softcap),
        UNIT=unit,
    )


def _factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """`inner` and `outer`, by which the kernels make logits in base 2 of raw products."""
    return (0.0, scale * LOG2_E) if softcap is None else (scale / softcap, softcap * LOG2_E)


def _meta(q: Tensor, k: Tensor, v: Tensor, heads: int, tiles: Tiles, softcap: float | None) -> dict[str, object]:
    return {
        "HEADS": heads,
        "GROUP": q.shape[1] // k.shape[1],
        "D": q.shape[-1],
        "DV": v.shape[-1],
        "D_PADDED": padded(q.shape[-1]),
        "DV_PADDED": padded(v.shape[-1]),
        "BLOCK": tiles.block,
        "STEP": tiles.step,
        "CAPPED": softcap is not None,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
