# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The Triton kernel of `outer`. Imported with the first launch, not before: this imports triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def outer_sums_kernel(
    x, w, d, sums, bounds, scale, x_token, x_head, d_token, d_head,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """A program sums a tile (BK, BV) of one segment and head."""
    row = tl.program_id(0).to(tl.int64)
    segment, head = row // H, row % H
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    start, stop = tl.load(bounds + segment), tl.load(bounds + segment + 1)
    total = tl.zeros((BK, BV), dtype=tl.float32)
    for first in range(start, stop, BT):
        t = (first + tl.arange(0, BT)).to(tl.int64)
        inside = t < stop
        keys = x + t[None, :] * x_token + (head // GROUP) * x_head + k[:, None]
        values = d + t[:, None] * d_token + head * d_head + v[None, :]
        key = tl.load(keys, mask=inside[None, :] & (k < K)[:, None], other=0.0)
        value = tl.load(values, mask=inside[:, None] & (v < V)[None, :], other=0.0)
        if WEIGHTED:
            weight = tl.load(w + t * H + head, mask=inside, other=0.0)
            value = (value * weight[:, None]).to(value.dtype)
        total += tl.dot(key, value, input_precision="ieee")
    out = sums + row * K * V + k[:, None] * V + v[None, :]
    tl.store(out, total * scale, mask=(k < K)[:, None] & (v < V)[None, :])
