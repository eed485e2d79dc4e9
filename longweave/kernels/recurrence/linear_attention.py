"""Linear attention in its forms beside the gated delta rule: each is `factors` and nothing else.

    linear attention      S_t = S_{t−1} + k_t v_tᵀ                                        none
    lightning, RetNet     S_t = λ S_{t−1} + k_t v_tᵀ                     λ per head        scalar
    Mamba2 / SSD          S_t = e^{A Δ_t} S_{t−1} + Δ_t B_t x_tᵀ          per head, token   scalar
    GLA                   S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ          per channel       diagonal
    KDA                   S_t = (I − β_t k_t k_tᵀ) diag(e^{g_t}) S_{t−1} + β_t k_t v_tᵀ     dense

and o_t = scale · S_tᵀ q_t always. Tensors are packed (tokens, heads, dim). q and k may have fewer heads than
v, as in GQA. Their gradients with respect to the chunk factors come from autograd, block by block. Decay of
any strength is safe (`decay.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longweave.kernels.recurrence.decay import channel_products, cumulative, pairwise
from longweave.kernels.recurrence.mixer import Factors, Kind, Mixer
from longweave.kernels.recurrence.reference import l2norm


@dataclass(frozen=True)
class _QKVMixer(Mixer):
    """Inputs begin with q, k (…, Hk, K), v (…, Hv, V)."""

    scale: float = 1.0

    def state_shape(self, inputs: Sequence[Tensor]) -> tuple[int, int, int]:
        k, v = inputs[1], inputs[2]
        return v.shape[1], k.shape[-1], v.shape[-1]

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled q, k, v with one head each per value head: (B, C, dim)."""
        group = v.shape[1] // k.shape[1]
        q, k = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (q * self.scale, k))
        return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


@dataclass(frozen=True)
class LinearAttention(_QKVMixer):
    """Inputs q, k, v."""

    kind: ClassVar[Kind] = "none"

    def factors(self, inputs: Sequence[Tensor]) -> Factors:
        q, k, v = self._heads(*inputs)
        return Factors(q, torch.bmm(q, k.mT).tril(), v, k, erase=None, within=None, decay=None)


@dataclass(frozen=True)
class HeadDecay(_QKVMixer):
    """Lightning attention, RetNet, SSD. Inputs q, k, v, g (…, Hv)."""

    kind: ClassVar[Kind] = "scalar"

    def factors(self, inputs: Sequence[Tensor]) -> Factors:
        q, k, v = self._heads(*inputs[:3])
        c = cumulative(inputs[3].flatten(0, 1), -1)
        from_start, to_end = (x.to(q.dtype).exp().unsqueeze(-1) for x in (c, c[:, -1:] - c))
        return Factors(
            reads=q * from_start,
            scores=torch.bmm(q, k.mT) * pairwise(c, q.dtype),
            values=v,
            writes=k * to_end,
            erase=None,
            within=None,
            decay=from_start[:, -1:],
        )


@dataclass(frozen=True)
class ChannelDecay(_QKVMixer):
    """GLA. Inputs q, k, v, g (…, Hv, K)."""

    kind: ClassVar[Kind] = "diagonal"

    def factors(self, inputs: Sequence[Tensor]) -> Factors:
        q, k, v = self._heads(*inputs[:3])
        c = cumulative(inputs[3].flatten(0, 1), -2)
        from_start, to_end = (x.to(q.dtype).exp() for x in (c, c[:, -1:] - c))
        (scores,) = channel_products(q.unsqueeze(0), k, c)
        decay = from_start[:, -1].unsqueeze(-1)
        return Factors(q * from_start, scores, v, k * to_end, erase=None, within=None, decay=decay)


@dataclass(frozen=True)
class KimiDelta(_QKVMixer):
    """KDA. Inputs q, k, v, g (…, Hv, K), beta (…, Hv)."""

    qk_l2norm: bool = False
    kind: ClassVar[Kind] = "dense"

    def factors(self, inputs: Sequence[Tensor]) -> Factors:
        q, k, v, g, beta = inputs
        if self.qk_l2norm:
            q, k = l2norm(q), l2norm(k)
        q, k, v = self._heads(q, k, v)
        c, beta = cumulative(g.flatten(0, 1), -2), beta.flatten(0, 1).unsqueeze(-1)
        from_start, to_end = (x.to(q.dtype).exp() for x in (c, c[:, -1:] - c))
        scores, within = channel_products(torch.stack([q, k * beta]), k, c)
        return Factors(
            reads=q * from_start,
            scores=scores,
            values=v * beta,
            writes=k * to_end,
            erase=k * from_start * beta,
            within=within,
            decay=from_start[:, -1].unsqueeze(-1),
        )
