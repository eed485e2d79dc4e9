"""PyTorch's flash attention kernel for CPUs.

It computes rectangles at matmul speed; its causal mode and masks compute twice the pairs that a small triangle has. So
a task becomes calls of three kinds:

    full      ■ ■ ■ ■     causal    ■ · · ·     band     ■ ■ · · · ·     strips of a few rows, each over
              ■ ■ ■ ■               ■ ■ · ·              ■ ■ ■ · · ·     the keys it can see, with a
              ■ ■ ■ ■               ■ ■ ■ ·              · · ■ ■ · ·     small additive mask at the edges
                                                         · · ■ ■ ■ ·

Sliding windows go by strips. A triangle is halved again and again: half of its pairs are then a square, a quarter two
smaller squares, …, and only what is left on the diagonal are triangles. Blocks of one size are a single call, on a
batch that lies in q, k and v at equal distances:

    ◣ · · · · · · ·      the causal call: 8 triangles ◣
    1 ◣ · · · · · ·      call 1: a batch of 4 squares
    2 2 ◣ · · · · ·      call 2: a batch of 2 larger ones
    2 2 1 ◣ · · · ·      call 3: a square of half the rows
    3 3 3 3 ◣ · · ·
    3 3 3 3 1 ◣ · ·
    3 3 3 3 2 2 ◣ ·
    3 3 3 3 2 2 1 ◣

The backward kernel takes the merged out and lse.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from longweave.kernels.attention.partial import NO_LIMIT, Partial, QuerySide, TaskRows, Tasks
from longweave.tensors import faking

STRIP = 128  # rows of a strip
LEAF = 64  # rows of the triangles on the diagonal
WIDE = 2048  # keys of a strip: with more, its two edges are calls of their own
MASK_BYTES = 64 << 20

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class FlashCall(NamedTuple):
    """One kernel call, on some blocks of queries and keys: the first, and others `step` tokens on each."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool = False
    band: tuple[int, int] | None = None  # limits on (key - k0) - (query - q0), if neither full nor causal
    blocks: int = 1
    step: int = 0
    first: bool = False  # no earlier call of the list touches these queries

    @property
    def reach(self) -> int:
        """The end of the last block of queries."""
        return self.q1 + (self.blocks - 1) * self.step

    def queries(self, x: Tensor) -> Tensor:
        """Of x (tokens, heads, dim), as the kernel counts dimensions: (blocks, heads, rows, dim), any strides."""
        return self._blocks(x, self.q0, self.q1)

    def keys(self, x: Tensor) -> Tensor:
        return self._blocks(x, self.k0, self.k1)

    def lse(self, x: Tensor) -> Tensor:
        """Of x (heads, queries): (blocks, heads, rows)."""
        return self._blocks(x.t()[..., None], self.q0, self.q1)[..., 0]

    def _blocks(self, x: Tensor, start: int, stop: int) -> Tensor:
        if self.blocks == 1:
            return x[start:stop].transpose(0, 1)[None]
        (_, heads, dim), (token, head, inner) = x.shape, x.stride()
        sizes, strides = (self.blocks, heads, stop - start, dim), (self.step * token, head, token, inner)
        return x.as_strided(sizes, strides, x.storage_offset() + start * token)


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
    q, k, v = _one_dim(_fast(q), _fast(k), _fast(v))
    for call in tasks.compiled(compile_calls):
        mask = _mask(call, q.dtype)
        out, lse = _forward(call.queries(q), call.keys(k), call.keys(v), 0.0, call.causal, attn_mask=mask, scale=scale)
        _add(call.queries(into.out), call.lse(into.lse), out[..., :v_dim], lse, fresh and call.first)


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
    # The half-precision backward kernels are many times slower than float32 and round every block.
    tensors = [x.float() if x.dtype.itemsize < 4 else x for x in (queries.q, k, v, queries.grad_out, queries.out)]
    q, k, v, grad_out, out = _one_dim(*(x.to(tensors[0].dtype) for x in tensors))
    for call in tasks.compiled(compile_calls):
        grads = _backward(
            call.queries(grad_out),
            call.queries(q),
            call.keys(k),
            call.keys(v),
            call.queries(out),
            call.lse(queries.lse),
            0.0,
            call.causal,
            attn_mask=_mask(call, q.dtype),
            scale=scale,
        )
        for total, grad in zip((call.queries(dq), call.keys(dk), call.keys(dv)), grads, strict=True):
            total += grad[..., : total.shape[-1]]


def _add(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor, first: bool) -> None:
    """Merge a partial; `first`: there is nothing yet. As `Partial.add`, in fewer passes: every query saw something."""
    if first:
        total.copy_(out)
        total_lse.copy_(lse)
        return
    lse = lse.to(total_lse.dtype)
    total.lerp_(out.to(total.dtype), torch.sigmoid(lse - total_lse)[..., None])
    total_lse.copy_(torch.logaddexp(total_lse, lse))


# -- calls ---------------------------------------------------------------------------------------------


def compile_calls(rows: TaskRows) -> tuple[FlashCall, ...]:
    """The kernel calls for some tasks."""
    calls = [call for row in rows.tolist() for call in _calls(*row)]
    touched = np.zeros(max((call.reach for call in calls), default=0), dtype=bool)
    for i, call in enumerate(calls):
        calls[i] = call._replace(first=not touched[call.q0 : call.reach].any())
        touched[call.q0 : call.reach] = True
    return tuple(calls)


def _calls(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> list[FlashCall]:
    below, above = lo <= -NO_LIMIT, hi >= NO_LIMIT
    if below and above:
        return [FlashCall(q0, q1, k0, k1)]
    if not below:
        return _strips(q0, q1, k0, k1, lo, hi)
    # All rows see the keys before `diagonal`, then comes a triangle, and the rows behind it see all keys.
    diagonal = q0 + hi
    size = k1 - diagonal
    assert k0 <= diagonal, "tasks are tight"
    assert size <= q1 - q0, "tasks are tight"
    calls = _triangle(q0, diagonal, size)
    if diagonal > k0:
        calls.append(FlashCall(q0, q0 + size, k0, diagonal))
    if q0 + size < q1:
        calls.append(FlashCall(q0 + size, q1, k0, k1))
    return calls


def _triangle(q0: int, k0: int, size: int) -> list[FlashCall]:
    """`size` rows, of which the first sees one key."""
    if size < 2 * LEAF:
        return [FlashCall(q0, q0 + size, k0, k0 + size, True)] if size else []
    halvings = (size // LEAF).bit_length() - 1
    calls = [FlashCall(q0, q0 + LEAF, k0, k0 + LEAF, True, blocks=1 << halvings, step=LEAF)]
    for level in range(halvings):
        side, squares = LEAF << level, 1 << halvings - level - 1
        calls.append(FlashCall(q0 + side, q0 + 2 * side, k0, k0 + side, blocks=squares, step=2 * side))
    done = LEAF << halvings
    if done < size:  # the rows that are left see all of that, and are a triangle themselves
        calls.append(FlashCall(q0 + done, q0 + size, k0, k0 + done))
        calls += _triangle(q0 + done, k0 + done, size - done)
    return calls


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
            calls.append(FlashCall(a, b, first, last, band=band))
    return calls


def _wide_strip(a: int, b: int, first: int, last: int, low: int, high: int) -> list[FlashCall]:
    """A strip of a wide window: its lower edge by a small mask, what all rows see, and a triangle at the upper edge."""
    seen = first + low + b - a  # the first key that no row is too late for
    lower = FlashCall(a, b, first, seen, band=(low, NO_LIMIT))
    if high >= NO_LIMIT:
        return [lower, FlashCall(a, b, seen, last)]
    diagonal = first + high
    return [lower, FlashCall(a, b, seen, diagonal), FlashCall(a, b, diagonal, last, True)]


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


def _one_dim(q: Tensor, k: Tensor, *values: Tensor) -> list[Tensor]:
    """The kernel wants one head dim for q, k and v: the smaller ones are filled with zeros, which change nothing."""
    dim = max(q.shape[-1], values[0].shape[-1])
    return [x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1])) for x in (q, k, *values)]
