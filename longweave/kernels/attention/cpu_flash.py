"""PyTorch's flash attention kernel for CPUs.

It computes rectangles at matmul speed, and causal triangles (top-left aligned) more slowly the smaller they are. So a
task becomes calls of three kinds:

    full      ■ ■ ■ ■     causal    ■ · · ·     band     ■ ■ · · · ·     strips of a few rows, each over
              ■ ■ ■ ■               ■ ■ · ·              ■ ■ ■ · · ·     the keys it can see, with a
              ■ ■ ■ ■               ■ ■ ■ ·              · · ■ ■ · ·     small additive mask at the edges
                                                         · · ■ ■ ■ ·

Sliding windows always go by strips, and so do causal tasks of middle size, where strips beat the kernel's own causal
mode. The backward kernel takes the merged out and lse.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from longweave.kernels.attention.partial import NO_LIMIT, Partial, QuerySide, TaskRows, Tasks, alone
from longweave.tensors import faking

STRIP = 128  # rows of a strip
STRIPS_FROM, STRIPS_TO = 384, 2048  # causal tasks with that many rows go by strips
WIDE = 2048  # keys of a strip: with more, its two edges are calls of their own
MASK_BYTES = 64 << 20

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class FlashCall(NamedTuple):
    """One kernel call. `alone`: no other call of the list touches these queries."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    band: tuple[int, int] | None  # limits on (key - k0) - (query - q0), if neither full nor causal
    alone: bool = False


def why_not(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    """The reason why this backend cannot serve, or None."""
    if q.device.type != "cpu":
        return f"tensors are on {q.device.type}"
    if softcap is not None:
        return "it has no softcap"
    return None


def forward(into: Partial, q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, scale: float, fresh: bool) -> None:
    """Add to `into` what q (Tq, H, D) sees in k (Tk, Hk, D), v (Tk, Hk, Dv). `fresh`: `into` has seen nothing yet."""
    v_dim = v.shape[-1]
    q, k, v = _as_kernel(_fast(q), _fast(k), _fast(v))
    for call in tasks.compiled(compile_calls):
        rows, keys = slice(call.q0, call.q1), slice(call.k0, call.k1)
        mask = _mask(call, q.dtype)
        out, lse = _forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, call.causal, attn_mask=mask, scale=scale)
        put = into.write if fresh and call.alone else into.add_seen
        put(call.q0, call.q1, out[0, ..., :v_dim].transpose(0, 1), lse[0])


def backward(
    into: tuple[Tensor, Tensor, Tensor],
    queries: QuerySide,
    k: Tensor,
    v: Tensor,
    tasks: Tasks,
    scale: float,
) -> None:
    """Add to `into` = (dq, dk, dv), in float32, what these tasks contribute."""
    dq, dk, dv = into
    v_dim = v.shape[-1]
    # The half-precision backward kernels are many times slower than float32 and round every block.
    tensors = [x.float() if x.dtype.itemsize < 4 else x for x in (queries.q, k, v, queries.grad_out, queries.out)]
    q, k, v, grad_out, out = _as_kernel(*(x.to(tensors[0].dtype) for x in tensors))
    lse = queries.lse[None]
    for call in tasks.compiled(compile_calls):
        rows, keys = slice(call.q0, call.q1), slice(call.k0, call.k1)
        grads = _backward(
            grad_out[:, :, rows],
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            out[:, :, rows],
            lse[:, :, rows],
            0.0,
            call.causal,
            attn_mask=_mask(call, q.dtype),
            scale=scale,
        )
        dq[rows] += grads[0][0, ..., : dq.shape[-1]].transpose(0, 1)
        dk[keys] += grads[1][0, ..., : dk.shape[-1]].transpose(0, 1)
        dv[keys] += grads[2][0, ..., :v_dim].transpose(0, 1)


def compile_calls(rows: TaskRows) -> tuple[FlashCall, ...]:
    """The kernel calls for some tasks."""
    calls = [call for row in rows.tolist() for call in _calls(*row)]
    if not calls:
        return ()
    free = alone(np.array([c.q0 for c in calls]), np.array([c.q1 for c in calls]))
    return tuple(call._replace(alone=bool(only)) for call, only in zip(calls, free, strict=True))


def _calls(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> list[FlashCall]:
    below, above = lo <= -NO_LIMIT, hi >= NO_LIMIT
    if below and above:
        return [FlashCall(q0, q1, k0, k1, False, None)]
    if not below:
        return _strips(q0, q1, k0, k1, lo, hi)
    # Row i sees `seen + i` keys: the first `seen - 1` make a rectangle, the rest a top-left aligned triangle.
    seen = q0 + hi + 1 - k0
    diagonal = k0 + seen - 1
    if STRIPS_FROM <= min(q1 - q0, k1 - diagonal) <= STRIPS_TO:
        if seen - 1 <= STRIPS_TO:
            return _strips(q0, q1, k0, k1, lo, hi)
        return [FlashCall(q0, q1, k0, diagonal, False, None), *_strips(q0, q1, diagonal, k1, lo, hi)]
    triangle = FlashCall(q0, q1, diagonal, k1, True, None)
    return [FlashCall(q0, q1, k0, diagonal, False, None), triangle] if seen > 1 else [triangle]


def _strips(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> list[FlashCall]:
    calls: list[FlashCall] = []
    for a in range(q0, q1, STRIP):
        b = min(a + STRIP, q1)
        first, last = max(k0, a + lo), min(k1, b + hi)
        # Limits that cut nothing off this strip would only make a mask of zeros.
        low = lo + a - first if b - 1 + lo > first else -NO_LIMIT
        high = hi + a - first if a + hi < last - 1 else NO_LIMIT
        if low > -NO_LIMIT and last - first > WIDE:
            calls += _wide_strip(a, b, first, last, low, high)
        else:
            band = None if low <= -NO_LIMIT and high >= NO_LIMIT else (low, high)
            calls.append(FlashCall(a, b, first, last, False, band))
    return calls


def _wide_strip(a: int, b: int, first: int, last: int, low: int, high: int) -> list[FlashCall]:
    """A strip of a wide window: its lower edge by a small mask, what all rows see, and a triangle at the upper edge."""
    seen = first + low + b - a  # the first key that no row is too late for
    lower = FlashCall(a, b, first, seen, False, (low, NO_LIMIT))
    if high >= NO_LIMIT:
        return [lower, FlashCall(a, b, seen, last, False, None)]
    diagonal = first + high
    return [lower, FlashCall(a, b, seen, diagonal, False, None), FlashCall(a, b, diagonal, last, True, None)]


def _mask(call: FlashCall, dtype: torch.dtype) -> Tensor | None:
    """The additive mask of a band call: a window into one large mask, which serves calls of all sizes."""
    if call.band is None:
        return None
    low, high = call.band
    queries, keys = call.q1 - call.q0, call.k1 - call.k0
    if high >= NO_LIMIT:  # only the lower edge cuts: let the upper one lie beyond the last key
        high = keys
    width = high - low if low > -NO_LIMIT else NO_LIMIT
    # In the large mask the upper edge of row 0 stands at column `edge`; shift so that it falls on `high`.
    edge = 1 << max(high, 1).bit_length()
    columns = max(edge - high + keys, edge + STRIP)
    mask = _masks.get(edge, 1 << columns.bit_length(), width, dtype)
    return mask[:queries, edge - high : edge - high + keys][None, None]


class _Masks:
    """Additive masks by size, the same for all batches. The least used ones die when all take over MASK_BYTES."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[object, ...], Tensor] = OrderedDict()

    def get(self, edge: int, columns: int, width: int, dtype: torch.dtype) -> Tensor:
        key = (edge, columns, width, dtype)
        if key in self._made and not faking():
            self._made.move_to_end(key)
            return self._made[key]
        distance = torch.arange(columns)[None, :] - torch.arange(STRIP)[:, None]
        hidden = (distance > edge) | (distance < edge - width)
        mask = torch.zeros(STRIP, columns, dtype=dtype).masked_fill_(hidden, -torch.inf)
        if not faking():
            self._made[key] = mask
            while len(self._made) > 1 and sum(one.nbytes for one in self._made.values()) > MASK_BYTES:
                self._made.popitem(last=False)
        return mask


_masks = _Masks()


def _fast(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float16 else x


def _as_kernel(q: Tensor, k: Tensor, *values: Tensor) -> list[Tensor]:
    """(1, heads, tokens, dim) views, as the kernel counts dimensions; it takes any strides.

    It wants one head dim for q, k and v: the smaller ones are filled with zeros, which change nothing.
    """
    dim = max(q.shape[-1], values[0].shape[-1])
    same = (x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1])) for x in (q, k, *values))
    return [x.transpose(0, 1)[None] for x in same]
