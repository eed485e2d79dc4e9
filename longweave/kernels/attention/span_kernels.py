# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `spans`. Imported with the first launch, not before: this imports triton.

A program owns one block of queries (forward, dq) or of keys (dk and dv) of one head, and walks over the other side:

    full segments    [start, stop), whole steps that the whole block sees: nothing is compared
    edge segments    [start, stop) of which each row sees an interval of its own: two comparisons

and so it alone writes its rows: no atomics, and the order of every sum is fixed by the lists (`span_lists`).

Logits are kept in base 2: x = log₂e · softcap(scale · ⟨q, k⟩), by two factors that the host makes:

    x = ⟨q, k⟩ · outer                        outer = log₂e · scale
    x = tanh(⟨q, k⟩ · inner) · outer          outer = log₂e · softcap, inner = scale / softcap

Numbers of tokens change with every batch and are not specialised. Tiles start at 64-bit addresses. Strides come in
units of UNIT numbers (`triton_launch.in_units`).
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(1 << 30)


@triton.jit
def _tile(x, start, token_stride, rows, dims, DIM: tl.constexpr, inside, MASKED: tl.constexpr):
    """The rows start + `rows` of x, padded with zeros to the columns `dims`; of MASKED ones those that are `inside`."""
    at = x + tl.cast(start, tl.int64) * token_stride + (rows[:, None] * token_stride + dims[None, :])
    if MASKED:
        if dims.shape[0] == DIM:
            tile = tl.load(at, mask=inside[:, None], other=0.0)
        else:
            tile = tl.load(at, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    elif dims.shape[0] == DIM:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def _add(x, start, token_stride, rows, dims, DIM: tl.constexpr, inside, more):
    """Add a tile to the rows start + `rows` of x that are `inside`."""
    at = x + tl.cast(start, tl.int64) * token_stride + (rows[:, None] * token_stride + dims[None, :])
    mask = inside[:, None] & (dims < DIM)[None, :]
    tl.store(at, tl.load(at, mask=mask, other=0.0) + more, mask=mask)


@triton.jit
def _own(lists, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """What this program owns: its entry in the lists, its head, where its block starts, rows of it, rows of all."""
    program = lists + tl.program_id(0) // HEADS * 5
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    start = tl.load(program)
    own = tl.arange(0, BLOCK)
    return program, head, start, own, start + own


@triton.jit
def _dot(a, b):
    """In float32. Tensor cores would round float32 inputs to 10 bits unless told not to."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _capped(x, inner, outer, CAPPED: tl.constexpr):
    """The logits in base 2 of raw products, and their slope before `outer` and `inner` (1 without a cap)."""
    if CAPPED:
        capped = 1 - 2 / (1 + tl.exp(2 * inner * x))
        logits, slope = capped * outer, 1 - capped * capped
    else:
        logits, slope = x * outer, 1.0
    return logits, slope


@triton.jit
def _intervals(lists, edge, own):
    """For each own row the interval [first, last] of the other side that it sees in the pieces of an edge segment."""
    first = tl.zeros_like(own) + FAR
    last = tl.zeros_like(own) - FAR
    for piece in range(tl.load(lists + edge + 2), tl.load(lists + edge + 3), 6):
        own_start = tl.load(lists + piece)
        own_stop = tl.load(lists + piece + 1)
        start = tl.load(lists + piece + 2)
        stop = tl.load(lists + piece + 3)
        lo = tl.load(lists + piece + 4)
        hi = tl.load(lists + piece + 5)
        mine = (own >= own_start) & (own < own_stop)
        first = tl.where(mine, tl.maximum(own + lo, start), first)
        last = tl.where(mine, tl.minimum(own + hi, stop - 1), last)
    return first, last


@triton.jit
def _seen(x, others, first, last):
    """Logits x (own, others) of what each own row sees, −∞ elsewhere."""
    return tl.where((others[None, :] >= first[:, None]) & (others[None, :] <= last[:, None]), x, -INFINITY)


# -- forward -------------------------------------------------------------------------------------------


@triton.jit
def _forward_steps(
    acc, total, top, q, k, v, start, stop, first, last, k_token, v_token, inner, outer,
    D: tl.constexpr, DV: tl.constexpr, DV_PADDED: tl.constexpr, STEP: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One segment of keys: acc = Σ e^(x − top) v, total = Σ e^(x − top), top = max x, as it goes."""
    step = tl.arange(0, STEP)
    d = tl.arange(0, q.shape[1])
    dv = tl.arange(0, DV_PADDED)
    for at in range(start, stop, STEP):
        keys = at + step
        k_tile = _tile(k, at, k_token, step, d, D, keys < stop, MASKED)
        x, _ = _capped(_dot(q, tl.trans(k_tile)), inner, outer, CAPPED)
        if MASKED:
            x = _seen(x, keys, first, last)
        new = tl.maximum(top, tl.max(x, 1))
        safe = new
        if MASKED:  # a row may have seen nothing so far
            safe = tl.where(new == -INFINITY, 0.0, new)
        p = tl.exp2(x - safe[:, None])
        shrink = tl.exp2(top - safe)
        v_tile = _tile(v, at, v_token, step, dv, DV, keys < stop, MASKED)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        top = new
    return acc, total, top


@triton.jit(do_not_specialize=["queries", "lse_head"])
def forward_kernel(
    q, k, v, out, lse, lists, inner, outer, queries,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head, lse_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    UNIT: tl.constexpr, CAPPED: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    q_token, q_head = q_token * UNIT, q_head * UNIT
    k_token, k_head = k_token * UNIT, k_head * UNIT
    v_token, v_head = v_token * UNIT, v_head * UNIT
    out_token, out_head = out_token * UNIT, out_head * UNIT
    program, head, block_start, own, rows = _own(lists, HEADS, BLOCK)
    inside = rows < queries
    d = tl.arange(0, D_PADDED)
    dv = tl.arange(0, DV_PADDED)
    q_tile = _tile(q + head * q_head, block_start, q_token, own, d, D, inside, True)
    k += head // GROUP * k_head
    v += head // GROUP * v_head
    lse_at = lse + head * lse_head + rows
    if FRESH:
        before = tl.full([BLOCK], -INFINITY, tl.float32)
        acc = tl.zeros([BLOCK, DV_PADDED], tl.float32)
    else:  # what was seen before counts as one key, whose logit is lse and whose value is out
        before = tl.load(lse_at, mask=inside, other=-INFINITY)
        acc = _tile(out + head * out_head, block_start, out_token, own, dv, DV, inside, True)
    top = before * LOG2_E
    total = tl.where(before > -INFINITY, 1.0, 0.0)

    for full in range(tl.load(program + 1), tl.load(program + 2), 2):
        start = tl.load(lists + full)
        stop = tl.load(lists + full + 1)
        acc, total, top = _forward_steps(
            acc, total, top, q_tile, k, v, start, stop, rows, rows, k_token, v_token, inner, outer,
            D, DV, DV_PADDED, STEP, CAPPED, False,
        )  # fmt: skip
    for edge in range(tl.load(program + 3), tl.load(program + 4), 4):
        first, last = _intervals(lists, edge, rows)
        start = tl.load(lists + edge)
        stop = tl.load(lists + edge + 1)
        acc, total, top = _forward_steps(
            acc, total, top, q_tile, k, v, start, stop, first, last, k_token, v_token, inner, outer,
            D, DV, DV_PADDED, STEP, CAPPED, True,
        )  # fmt: skip

    seen = total > 0
    total = tl.where(seen, total, 1.0)
    # Rows that saw nothing new keep their very bits.
    same = (top == before * LOG2_E) & (total == 1.0)
    after = tl.where(same, before, tl.where(seen, (top + tl.log2(total)) * LN_2, -INFINITY))
    tl.store(lse_at, after, mask=inside)
    at = out + head * out_head + tl.cast(block_start, tl.int64) * out_token
    at += own[:, None] * out_token + dv[None, :]
    tl.store(at, acc / total[:, None], mask=inside[:, None] & (dv < DV)[None, :])


# -- backward ------------------------------------------------------------------------------------------
#
#    P = 2^(x − lse)     dV = Pᵀ dO     dS = P ⊙ (dO Vᵀ − delta) ⊙ slope     dQ = scale · dS K     dK = scale · dSᵀ Q


@triton.jit
def _dq_steps(
    dq, q, grad, lse, delta, k, v, start, stop, first, last, k_token, v_token, inner, outer,
    D: tl.constexpr, DV: tl.constexpr, STEP: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    step = tl.arange(0, STEP)
    d = tl.arange(0, q.shape[1])
    dv = tl.arange(0, grad.shape[1])
    for at in range(start, stop, STEP):
        keys = at + step
        k_tile = _tile(k, at, k_token, step, d, D, keys < stop, MASKED)
        v_tile = _tile(v, at, v_token, step, dv, DV, keys < stop, MASKED)
        x, slope = _capped(_dot(q, tl.trans(k_tile)), inner, outer, CAPPED)
        if MASKED:
            x = _seen(x, keys, first, last)
        p = tl.exp2(x - lse[:, None])
        ds = p * (_dot(grad, tl.trans(v_tile)) - delta[:, None]) * slope
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["queries", "lse_head", "delta_head"])
def dq_kernel(
    dq, q, k, v, grad_out, lse, delta, lists, inner, outer, scale, queries,
    dq_token, dq_head, q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head, lse_head, delta_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    UNIT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    dq_token, dq_head = dq_token * UNIT, dq_head * UNIT
    q_token, q_head = q_token * UNIT, q_head * UNIT
    k_token, k_head = k_token * UNIT, k_head * UNIT
    v_token, v_head = v_token * UNIT, v_head * UNIT
    grad_token, grad_head = grad_token * UNIT, grad_head * UNIT
    program, head, block_start, own, rows = _own(lists, HEADS, BLOCK)
    inside = rows < queries
    d = tl.arange(0, D_PADDED)
    dv = tl.arange(0, DV_PADDED)
    q_tile = _tile(q + head * q_head, block_start, q_token, own, d, D, inside, True)
    grad = _tile(grad_out + head * grad_head, block_start, grad_token, own, dv, DV, inside, True).to(q_tile.dtype)
    k += head // GROUP * k_head
    v += head // GROUP * v_head
    own_lse = tl.load(lse + head * lse_head + rows, mask=inside, other=INFINITY) * LOG2_E
    own_delta = tl.load(delta + head * delta_head + rows, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK, D_PADDED], tl.float32)

    for full in range(tl.load(program + 1), tl.load(program + 2), 2):
        start = tl.load(lists + full)
        stop = tl.load(lists + full + 1)
        acc = _dq_steps(
            acc, q_tile, grad, own_lse, own_delta, k, v, start, stop, rows, rows, k_token, v_token, inner, outer,
            D, DV, STEP, CAPPED, False,
        )  # fmt: skip
    # A row that has seen nothing at all has lse = −∞: its hidden logits would make NaN.
    own_lse = tl.where(own_lse == -INFINITY, INFINITY, own_lse)
    for edge in range(tl.load(program + 3), tl.load(program + 4), 4):
        first, last = _intervals(lists, edge, rows)
        start = tl.load(lists + edge)
        stop = tl.load(lists + edge + 1)
        acc = _dq_steps(
            acc, q_tile, grad, own_lse, own_delta, k, v, start, stop, first, last, k_token, v_token, inner, outer,
            D, DV, STEP, CAPPED, True,
        )  # fmt: skip

    _add(dq + head * dq_head, block_start, dq_token, own, d, D, inside, acc * scale)


@triton.jit
def _dkv_steps(
    dk, dv, k, v, q, grad_out, lse, delta, start, stop, first, last, q_token, grad_token, inner, outer,
    D: tl.constexpr, DV: tl.constexpr, STEP: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """All tiles of logits are transposed, (keys, queries): then P and dS are ready for the products that follow."""
    step = tl.arange(0, STEP)
    d_columns = tl.arange(0, k.shape[1])
    dv_columns = tl.arange(0, v.shape[1])
    for at in range(start, stop, STEP):
        rows = at + step
        q_tile = _tile(q, at, q_token, step, d_columns, D, rows < stop, MASKED)
        grad = _tile(grad_out, at, grad_token, step, dv_columns, DV, rows < stop, MASKED).to(q_tile.dtype)
        if MASKED:
            row_lse = tl.load(lse + rows, mask=rows < stop, other=INFINITY) * LOG2_E
            row_delta = tl.load(delta + rows, mask=rows < stop, other=0.0)
        else:
            row_lse = tl.load(lse + rows) * LOG2_E
            row_delta = tl.load(delta + rows)
        x, slope = _capped(_dot(k, tl.trans(q_tile)), inner, outer, CAPPED)
        if MASKED:
            row_lse = tl.where(row_lse == -INFINITY, INFINITY, row_lse)
            x = _seen(x, rows, first, last)
        p = tl.exp2(x - row_lse[None, :])
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
        ds = p * (_dot(v, tl.trans(grad)) - row_delta[None, :]) * slope
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["keys", "lse_head", "delta_head"])
def dkv_kernel(
    dk, dv, q, k, v, grad_out, lse, delta, lists, inner, outer, scale, keys,
    dk_token, dk_head, dv_token, dv_head, q_token, q_head, k_token, k_head, v_token, v_head, grad_token, grad_head,
    lse_head, delta_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    UNIT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """HEADS counts those of keys here. The query heads of a key head are added one after the other."""
    dk_token, dk_head = dk_token * UNIT, dk_head * UNIT
    dv_token, dv_head = dv_token * UNIT, dv_head * UNIT
    q_token, q_head = q_token * UNIT, q_head * UNIT
    k_token, k_head = k_token * UNIT, k_head * UNIT
    v_token, v_head = v_token * UNIT, v_head * UNIT
    grad_token, grad_head = grad_token * UNIT, grad_head * UNIT
    program, head, block_start, own, rows = _own(lists, HEADS, BLOCK)
    inside = rows < keys
    full_begin = tl.load(program + 1)
    full_end = tl.load(program + 2)
    edge_begin = tl.load(program + 3)
    edge_end = tl.load(program + 4)
    d = tl.arange(0, D_PADDED)
    dv_columns = tl.arange(0, DV_PADDED)
    k_tile = _tile(k + head * k_head, block_start, k_token, own, d, D, inside, True)
    v_tile = _tile(v + head * v_head, block_start, v_token, own, dv_columns, DV, inside, True)
    acc_k = tl.zeros([BLOCK, D_PADDED], tl.float32)
    acc_v = tl.zeros([BLOCK, DV_PADDED], tl.float32)

    for member in range(GROUP):
        q_at = head * GROUP + member
        for full in range(full_begin, full_end, 2):
            start = tl.load(lists + full)
            stop = tl.load(lists + full + 1)
            acc_k, acc_v = _dkv_steps(
                acc_k, acc_v, k_tile, v_tile, q + q_at * q_head, grad_out + q_at * grad_head, lse + q_at * lse_head,
                delta + q_at * delta_head, start, stop, rows, rows, q_token, grad_token, inner, outer,
                D, DV, STEP, CAPPED, False,
            )  # fmt: skip
        for edge in range(edge_begin, edge_end, 4):
            first, last = _intervals(lists, edge, rows)
            start = tl.load(lists + edge)
            stop = tl.load(lists + edge + 1)
            acc_k, acc_v = _dkv_steps(
                acc_k, acc_v, k_tile, v_tile, q + q_at * q_head, grad_out + q_at * grad_head, lse + q_at * lse_head,
                delta + q_at * delta_head, start, stop, first, last, q_token, grad_token, inner, outer,
                D, DV, STEP, CAPPED, True,
            )  # fmt: skip

    _add(dk + head * dk_head, block_start, dk_token, own, d, D, inside, acc_k * scale)
    _add(dv + head * dv_head, block_start, dv_token, own, dv_columns, DV, inside, acc_v)
