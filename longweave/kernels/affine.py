"""The affine map of a span of tokens: S ↦ M·S + U, and how maps join.

    (M₂, U₂) ∘ (M₁, U₁) = (M₂ M₁, M₂ U₁ + U₂)          state flows forward
    dS_in = Mᵀ dS_out + C                               its gradient flows back

M comes in the smallest form that its mixer allows:

    kind        shape of M          mixers
    none        None (identity)     linear attention without decay
    scalar      (..., 1, 1)         Mamba2/SSD, lightning attention, RetNet
    diagonal    (..., K, 1)         GLA
    dense       (..., K, K)         DeltaNet, Gated DeltaNet, KDA

Scalar and diagonal maps multiply elementwise, and broadcasting makes their formulas the same. The same pair
of functions serves the gradient: `Affine(M, C)` with `apply_transposed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["none", "scalar", "diagonal", "dense"]


@dataclass(frozen=True)
class Affine:
    """S ↦ M·S + U with U (..., K, V); `kind` says how `M` is held."""

    kind: Kind
    M: Tensor | None
    U: Tensor

    def apply(self, S: Tensor | None) -> Tensor:
        """M·S + U; None is the zero state."""
        return self.U if S is None else times(self.kind, self.M, S) + self.U

    def apply_transposed(self, dS: Tensor | None) -> Tensor:
        """Mᵀ·dS + U, for a pair whose U is the backward summary C."""
        return self.U if dS is None else times(self.kind, self.M, dS, transposed=True) + self.U

    def after(self, earlier: Affine) -> Affine:
        """The map of `earlier` followed by this one."""
        U = times(self.kind, self.M, earlier.U) + self.U
        if self.M is None or earlier.M is None:
            return Affine(self.kind, earlier.M if self.M is None else self.M, U)
        return Affine(self.kind, times(self.kind, self.M, earlier.M), U)


def times(kind: Kind, M: Tensor | None, S: Tensor, *, transposed: bool = False) -> Tensor:
    """M·S, or Mᵀ·S."""
    if M is None:
        return S
    if kind != "dense":
        return M * S
    return torch.matmul(M.mT if transposed else M, S)


def map_shape(kind: Kind, K: int) -> tuple[int, int] | None:
    """Trailing shape of M: what one segment and head sends besides its U."""
    return {"none": None, "scalar": (1, 1), "diagonal": (K, 1), "dense": (K, K)}[kind]
