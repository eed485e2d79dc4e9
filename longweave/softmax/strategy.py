"""What the strategies have in common: how K/V reaches Q and gradients get home.

    forward     q, k, v of my tokens ──▶ out, lse of my tokens, and what backward needs besides
    backward    grad_out, what was kept ──▶ dq, dk, dv of my tokens

Tensors are token-first: q (T, H, D), k (T, Hk, D), v (T, Hk, Dv). K and V, and their gradients, travel in one buffer
(tokens, Hk, D + Dv), and kernels read and write them there: `split` gives both as views. A strategy is made for one
plan and one rank; a pack keeps it, with its tasks and index tensors, for all layers and for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longweave.kernels.attention import Kernel
from longweave.tensors import accumulation_dtype

Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Result:
    """A forward pass. out (T, H, Dv), in the dtype of q, and lse (H, T) are of my tokens; lse is None where it costs
    extra.

    For backward: `kept_lse` (any shape) in float32 or float64, and `kept`, flat, in the dtype of q, or None.
    """

    out: Tensor
    lse: Tensor | None
    kept_lse: Tensor
    kept: Tensor | None = None


class Strategy(Protocol):
    """How K/V reaches Q and gradients get home, for one plan on one rank."""

    needs_inputs: bool  # does backward want q, k, v and out of my tokens? If not, `kept` has what it needs.

    def forward(
        self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, want_lse: bool
    ) -> Result: ...

    def backward(
        self,
        kernel: Kernel,
        grad_out: Tensor,
        inputs: Sequence[Tensor],
        kept: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
    ) -> Grads:
        """dq, dk, dv and the gradient of the sinks, in float32 or the dtype of the inputs.

        inputs: q, k, v and out, if the strategy needs them; kept and lse: flat, as forward kept them.
        """


def split(kv: Tensor, k_dim: int) -> tuple[Tensor, Tensor]:
    """k and v of (tokens, Hk, D + Dv), as views."""
    return kv[..., :k_dim], kv[..., k_dim:]


def room_for(tokens: int, k: Tensor, v: Tensor) -> Tensor:
    """An empty buffer (tokens, Hk, D + Dv)."""
    return k.new_empty((tokens, k.shape[1], k.shape[2] + v.shape[2]))


def zeros_for(tokens: int, k: Tensor, v: Tensor) -> Tensor:
    """Sums of gradients (tokens, Hk, D + Dv), nothing added yet."""
    shape = tokens, k.shape[1], k.shape[2] + v.shape[2]
    return torch.zeros(shape, dtype=accumulation_dtype(k.dtype), device=k.device)


def take(k: Tensor, v: Tensor, index: Tensor) -> Tensor:
    """Some tokens of k and v, in one buffer."""
    kv = room_for(len(index), k, v)
    for x, part in zip((k, v), split(kv, k.shape[-1]), strict=True):
        torch.index_select(x, 0, index, out=part)
    return kv
