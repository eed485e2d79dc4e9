"""Sums of outer products over segments: C = scale · Σ_t x_t (w_t d_t)ᵀ for every segment and head, in one launch.

    x (tokens, Hk, K), w (tokens, H) or None, d (tokens, H, V)  ──▶  C (segments, H, K, V) in float32

Every number of C is summed by one program in the order of the tokens: the same bits in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longweave.kernels.recurrence.segments import Segments
from longweave.kernels.triton_launch import launch, power_of_two, unit_rows

BLOCK = 64


def outer_sums(x: Tensor, w: Tensor | None, d: Tensor, scale: float, segments: Segments) -> Tensor:
    """Segments fill the tokens in order and none is empty. x and d have one dtype; heads of x repeat as in GQA."""
    from longweave.kernels.recurrence.outer_kernels import outer_sums_kernel

    (_, Hk, K), (_, H, V), N = x.shape, d.shape, len(segments.spans)
    sums = torch.empty((N, H, K, V), dtype=torch.float32, device=d.device)
    if not sums.numel():
        return sums
    x, d = unit_rows(x), unit_rows(d)
    w = None if w is None else w.contiguous()
    side_k, side_v = (min(BLOCK, max(16, power_of_two(size))) for size in (K, V))
    grid = (N * H, -(-K // side_k), -(-V // side_v))
    strides = *x.stride()[:2], *d.stride()[:2]
    launch(
        outer_sums_kernel, grid, x, w, d, sums, segments.bounds(d.device).on_device, scale, *strides,
        H=H, GROUP=H // Hk, K=K, V=V, BK=side_k, BV=side_v, BT=BLOCK, WEIGHTED=w is not None,
    )  # fmt: skip
    return sums
