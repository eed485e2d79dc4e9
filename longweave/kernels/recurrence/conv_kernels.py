# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton kernels of `fused_conv`. Imported with the first launch, not before: this imports triton.

A program holds BLOCK tokens × SIDE channels. `begin` and `end` are the first and behind-the-last token of every token's
segment, `segment` its number: a token that would read beyond its segment's start reads the segment's halo.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _before(x, halo, t, c, begin, segment, mask, x_token, d, C, WIDTH: tl.constexpr, HAS_HALO: tl.constexpr):
    """What stands d tokens before each token, in float32: a token of its segment, or a row of its halo, or zero."""
    source = t - d
    inside = source >= begin
    value = tl.load(x + source.to(tl.int64)[:, None] * x_token + c[None, :], mask=mask & inside[:, None], other=0.0)
    value = value.to(tl.float32)
    if HAS_HALO:
        row = segment * (WIDTH - 1) + (WIDTH - 1) + (source - begin)
        beyond = tl.load(halo + row.to(tl.int64)[:, None] * C + c[None, :], mask=mask & (~inside)[:, None], other=0.0)
        value = tl.where(inside[:, None], value, beyond.to(tl.float32))
    return value


@triton.jit
def _tile(tokens, C, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    return t, c, (t < tokens)[:, None] & (c < C)[None, :]


@triton.jit
def _sums(x, taps, bias, halo, t, c, begin, segment, mask, x_token, C,
          WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIDE: tl.constexpr,
          HAS_HALO: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """z, one tap after the other: the same order wherever a document is cut."""
    z = tl.zeros([BLOCK, SIDE], tl.float32)
    for d in tl.static_range(WIDTH):
        tap = tl.load(taps + c * WIDTH + WIDTH - 1 - d, mask=c < C, other=0.0).to(tl.float32)
        z += _before(x, halo, t, c, begin, segment, mask, x_token, d, C, WIDTH, HAS_HALO) * tap[None, :]
    if HAS_BIAS:
        z += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(
    y, x, taps, bias, halo, begin, segment, tokens, x_token, C,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIDE: tl.constexpr,
    HAS_HALO: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    t, c, mask = _tile(tokens, C, BLOCK, SIDE)
    first = tl.load(begin + t, mask=t < tokens, other=0)
    number = tl.load(segment + t, mask=t < tokens, other=0)
    z = _sums(x, taps, bias, halo, t, c, first, number, mask, x_token, C, WIDTH, BLOCK, SIDE, HAS_HALO, HAS_BIAS)
    if SILU:
        z = z / (1 + tl.exp(-z))
    tl.store(y + t.to(tl.int64)[:, None] * C + c[None, :], z.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def slope_kernel(
    dz, sums, dy, x, taps, bias, halo, begin, segment, tokens, x_token, dy_token, C,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIDE: tl.constexpr, ROUNDS: tl.constexpr,
    HAS_HALO: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """dz of ROUNDS blocks of tokens, and the sums (WIDTH + 1, C) that they add to the gradients of weight and bias.

    Blocks are small, as a program holds several tensors of that size; the sums are the rows of one small tile.
    """
    c = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    row = tl.arange(0, 16)  # more than there are: 8 taps and the bias
    total = tl.zeros([16, SIDE], tl.float32)
    start = tl.program_id(0) * ROUNDS
    for block in range(start, tl.minimum(start + ROUNDS, tl.cdiv(tokens, BLOCK))):
        t = block * BLOCK + tl.arange(0, BLOCK)
        mask = (t < tokens)[:, None] & (c < C)[None, :]
        first = tl.load(begin + t, mask=t < tokens, other=0)
        number = tl.load(segment + t, mask=t < tokens, other=0)
        grad = tl.load(dy + t.to(tl.int64)[:, None] * dy_token + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if SILU:
            z = _sums(
                x, taps, bias, halo, t, c, first, number, mask, x_token, C, WIDTH, BLOCK, SIDE, HAS_HALO, HAS_BIAS
            )  # fmt: skip
            s = 1 / (1 + tl.exp(-z))
            grad = grad * (s * (1 + z * (1 - s)))
        tl.store(dz + t.to(tl.int64)[:, None] * C + c[None, :], grad, mask=mask)
        for d in tl.static_range(WIDTH):
            seen = _before(x, halo, t, c, first, number, mask, x_token, d, C, WIDTH, HAS_HALO)
            total += tl.where((row == WIDTH - 1 - d)[:, None], tl.sum(seen * grad, 0)[None, :], 0.0)
        total += tl.where((row == WIDTH)[:, None], tl.sum(grad, 0)[None, :], 0.0)
    out = sums + (tl.program_id(0).to(tl.int64) * (WIDTH + 1) + row)[:, None] * C + c[None, :]
    tl.store(out, total, mask=(row <= WIDTH)[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def back_kernel(
    dx, dz, taps, end, tokens, C, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    """dx of every token, from the tokens behind it in its segment."""
    t, c, mask = _tile(tokens, C, BLOCK, SIDE)
    last = tl.load(end + t, mask=t < tokens, other=0)
    total = tl.zeros([BLOCK, SIDE], tl.float32)
    for d in tl.static_range(WIDTH):
        tap = tl.load(taps + c * WIDTH + WIDTH - 1 - d, mask=c < C, other=0.0).to(tl.float32)
        reader = (t + d).to(tl.int64)
        inside = mask & (t + d < last)[:, None]
        total += tl.load(dz + reader[:, None] * C + c[None, :], mask=inside, other=0.0) * tap[None, :]
    tl.store(dx + t.to(tl.int64)[:, None] * C + c[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def halo_kernel(
    d_halo, dz, taps, starts, stops, rows, C, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    """Of every halo row, from the first tokens of its segment."""
    r, c, mask = _tile(rows, C, BLOCK, SIDE)
    segment, j = r // (WIDTH - 1), r % (WIDTH - 1)
    start = tl.load(starts + segment, mask=r < rows, other=0)
    stop = tl.load(stops + segment, mask=r < rows, other=0)
    total = tl.zeros([BLOCK, SIDE], tl.float32)
    for d in tl.static_range(1, WIDTH):
        tap = tl.load(taps + c * WIDTH + WIDTH - 1 - d, mask=c < C, other=0.0).to(tl.float32)
        reader = start + j - (WIDTH - 1) + d
        inside = mask & ((reader >= start) & (reader < stop))[:, None]
        total += tl.load(dz + reader.to(tl.int64)[:, None] * C + c[None, :], mask=inside, other=0.0) * tap[None, :]
    tl.store(d_halo + r.to(tl.int64)[:, None] * C + c[None, :], total, mask=mask)
