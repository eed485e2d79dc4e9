"""What every attention backend takes and gives: tasks in, partial results out, and the query side of a backward.

A task `(q0, q1, k0, k1, lo, hi)` lets the queries q0 <= q < q1 see the keys k0 <= k < k1 with lo <= k - q <= hi, all in
local coordinates. Tasks are tight (every query of a task sees a key of it, every key is seen, and a limit that cuts
nothing is ±NO_LIMIT) and disjoint.

A partial is (out, lse): softmax-weighted values over some keys, and the log of the sum of their exponentials. Two
partials over disjoint keys make one:

    lse = log(e^lse₁ + e^lse₂)        out = out₁ + (out₂ − out₁) · σ(lse₂ − lse₁)

All in float32 (float64 for float64). A query that has seen nothing has lse = −∞ and out = 0.

Tensors are token-first, (tokens, heads, dim), with any strides of tokens and heads; what has one number per query and
head (lse, delta) is (heads, tokens), as the flash kernels of all devices want it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longweave.kernels import fused
from longweave.kernels.triton_launch import serves
from longweave.tensors import accumulation_dtype

NO_LIMIT = 1 << 40

TaskRows = npt.NDArray[np.int64]  # (tasks, 6)
T = TypeVar("T")


class Tasks:
    """An immutable list of tasks that remembers what backends made of it.

    Whoever owns the tasks owns that, too: every layer and step of a batch finds the calls already made.
    """

    __slots__ = ("_made", "rows")

    def __init__(self, rows: TaskRows) -> None:
        self.rows = np.ascontiguousarray(rows, dtype=np.int64).reshape(-1, 6)
        self._made: dict[object, object] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def compiled(self, compiler: Callable[[TaskRows], T]) -> T:
        """`compiler(rows)`, called once."""
        if compiler not in self._made:
            self._made[compiler] = compiler(self.rows)
        return self._made[compiler]  # type: ignore[return-value]


@dataclass
class Partial:
    """Results so far. out: (queries, heads, v_dim), lse: (heads, queries)."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, q: Tensor, v_dim: int) -> Partial:
        """For queries q (queries, heads, dim) that have seen nothing yet."""
        queries, heads, _ = q.shape
        dtype = accumulation_dtype(q.dtype)
        out = torch.zeros((queries, heads, v_dim), dtype=dtype, device=q.device)
        return cls(out, torch.full((heads, queries), -torch.inf, dtype=dtype, device=q.device))

    def heads(self, a: int, b: int) -> Partial:
        """The heads a … b, as views."""
        return Partial(self.out[:, a:b], self.lse[a:b])

    def write(self, q0: int, q1: int, out: Tensor, lse: Tensor) -> None:
        """The queries q0 … q1 had seen nothing before."""
        self.out[q0:q1] = out
        self.lse[:, q0:q1] = lse

    def add(self, q0: int, q1: int, out: Tensor, lse: Tensor) -> None:
        """Merge a partial of the queries q0 … q1. One that saw nothing in it has lse = ±∞ there, and out = 0."""
        mine, total = self.out[q0:q1], self.lse[:, q0:q1]
        if serves(mine):
            fused.merge(mine, total, out, lse)
            return
        lse = lse.to(total.dtype)
        lse = torch.where(lse < torch.inf, lse, -torch.inf)
        share = torch.where(lse > -torch.inf, torch.sigmoid(lse - total), 0.0)
        mine.lerp_(out.to(mine.dtype), share.t()[..., None])
        total.copy_(torch.logaddexp(total, lse))

    def finish(self, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`out` in `dtype`. Sinks are one more key per head with the given logit and the value 0: lse gains them."""
        if serves(self.out):
            return fused.finish(self.out, self.lse, sinks, dtype)
        if sinks is not None:
            sink = sinks.to(self.lse.dtype)[:, None]
            # Also where the sink is −∞.
            share = torch.where(self.lse > -torch.inf, torch.sigmoid(self.lse - sink), 0.0)
            self.out.mul_(share.t()[..., None])
            torch.logaddexp(self.lse, sink.expand_as(self.lse), out=self.lse)
        return self.out.to(dtype)


@dataclass(frozen=True)
class QuerySide:
    """The query side of a backward: it stays while K/V come and go.

    grad_out, out: (queries, heads, v_dim), q: (queries, heads, dim), lse: (heads, queries). `out` and `lse` are the
    merged ones, over all keys.
    """

    grad_out: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    @cached_property
    def delta(self) -> Tensor:
        """⟨grad_out, out⟩ of every query (heads, queries), in the dtype of lse."""
        if serves(self.out):
            return fused.delta(self.grad_out, self.out)
        dtype = self.lse.dtype
        return (self.grad_out.to(dtype) * self.out.to(dtype)).sum(-1).t().contiguous()

    def heads(self, a: int, b: int) -> QuerySide:
        """The heads a … b, as views; itself if these are all."""
        if (a, b) == (0, self.q.shape[1]):
            return self
        return QuerySide(self.grad_out[:, a:b], self.q[:, a:b], self.out[:, a:b], self.lse[a:b])


def sinks_gradient(sinks: Tensor, queries: QuerySide) -> Tensor:
    """The gradient of the sink logits, from the merged out and lse: −Σ_q e^(sink − lse) · ⟨grad_out, out⟩."""
    # A query that sees nothing, beside a sink of −∞, has no share to give.
    share = torch.where(queries.lse > -torch.inf, torch.exp(sinks.to(queries.lse.dtype)[:, None] - queries.lse), 0.0)
    return -(share * queries.delta).sum(1)
