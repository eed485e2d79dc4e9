"""Causal depthwise convolution over packed segments, with the tokens before each segment as an input.

    z_t = bias + Σ_d weight[:, W−1−d] ⊙ x_{t−d},   d = 0 … W−1,      y = z or silu(z)

A segment does not see the one before it. What it does see beyond its own start is its halo: W−1 tokens that a
caller may pass (received from another rank, say), zeros by default::

    packed tokens      a a a a a a | b b b b | c |
    W = 4, edge tokens ^ ^ ^         ^ ^ ^     ^        the first W−1 of each segment
    halo (3, W−1)      A A A         B B B     C C C    the last one stands right before the segment

Inner tokens read only tokens of their own segment, so all of them are done as W shifted multiply-adds over
the whole buffer, in strips that stay in the cache. Edge tokens, few, are done through a small window table
that is made once from host integers: `conv_edges`, which a caller may keep for a batch. Backward is the same in
reverse: z is computed again, nothing but the inputs is kept, and no sum depends on the order of threads.

`conv_forward` and `conv_backward` are plain functions: the autograd Function around them also exchanges the halos.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from longweave.errors import InputError, shown
from longweave.kernels.recurrence import fused_conv
from longweave.kernels.recurrence.chunks import Segment
from longweave.kernels.triton_launch import serves
from longweave.tensors import Indices, accumulation_dtype, check_device, check_tensor

WIDTHS = range(2, 9)
STRIP_ELEMENTS = 1 << 18  # 1 MiB of float32: the measured optimum between cache misses and calls


def check_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    """Raise InputError if shapes, width or activation do not fit."""
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise InputError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; give (tokens, C) and (C, width)"
        )
    width = weight.shape[1]
    if width not in WIDTHS:
        raise InputError(f"the convolution has width {width}; widths 2 to 8 are supported")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias has shape {tuple(bias.shape)}; it must be ({weight.shape[0]},)")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_tensor(name, tensor, floating=True)
            check_device(name, tensor, "x", x)
    if not (activation is None or (isinstance(activation, str) and activation == "silu")):
        raise InputError(f'activation is {shown(activation)}; choose None or "silu"')


@dataclass(frozen=True, eq=False)
class Edges:
    """The first width − 1 tokens of every segment, and what they read; for fused kernels, where segments lie.

    `pool` means the rows [edge tokens; halo rows].
    """

    spans: tuple[Segment, ...]

    tokens: np.ndarray  # (edges,)
    windows: np.ndarray  # (edges, width) rows of the pool, oldest first
    readers: np.ndarray  # (pool rows, width) entries of `windows` (flat) that read a row, or `edges · width`

    @cached_property
    def index(self) -> Indices:
        return Indices(self.tokens, self.windows, self.readers)

    @cached_property
    def places(self) -> Indices:
        """First and behind-the-last token and number of every token's segment, and the first two of every segment."""
        starts, stops = np.array(self.spans, dtype=np.int32).reshape(-1, 2).T
        segment = np.repeat(np.arange(len(starts), dtype=np.int32), stops - starts)
        return Indices(starts[segment], stops[segment], segment, starts.copy(), stops.copy())


def conv_edges(spans: Sequence[Segment], width: int) -> Edges:
    """The edges of segments given as (start, stop) of the packed tokens: what a convolution of this width needs."""
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    lengths = np.array([stop - start for start, stop in spans], dtype=np.int64)
    counts = np.minimum(lengths, width - 1)
    segment = np.repeat(np.arange(len(spans)), counts)
    first = np.cumsum(counts) - counts  # of each segment, in the list of edges
    position = np.arange(len(segment)) - first[segment]
    source = position[:, None] - np.arange(width - 1, -1, -1)[None, :]  # in the segment; < 0 is the halo
    halo_row = len(segment) + segment[:, None] * (width - 1) + (width - 1) + source
    windows = np.where(source >= 0, first[segment][:, None] + source, halo_row)
    rows = len(segment) + len(spans) * (width - 1)
    readers = np.full((rows, width), windows.size, dtype=np.int64)
    readers[windows.reshape(-1), np.tile(np.arange(width), len(segment))] = np.arange(windows.size)
    return Edges(tuple(spans), starts[segment] + position, windows, readers)


def conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, halo: Tensor | None, edges: Edges, silu: bool
) -> Tensor:
    """y (tokens, C) in the dtype of x, summed in float32 (float64 for float64).

    x (tokens, C), weight (C, width), bias (C,) or None. halo (segments, width − 1, C): the tokens right before each
    segment, zeros where there are none; None is all zeros.
    """
    if serves(x) and serves(weight):
        return fused_conv.forward(x, weight, bias, halo, edges.places, silu)
    taps, offset = _taps(x, weight, bias)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for lo, hi, z in _inner(x, taps, offset):
        y[lo:hi] = _silu_(z) if silu else z
    tokens, windows, _ = edges.index.on(x.device)
    z = (_pool(x, halo, edges, taps)[windows] * taps).sum(1)
    z = z if offset is None else z.add_(offset)
    return y.index_copy_(0, tokens, (_silu_(z) if silu else z).to(y.dtype))


def conv_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, halo: Tensor | None, edges: Edges, silu: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and halo; None where there is no bias or halo.

    Those of x and halo are still in float32 (float64 for float64): gradients of tokens that were another rank's halo
    are added to that of x before the one cast.
    """
    if serves(x) and serves(weight):
        return fused_conv.backward(dy, x, weight, bias, halo, edges.places, silu)
    taps, offset = _taps(x, weight, bias)
    width = len(taps)
    tokens, windows, readers = edges.index.on(x.device)

    seen = _pool(x, halo, edges, taps)[windows]  # (edges, width, C)
    dz_edge = dy.index_select(0, tokens).to(taps.dtype)
    if silu:
        z = (seen * taps).sum(1)
        dz_edge = dz_edge * _silu_slope(z if offset is None else z + offset)
    d_taps, d_offset = (seen * dz_edge.unsqueeze(1)).sum(0), dz_edge.sum(0)

    # dz of inner tokens, with width − 1 rows of zeros behind it for the shifts.
    dz = taps.new_zeros((len(x) + width - 1, x.shape[1]))
    for lo, hi, z in _inner(x, taps, offset, needed=silu):
        dz[lo:hi] = dy[lo:hi]
        if silu:
            dz[lo:hi] *= _silu_slope(z)
    dz.index_fill_(0, tokens, 0)
    dx = taps.new_empty(x.shape)
    for lo, hi in _strips(len(x), x):
        strip = x[lo:hi].to(taps.dtype)
        back = torch.mul(dz[lo:hi], taps[-1], out=dx[lo:hi])
        d_taps[-1] += (strip * dz[lo:hi]).sum(0)
        for d in range(1, width):
            back.addcmul_(dz[lo + d : hi + d], taps[-1 - d])
            d_taps[-1 - d] += (strip * dz[lo + d : hi + d]).sum(0)
        d_offset += dz[lo:hi].sum(0)

    # What edge tokens give back to the rows that they read.
    by_window = (dz_edge.unsqueeze(1) * taps).flatten(0, 1)
    by_window = torch.cat([by_window, by_window.new_zeros((1, x.shape[1]))])
    d_pool = by_window[readers].sum(1)
    dx.index_add_(0, tokens, d_pool[: len(tokens)])  # tokens are distinct: no order to depend on
    d_halo = None if halo is None else d_pool[len(tokens) :].view(halo.shape)
    return dx, d_taps.t().to(weight.dtype), None if bias is None else d_offset.to(bias.dtype), d_halo


def _taps(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """weight (width, C) and bias in the dtype in which everything is summed."""
    dtype = accumulation_dtype(torch.promote_types(x.dtype, weight.dtype))
    return weight.to(dtype).t().contiguous(), None if bias is None else bias.to(dtype)


def _strips(tokens: int, x: Tensor) -> Iterator[tuple[int, int]]:
    size = max(16, STRIP_ELEMENTS // max(1, x.shape[1])) if x.device.type == "cpu" else max(1, tokens)
    for lo in range(0, tokens, size):
        yield lo, min(lo + size, tokens)


def _inner(x: Tensor, taps: Tensor, offset: Tensor | None, *, needed: bool = True) -> Iterator[tuple[int, int, Tensor]]:
    """(lo, hi, z) strip by strip, as if there were no borders: right for all but edge tokens."""
    width = len(taps)
    for lo, hi in _strips(len(x), x):
        if not needed:
            yield lo, hi, x[:0]
            continue
        before = max(0, lo - width + 1)
        strip = x[before:hi].to(taps.dtype)
        z = strip[lo - before :] * taps[-1]
        for d in range(1, min(width, hi)):
            skip = max(0, d - lo)  # tokens 0 … d−1 of the buffer have nothing d before them
            z[skip:].addcmul_(strip[lo - before + skip - d : hi - before - d], taps[-1 - d])
        yield lo, hi, z if offset is None else z.add_(offset)


def _pool(x: Tensor, halo: Tensor | None, edges: Edges, taps: Tensor) -> Tensor:
    """Everything that edge tokens may read: themselves, then the halos."""
    own = x.index_select(0, edges.index.on(x.device)[0]).to(taps.dtype)
    if halo is None:
        beyond = taps.new_zeros((len(edges.readers) - len(own), x.shape[1]))
    else:
        beyond = halo.to(taps.dtype).flatten(0, 1)
    return torch.cat([own, beyond])


def _silu_(z: Tensor) -> Tensor:
    return torch.nn.functional.silu(z, inplace=True)


def _silu_slope(z: Tensor) -> Tensor:
    """d silu(z) / dz = σ(z) (1 + z (1 − σ(z)))."""
    s = torch.sigmoid(z)
    return z.mul(1 - s).add_(1).mul_(s)
