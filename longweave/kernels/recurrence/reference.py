"""The obvious loop: one token at a time, differentiable by autograd. Every fast path is tested against it.

S ← α_t ⊙ S                         α_t = e^{g_t}: per head (H,), per channel (H, K), or 1
w_t = β_t (v_t − Sᵀ k_t)             delta rules; without β the rule is additive, w_t = v_t
S ← S + k_t w_tᵀ
o_t = scale · Sᵀ q_t

mixer                       g               β
linear attention            None            None
lightning, RetNet, SSD      (tokens, H)     None
GLA                         (tokens, H, K)  None
DeltaNet                    None            (tokens, H)
Gated DeltaNet              (tokens, H)     (tokens, H)
KDA                         (tokens, H, K)  (tokens, H)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longweave.kernels.recurrence.chunks import spans_of

L2_EPS = 1e-6  # what Hugging Face's models and flash-linear-attention add under the root


def l2norm(x: Tensor) -> Tensor:
    """x / √(Σ x² + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Sequence[int] | np.ndarray | Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs (tokens, Hv, V) and final states (segments, Hv, K, V), every step in the dtype of the inputs.

    q, k (tokens, Hk, K) and v (tokens, Hv, V) with Hv a multiple of Hk; g and beta as in the table above.
    """
    group = v.shape[1] // k.shape[1]
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * scale, k))
    alpha = None if g is None else g.exp() if g.dim() == 3 else g.exp().unsqueeze(-1)
    spans = spans_of(cu_seqlens, len(q))
    outs: list[Tensor] = []
    finals: list[Tensor] = []
    for segment, (start, stop) in enumerate(spans):
        S = v.new_zeros((v.shape[1], k.shape[2], v.shape[2]))
        if initial_state is not None:
            S = initial_state[segment].to(v.dtype)
        for t in range(start, stop):
            if alpha is not None:
                S = alpha[t].unsqueeze(-1) * S
            w = v[t]
            if beta is not None:
                w = beta[t].unsqueeze(-1) * (w - torch.einsum("hkv,hk->hv", S, k[t]))
            S = S + k[t].unsqueeze(-1) * w.unsqueeze(-2)
            outs.append(torch.einsum("hkv,hk->hv", S, q[t]))
        finals.append(S)
    out = torch.stack(outs) if outs else v.new_zeros(v.shape)
    final = torch.stack(finals) if finals else v.new_zeros((0, v.shape[1], k.shape[2], v.shape[2]))
    return out, final
