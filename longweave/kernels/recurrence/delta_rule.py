"""The gated delta rule in chunks, with its backward written out.

    S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t,   α = e^g

Over a chunk of C tokens, with c = cumsum(g), γ = e^c and Γ_ij = e^{c_i − c_j} for i ≥ j, else 0:

    Q = γ q       A = (q·k) Γ       U = β V       W = β γ K       K̃ = (γ_C / γ) K
    L = tril₋₁(β_i (k_i·k_j) Γ_ij)        D = γ_C

are the factors of `mixer.py`. Ratios of decays are exponentials of differences that are masked first, so
nothing overflows however strong the decay (`decay.py`). Backward, given the gradients of the factors:

    dv = β dU        d(q·k) = dA Γ        d(k·k) = dL β Γ

and every c_i stands in products only, so that its gradient is "gradient × value" of what it scales:

    E = dA ⊙ A + dL ⊙ L
    dc_i = Σ_j E_ij − Σ_j E_ji + dQ_i·Q_i + dW_i·W_i − dK̃_i·K̃_i,      dc_C += Σ_i dK̃_i·K̃_i + dD D

Query heads and key heads are shared by groups of value heads; q·k and k·k are computed once per key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longweave.kernels.recurrence.decay import cumulative, pairwise
from longweave.kernels.recurrence.mixer import Factors, Kind, Mixer, Pullback
from longweave.kernels.recurrence.reference import L2_EPS


@dataclass(frozen=True)
class GatedDeltaRule(Mixer):
    """Inputs: q, k (…, Hk, K), v (…, Hv, V), g, beta (…, Hv). DeltaNet is g = 0."""

    scale: float
    qk_l2norm: bool = False
    kind: ClassVar[Kind] = "dense"

    def state_shape(self, inputs: Sequence[Tensor]) -> tuple[int, int, int]:
        _, k, v, _, _ = inputs
        return v.shape[1], k.shape[-1], v.shape[-1]

    def factors(self, inputs: Sequence[Tensor]) -> Factors:
        return self.linearize(inputs)[0]

    def linearize(self, inputs: Sequence[Tensor]) -> tuple[Factors, Pullback]:
        q, k, v, g, beta = inputs
        n, Hk, C, K = k.shape
        G = v.shape[1] // Hk
        B = n * Hk * G
        q_norm = k_norm = None
        if self.qk_l2norm:
            q_norm, k_norm = _inverse_norm(q), _inverse_norm(k)
            q, k = q * (q_norm * self.scale), k * k_norm
        elif self.scale != 1:
            q = q * self.scale
        q_kv, k_kv, v_, b = (
            q.unsqueeze(2),
            k.unsqueeze(2),
            v.reshape(n, Hk, G, C, -1),
            beta.view(n, Hk, G, C, 1),
        )

        c = cumulative(g.view(n, Hk, G, C), -1)
        from_start = c.to(k.dtype).exp().unsqueeze(-1)  # γ_i
        to_end = (c[..., -1:] - c).to(k.dtype).exp().unsqueeze(-1)  # γ_C / γ_i
        ratio = pairwise(c, k.dtype)  # Γ
        kk = torch.matmul(k, k.mT).unsqueeze(2) * ratio
        A = (torch.matmul(q, k.mT).unsqueeze(2) * ratio).view(B, C, C)
        L = (kk * b).view(B, C, C)
        factors = Factors(
            reads=(q_kv * from_start).view(B, C, K),
            scores=A,
            values=(v_ * b).view(B, C, -1),
            writes=(k_kv * to_end).view(B, C, K),
            erase=(k_kv * (from_start * b)).view(B, C, K),
            within=L,
            decay=from_start.view(B, C, 1)[:, -1:],
        )

        def pullback(d: Factors) -> Sequence[Tensor]:
            assert d.erase is not None
            assert d.within is not None
            assert d.decay is not None
            assert factors.decay is not None
            heads = (n, Hk, G, C)
            dL = d.within
            dkk = dL.view(*heads, C) * ratio  # before β
            dqk = d.scores.view(*heads, C) * ratio

            dU, dW = d.values.view(*heads, -1), d.erase.view(*heads, K) * from_start
            by_beta = (dW * k_kv).sum(-1)
            d_beta = (dL.view(*heads, C) * kk).sum(-1) + (dU * v_).sum(-1) + by_beta
            dv = dU * b

            E = (d.scores * A).addcmul_(dL, L).view(*heads, C)
            dq_ = d.reads.view(*heads, K) * from_start
            dk_ = d.writes.view(*heads, K) * to_end
            dc_k = (dk_ * k_kv).sum(-1)
            dc = E.sum(-1) - E.sum(-2) + (dq_ * q_kv).sum(-1) - dc_k + by_beta * b.squeeze(-1)
            dc[..., -1] += dc_k.sum(-1) + (d.decay * factors.decay).view(n, Hk, G)
            dg = dc.flip(-1).cumsum(-1).flip(-1)

            dkk, dqk = _over_group(dkk * b), _over_group(dqk)
            dq = torch.matmul(dqk, k) + _over_group(dq_)
            dk = torch.matmul(dkk + dkk.mT, k) + torch.matmul(dqk.mT, q) + _over_group(dk_.addcmul_(dW, b))
            if q_norm is not None and k_norm is not None:
                dq = _norm_grad(dq, q / self.scale, q_norm * self.scale)
                dk = _norm_grad(dk, k, k_norm)
            elif self.scale != 1:
                dq = dq * self.scale
            return dq, dk, dv.flatten(1, 2), dg.flatten(1, 2), d_beta.flatten(1, 2)

        return factors, pullback


def _inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _norm_grad(dy: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    """Gradient of x, for y = x / |x| and an upstream gradient of y · scale; factor = scale / |x|."""
    return (dy - y * (y * dy).sum(-1, keepdim=True)) * factor


def _over_group(x: Tensor) -> Tensor:
    """Sum over the value heads that share a key head: (n, Hk, G, …) -> (n, Hk, …)."""
    return x.squeeze(2) if x.shape[2] == 1 else x.sum(2)
