"""What a linear mixer says about one chunk; everything else is common.

A chunk of C tokens with state S (K × V) at its start computes, for every head,

    (I + L) V' = U − W S        what the tokens write: each sees what those before it wrote    (C × V)
    O  = Q S + A V'             what they read                                                 (C × V)
    S' = D S + Kᵀ V'            the state they leave behind                                    (K × V)

so a chunk takes S to M·S + U with the transition M = D − Kᵀ (I + L)⁻¹ W. It is never formed: applying it costs
three thin matmuls. Mixers differ in their factors:

    factor   shape           delta rules                 additive rules (GLA, SSD, lightning, ...)
    reads    Q  (C × K)      decayed queries             decayed queries
    scores   A  (C × C)      decayed q·k, i ≥ j          decayed q·k, i ≥ j
    values   U  (C × V)      β V                         V
    writes   K  (C × K)      keys decayed to the end     keys decayed to the end
    erase    W  (C × K)      β K, decayed from the start None
    within   L  (C × C)      β, decayed k·k, i > j       None
    decay    D               1 × 1, K × 1, or None: no decay

A span of tokens does the same with its own (M, U), its summary, and so do neighbouring spans together:

    (M₂, U₂) ∘ (M₁, U₁) = (M₂ M₁, M₂ U₁ + U₂)          the state flows forward
    dS_in = Mᵀ dS_out + C                               its gradient flows back

M comes in the smallest form that its mixer allows. Scalars and diagonals multiply elementwise, so that
broadcasting makes their formulas the same:

    kind        shape of M          mixers
    none        None (identity)     linear attention without decay
    scalar      (..., 1, 1)         Mamba2/SSD, lightning attention, RetNet
    diagonal    (..., K, 1)         GLA
    dense       (..., K, K)         DeltaNet, Gated DeltaNet, KDA

A new mixer writes `factors` in torch operations. `linearize` then comes from autograd; a mixer for which
speed matters overrides it with a hand-written pullback.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor

Kind = Literal["none", "scalar", "diagonal", "dense"]


def advanced(kind: Kind, U: Tensor, M: Tensor | None, S: Tensor, *, transposed: bool = False) -> Tensor:
    """M·S + U, or Mᵀ·S + U, of (…, K, V), in one operation. None is the identity."""
    if M is None:
        return U + S
    if kind != "dense":
        return torch.addcmul(U, M, S)
    U_, M_, S_ = (x.flatten(0, -3) for x in (U, M.mT if transposed else M, S))
    return torch.baddbmm(U_, M_, S_).view(U.shape)


def transition_shape(kind: Kind, K: int) -> tuple[int, int] | None:
    """Trailing shape of M: what one segment and head sends besides its U."""
    return {"none": None, "scalar": (1, 1), "diagonal": (K, 1), "dense": (K, K)}[kind]


@dataclass
class Factors:
    """Factors of a batch of chunks and heads (B = chunks · heads, heads fastest), or their gradients."""

    reads: Tensor  # (B, C, K)
    scores: Tensor  # (B, C, C)
    values: Tensor  # (B, C, V)
    writes: Tensor  # (B, C, K)
    erase: Tensor | None  # (B, C, K)
    within: Tensor | None  # (B, C, C); what stands on or above its diagonal is not read
    decay: Tensor | None  # (B, 1, 1) or (B, K, 1)

    def tensors(self) -> list[Tensor | None]:
        return [getattr(self, f.name) for f in fields(Factors)]


Pullback = Callable[[Factors], Sequence[Tensor]]


class Mixer(ABC):
    """One kind of linear attention. Inputs are gathered chunks: (chunks, heads, C) or (chunks, heads, C, dim)."""

    kind: ClassVar[Kind]

    @abstractmethod
    def state_shape(self, inputs: Sequence[Tensor]) -> tuple[int, int, int]:
        """(heads, K, V) of the state, from the token-first inputs."""

    @abstractmethod
    def factors(self, inputs: Sequence[Tensor]) -> Factors:
        """Factors of every chunk and head."""

    def linearize(self, inputs: Sequence[Tensor]) -> tuple[Factors, Pullback]:
        """Factors, and the function that takes their gradients to the gradients of the inputs."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            traced = self.factors(leaves)

        def pullback(grads: Factors) -> Sequence[Tensor]:
            pairs = [
                (y, dy)
                for y, dy in zip(traced.tensors(), grads.tensors(), strict=True)
                if y is not None and dy is not None and y.requires_grad
            ]
            outputs, upstream = zip(*pairs, strict=True)
            return torch.autograd.grad(outputs, leaves, upstream, materialize_grads=True)

        return Factors(*(None if x is None else x.detach() for x in traced.tensors())), pullback  # type: ignore[arg-type]
