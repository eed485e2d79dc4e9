"""What every attention backend takes and gives: tasks in, partial results out, and the query side of a backward.

A task `(q0, q1, k0, k1, lo, hi)` lets the queries q0 <= q < q1 see the keys k0 <= k < k1 with lo <= k - q <= hi, all in
local coordinates. Tasks are tight (every query of a task sees at least one key of it) and disjoint.

A partial is (out, lse): softmax-weighted values over some keys, and the log of the sum of their exponentials. Two
partials over disjoint keys make one, and this is the only place that does it:

    lse = log(e^lse₁ + e^lse₂)        out = out₁ + (out₂ − out₁) · σ(lse₂ − lse₁)

All in float32 (float64 for float64). A query that has seen nothing has lse = −∞ and out = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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


def alone(q0: npt.NDArray[np.int64], q1: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """For each query range: does it share no query with any other range of the list?"""
    order = np.argsort(q0, kind="stable")
    starts, stops = q0[order], q1[order]
    reach = np.maximum.accumulate(stops)
    free = np.ones(len(order), dtype=bool)
    free[1:] &= starts[1:] >= reach[:-1]
    free[:-1] &= reach[:-1] <= starts[1:]
    result = np.empty_like(free)
    result[order] = free
    return result


@dataclass
class Partial:
    """Results so far. out: (heads, queries, v_dim), lse: (heads, queries)."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, q: Tensor, v_dim: int) -> Partial:
        """For queries q (heads, queries, dim) that have seen nothing yet."""
        heads, queries, _ = q.shape
        dtype = accumulation_dtype(q.dtype)
        out = torch.zeros((heads, queries, v_dim), dtype=dtype, device=q.device)
        return cls(out, torch.full((heads, queries), -torch.inf, dtype=dtype, device=q.device))

    def heads(self, a: int, b: int) -> Partial:
        """The heads a … b, as views."""
        return Partial(self.out[a:b], self.lse[a:b])

    def write(self, q0: int, q1: int, out: Tensor, lse: Tensor) -> None:
        """The queries q0 … q1 had seen nothing before."""
        self.out[:, q0:q1] = out
        self.lse[:, q0:q1] = lse

    def add(self, q0: int, q1: int, out: Tensor, lse: Tensor) -> None:
        """Merge a partial of the queries q0 … q1, all of which see something in it (finite lse)."""
        merge = compiled_merge() if self.out.is_cuda else _merge
        merge(self.out[:, q0:q1], self.lse[:, q0:q1], out, lse)

    def add_some(self, q0: int, q1: int, out: Tensor, lse: Tensor) -> None:
        """Merge a partial in which some of the queries q0 … q1 may have seen nothing (lse = −∞)."""
        mine, total = self.out[:, q0:q1], self.lse[:, q0:q1]
        lse = lse.to(total.dtype)
        share = torch.where(lse > -torch.inf, torch.sigmoid(lse - total), 0.0)
        mine.lerp_(out.to(mine.dtype), share[..., None])
        torch.logaddexp(total, lse, out=total)

    def add_sinks(self, sinks: Tensor | None) -> None:
        """One more key per head with the given logit and the value 0; None: no such key."""
        if sinks is None:
            return
        sink = sinks.to(self.lse.dtype)[:, None]
        share = torch.where(self.lse > -torch.inf, torch.sigmoid(self.lse - sink), 0.0)  # also where the sink is −∞
        self.out.mul_(share[..., None])
        torch.logaddexp(self.lse, sink.expand_as(self.lse), out=self.lse)


def _merge(mine: Tensor, total: Tensor, out: Tensor, lse: Tensor) -> None:
    lse = lse.to(total.dtype)
    mine.lerp_(out.to(mine.dtype), torch.sigmoid(lse - total)[..., None])
    total.copy_(torch.logaddexp(total, lse))


@lru_cache(maxsize=1)  # one function, for the life of the process
def compiled_merge() -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """The merge as one kernel: on a GPU its few passes over the output are what a ring step costs beyond attention."""
    return torch.compile(_merge, dynamic=True)


@dataclass(frozen=True)
class QuerySide:
    """The query side of a backward: it stays while K/V come and go.

    grad_out, out: (heads, queries, v_dim), q: (heads, queries, dim), lse: (heads, queries). `out` and `lse` are the
    merged ones, over all keys.
    """

    grad_out: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    @cached_property
    def delta(self) -> Tensor:
        """⟨grad_out, out⟩ of every query (heads, queries), in the dtype of lse."""
        dtype = self.lse.dtype
        return (self.grad_out.to(dtype) * self.out.to(dtype)).sum(-1)

    def heads(self, a: int, b: int) -> QuerySide:
        """The heads a … b, as views; itself if these are all."""
        if (a, b) == (0, len(self.q)):
            return self
        return QuerySide(self.grad_out[a:b], self.q[a:b], self.out[a:b], self.lse[a:b])


def sinks_gradient(sinks: Tensor, queries: QuerySide) -> Tensor:
    """The gradient of the sink logits, from the merged out and lse: −Σ_q e^(sink − lse) · ⟨grad_out, out⟩."""
    share = torch.exp(sinks.to(queries.lse.dtype)[:, None] - queries.lse)
    return -(share * queries.delta).sum(1)
