"""The only merge of partial attention results.

A partial is (out, lse): softmax-weighted values over some keys, and the log of the sum of their exponentials. Two
partials over disjoint keys make one:

    lse = log(e^lse₁ + e^lse₂)        out = out₁ + (out₂ − out₁) · σ(lse₂ − lse₁)

All in float32 (float64 for float64). A query that has seen nothing has lse = −∞ and out = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longweave.kernels.dtypes import accumulation_dtype


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

    def add_sinks(self, sinks: Tensor) -> None:
        """One more key per head with the given logit and the value 0."""
        sink = sinks.to(self.lse.dtype)[:, None]
        share = torch.where(self.lse > -torch.inf, torch.sigmoid(self.lse - sink), 0.0)  # also where the sink is −∞
        self.out.mul_(share[..., None])
        torch.logaddexp(self.lse, sink.expand_as(self.lse), out=self.lse)


def _merge(mine: Tensor, total: Tensor, out: Tensor, lse: Tensor) -> None:
    lse = lse.to(total.dtype)
    mine.lerp_(out.to(mine.dtype), torch.sigmoid(lse - total)[..., None])
    total.copy_(torch.logaddexp(total, lse))


@lru_cache(maxsize=1)
def compiled_merge() -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """The merge as one kernel: on a GPU its few passes over the output are what a ring step costs beyond attention."""
    return torch.compile(_merge, dynamic=True)


def sinks_gradient(sinks: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The gradient of the sink logits from the merged out and lse: −Σ_q e^(sink − lse) · ⟨grad_out, out⟩."""
    dtype = lse.dtype
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)
    share = torch.exp(sinks.to(dtype)[:, None] - lse)
    return -(share * delta).sum(1)
