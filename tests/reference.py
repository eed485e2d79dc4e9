"""Attention in one process, the obvious way: the whole matrix, float64, autograd."""

from dataclasses import dataclass

import torch
from torch import Tensor

import longweave as lw


@dataclass
class Problem:
    """Full tensors of one attention call, and a random upstream gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    sinks: Tensor | None

    @classmethod
    def random(
        cls,
        tokens: int,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        v_dim: int | None = None,
        dtype: torch.dtype = torch.float64,
        sinks: bool = False,
        seed: int = 0,
    ) -> "Problem":
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        v_dim = dim if v_dim is None else v_dim
        return cls(
            draw(tokens, heads, dim),
            draw(tokens, kv_heads, dim),
            draw(tokens, kv_heads, v_dim),
            draw(tokens, heads, v_dim),
            draw(heads) if sinks else None,
        )


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: lw.Mask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~torch.from_numpy(mask.dense()), -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, logits.shape[1], 1)], -1)
    lse = torch.logsumexp(logits, -1)
    weights = torch.where(lse[..., None] > -torch.inf, torch.exp(logits - lse.clamp_min(-1e300)[..., None]), 0.0)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v), lse.t()


def solve(problem: Problem, mask: lw.Mask, **options) -> dict[str, Tensor]:
    """Output, lse and all gradients of one process, in float64."""
    leaves = {
        name: getattr(problem, name).detach().double().clone().requires_grad_()
        for name in ("q", "k", "v", "sinks")
        if getattr(problem, name) is not None
    }
    out, lse = dense_attention(**leaves, mask=mask, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), problem.grad.double())
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def worst(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value (which may be 0: gradients of a single key are)."""
    if not expected.numel():
        return 0.0
    actual, expected = actual.detach(), expected.detach()
    both_hidden = (actual == expected) & ~torch.isfinite(expected)
    difference = (actual.double() - expected.double()).abs().masked_fill(both_hidden, 0)
    finite = expected[torch.isfinite(expected)].double()
    scale = finite.abs().max() if finite.numel() else torch.tensor(1.0)
    return float(difference.max() / scale.clamp_min(1e-3))
