"""The causal convolution of `conv.py` as Triton kernels: one forward, a few back, whatever the segments are.

    forward     y = act(Σ_d tap_d · x_{t−d} + bias)                        one launch
    backward    dz = dy · act'(z), and sums over blocks of tokens          one launch
                dx_t = Σ_d tap_d · dz_{t+d};  halo rows likewise           one launch each
                gradients of weight and bias: blocks added up              one launch

A token reads its segment's halo where it would read beyond the start, in the same order of additions: cutting a
document changes no bit of its outputs. No atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longweave.kernels.triton_launch import launch, unit_rows
from longweave.tensors import Indices

BLOCK, SIDE = 64, 64  # tokens and channels of a program
BACK_BLOCK, ROUNDS = (
    16,
    32,
)  # of a program that also sums: small blocks do not spill, many of them give few partial sums


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, halo: Tensor | None, places: Indices, silu: bool) -> Tensor:
    """As `conv_forward`; `places`: first, behind-the-last token and number of every token's segment."""
    from longweave.kernels.recurrence.conv_kernels import forward_kernel

    x = unit_rows(x)
    tokens, channels = x.shape
    y = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    begin, _, segment, *_ = places.on(x.device)
    if y.numel():
        launch(
            forward_kernel, _grid(tokens, channels, BLOCK), y, x, weight.contiguous(), bias, halo, begin, segment,
            tokens, x.stride(0), channels, WIDTH=weight.shape[1], BLOCK=BLOCK, SIDE=SIDE,
            HAS_HALO=halo is not None, HAS_BIAS=bias is not None, SILU=silu,
        )  # fmt: skip
    return y


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, halo: Tensor | None, places: Indices, silu: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """As `conv_backward`."""
    from longweave.kernels.recurrence.conv_kernels import back_kernel, halo_kernel, slope_kernel

    x, dy, weight = unit_rows(x), unit_rows(dy), weight.contiguous()
    (tokens, channels), width = x.shape, weight.shape[1]
    begin, end, segment, starts, stops = places.on(x.device)
    dz, dx = (torch.empty((tokens, channels), dtype=torch.float32, device=x.device) for _ in range(2))
    grid = _grid(tokens, channels, BACK_BLOCK * ROUNDS)
    sums = torch.empty((grid[0], width + 1, channels), dtype=torch.float32, device=x.device)
    if dx.numel():
        launch(
            slope_kernel, grid, dz, sums, dy, x, weight, bias, halo, begin, segment, tokens,
            x.stride(0), dy.stride(0), channels, WIDTH=width, BLOCK=BACK_BLOCK, SIDE=SIDE, ROUNDS=ROUNDS,
            HAS_HALO=halo is not None, HAS_BIAS=bias is not None, SILU=silu,
        )  # fmt: skip
        launch(
            back_kernel, _grid(tokens, channels, BLOCK), dx, dz, weight, end, tokens, channels,
            WIDTH=width, BLOCK=BLOCK, SIDE=SIDE,
        )  # fmt: skip
    d_halo = None
    if halo is not None:
        d_halo = torch.empty(halo.shape, dtype=torch.float32, device=x.device)
        rows = halo.shape[0] * (width - 1)
        if d_halo.numel():
            launch(
                halo_kernel, _grid(rows, channels, BLOCK), d_halo, dz, weight, starts, stops, rows, channels,
                WIDTH=width, BLOCK=BLOCK, SIDE=SIDE,
            )  # fmt: skip
    total = sums.sum(0)
    d_bias = None if bias is None else total[width].to(bias.dtype)
    return dx, total[:width].t().to(weight.dtype), d_bias, d_halo


def _grid(rows: int, channels: int, block: int) -> tuple[int, int]:
    return -(-rows // block), -(-channels // SIDE)
