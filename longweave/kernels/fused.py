"""Passes over attention results that are one Triton kernel each on a GPU; those who call them have plain torch, too.

    merge       two partials become one, in place
    finish      sinks, and the cast to the dtype of the inputs
    delta       ⟨grad_out, out⟩ of every query and head
    add_rows    rows that came back from several ranks, added to the tokens they belong to, in rank order

Each reads and writes every number once. Tensors (T, H, D) may have any strides of tokens and heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longweave.kernels.triton_launch import in_units, launch, power_of_two, unit_rows

TILE = 4096  # numbers that a program holds of each tensor


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """out (T, H, Dv), lse (H, T), in place; rows of the part that saw nothing have lse = ±∞."""
    from longweave.kernels.fused_kernels import merge_kernel

    part_out, part_lse = unit_rows(part_out), unit_rows(part_lse)
    tokens, heads, dim = out.shape
    grid, meta = _tiles(tokens, heads, dim)
    unit, strides = in_units(out, part_out)
    strides = *strides, lse.stride(0), part_lse.stride(0)
    if out.numel():
        launch(merge_kernel, grid, out, lse, part_out, part_lse, tokens, *strides, UNIT=unit, **meta)


def finish(out: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A new (T, H, Dv) in `dtype`; lse gains the sinks (H,), in place."""
    from longweave.kernels.fused_kernels import finish_kernel

    result = torch.empty(out.shape, dtype=dtype, device=out.device)
    tokens, heads, dim = out.shape
    grid, meta = _tiles(tokens, heads, dim)
    unit, strides = in_units(out, result)
    sinks = None if sinks is None else sinks.contiguous()
    if out.numel():
        options = {"HAS_SINKS": sinks is not None, "UNIT": unit, **meta}
        launch(finish_kernel, grid, out, lse, result, sinks, tokens, *strides, lse.stride(0), **options)
    return result


def delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """(H, T) in float32."""
    from longweave.kernels.fused_kernels import delta_kernel

    grad_out, out = unit_rows(grad_out), unit_rows(out)
    tokens, heads, dim = out.shape
    result = torch.empty((heads, tokens), dtype=torch.float32, device=out.device)
    grid, meta = _tiles(tokens, heads, dim)
    unit, strides = in_units(grad_out, out)
    if out.numel():
        launch(delta_kernel, grid, grad_out, out, result, tokens, *strides, result.stride(0), UNIT=unit, **meta)
    return result


def add_rows(total: Tensor, rows: Tensor, index: Tensor, offsets: Tensor) -> None:
    """total[t] += Σ rows[index[j]], offsets[t] <= j < offsets[t + 1], added in that order.

    total (T, …) and rows (n, …) in float32; index and offsets in int32 or int64. Tokens without rows are not touched.
    """
    from longweave.kernels.fused_kernels import add_rows_kernel

    if not total.numel() or not index.numel():
        return
    flat_total, flat_rows = total.view(len(total), -1), rows.view(len(rows), -1)
    width = flat_total.shape[1]
    block = min(power_of_two(width), 1024)
    grid = len(total), -(-width // block)
    strides = flat_total.stride(0), flat_rows.stride(0)
    launch(
        add_rows_kernel,
        grid,
        flat_total,
        flat_rows,
        index,
        offsets,
        *strides,
        WIDTH=width,
        BLOCK=block,
        num_warps=4 if block >= 512 else 1,
    )


def _tiles(tokens: int, heads: int, dim: int) -> tuple[tuple[int, int], dict[str, int]]:
    """A program takes some tokens of one head."""
    padded = power_of_two(dim)
    block = max(1, TILE // padded)
    return (-(-tokens // block), heads), {"DIM": dim, "PADDED": padded, "BLOCK": block}
