# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `fused`. Imported with the first launch, not before: this imports triton.

A program of the first three holds a tile (BLOCK tokens, PADDED dim) of one head. Numbers of tokens change with every
batch, so they are not specialised; offsets are 64 bits wide where tokens are multiplied with strides. Strides come in
units of UNIT numbers (`triton_launch.in_units`).
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def trial_kernel(x):
    """Shows that Triton works here."""
    tl.store(x, 1.0)


@triton.jit
def _tile(tokens, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens of this program and its columns, with their masks."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, PADDED)
    inside = t < tokens
    return t, d, inside, inside[:, None] & (d < DIM)[None, :]


@triton.jit
def _places(x, t, d, head, token_stride, head_stride):
    return x + head * head_stride + t.to(tl.int64)[:, None] * token_stride + d[None, :]


@triton.jit
def _log_sum(a, b):
    """log(e^a + e^b), also where one of them or both are −∞."""
    top = tl.maximum(a, b)
    safe = tl.where(top == -INFINITY, 0.0, top)
    return safe + tl.log(tl.exp(a - safe) + tl.exp(b - safe))


@triton.jit
def _share(a, b):
    """e^a of e^a + e^b; 0 where a is −∞."""
    return tl.where(a == -INFINITY, 0.0, 1 / (1 + tl.exp(b - a)))


@triton.jit(do_not_specialize=["tokens", "lse_stride", "part_lse_stride"])
def merge_kernel(
    out, lse, part_out, part_lse, tokens,
    out_token, out_head, part_token, part_head, lse_stride, part_lse_stride,
    UNIT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    out_token, out_head = out_token * UNIT, out_head * UNIT
    part_token, part_head = part_token * UNIT, part_head * UNIT
    head = tl.program_id(1).to(tl.int64)
    t, d, inside, mask = _tile(tokens, DIM, PADDED, BLOCK)
    lse_at = lse + head * lse_stride + t
    mine = tl.load(lse_at, mask=inside, other=-INFINITY)
    theirs = tl.load(part_lse + head * part_lse_stride + t, mask=inside, other=-INFINITY).to(tl.float32)
    theirs = tl.where(theirs == INFINITY, -INFINITY, theirs)  # some kernels say so of rows that saw nothing
    seen = theirs > -INFINITY
    out_at = _places(out, t, d, head, out_token, out_head)
    a = tl.load(out_at, mask=mask, other=0.0)
    b = tl.load(_places(part_out, t, d, head, part_token, part_head), mask=mask & seen[:, None], other=0.0)
    merged = a + (b.to(tl.float32) - a) * _share(theirs, mine)[:, None]
    tl.store(out_at, merged, mask=mask & seen[:, None])
    tl.store(lse_at, _log_sum(mine, theirs), mask=inside & seen)


@triton.jit(do_not_specialize=["tokens", "lse_stride"])
def finish_kernel(
    out, lse, result, sinks, tokens, out_token, out_head, result_token, result_head, lse_stride,
    HAS_SINKS: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    out_token, out_head = out_token * UNIT, out_head * UNIT
    result_token, result_head = result_token * UNIT, result_head * UNIT
    head = tl.program_id(1).to(tl.int64)
    t, d, inside, mask = _tile(tokens, DIM, PADDED, BLOCK)
    x = tl.load(_places(out, t, d, head, out_token, out_head), mask=mask, other=0.0)
    if HAS_SINKS:
        lse_at = lse + head * lse_stride + t
        mine = tl.load(lse_at, mask=inside, other=-INFINITY)
        sink = tl.load(sinks + head).to(tl.float32)
        x = x * _share(mine, sink)[:, None]
        tl.store(lse_at, _log_sum(mine, sink), mask=inside)
    tl.store(_places(result, t, d, head, result_token, result_head), x.to(result.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "result_stride"])
def delta_kernel(
    grad_out, out, result, tokens, grad_token, grad_head, out_token, out_head, result_stride,
    UNIT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    grad_token, grad_head = grad_token * UNIT, grad_head * UNIT
    out_token, out_head = out_token * UNIT, out_head * UNIT
    head = tl.program_id(1).to(tl.int64)
    t, d, inside, mask = _tile(tokens, DIM, PADDED, BLOCK)
    grad = tl.load(_places(grad_out, t, d, head, grad_token, grad_head), mask=mask, other=0.0).to(tl.float32)
    x = tl.load(_places(out, t, d, head, out_token, out_head), mask=mask, other=0.0).to(tl.float32)
    tl.store(result + head * result_stride + t, tl.sum(grad * x, 1), mask=inside)


@triton.jit
def add_rows_kernel(
    total, rows, index, offsets, total_stride, rows_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program for one token, or for BLOCK of its columns: the order of its sum is the order of the list."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets + token)
    last = tl.load(offsets + token + 1)
    if first < last:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < WIDTH
        at = total + token * total_stride + column
        x = tl.load(at, mask=mask, other=0.0)
        for j in range(first, last):
            row = tl.load(index + j).to(tl.int64)
            x += tl.load(rows + row * rows_stride + column, mask=mask, other=0.0)
        tl.store(at, x, mask=mask)
