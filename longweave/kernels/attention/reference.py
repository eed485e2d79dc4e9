"""Attention in plain torch: every option, every device, every dtype. The backend that the others are tested against.

Heads go first in here: then everything is a batch of matmuls. It works in blocks of queries × keys, so memory does not
grow with their product:

    S = softcap(scale · Q Kᵀ)     P = e^(S − lse)     out = P V
    dV = Pᵀ dO    dS = P ⊙ (dO Vᵀ − ⟨dO, out⟩)    dQ = scale · dS' K    dK = scale · dS'ᵀ Q
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longweave.kernels.attention.partial import NO_LIMIT, Partial, QuerySide, Tasks
from longweave.tensors import accumulation_dtype

Q_BLOCK, K_BLOCK = 128, 512


def forward(
    into: Partial, q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, scale: float, softcap: float | None = None
) -> None:
    """Add to `into` what q (Tq, H, D) sees in k (Tk, Hk, D), v (Tk, Hk, Dv)."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    for rows, keys, hidden in _blocks(tasks, q.device):
        logits, _ = _logits(q[:, rows], k[:, keys], hidden, scale, softcap)
        lse = torch.logsumexp(logits, -1)
        # A query may see nothing in this block: then all its weights are 0, not NaN.
        weights = torch.exp(logits - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None])
        out = _group(weights, v) @ v[:, keys].to(weights.dtype)
        into.add(rows.start, rows.stop, out.view(*lse.shape, -1).transpose(0, 1), lse)


def backward(
    into: tuple[Tensor, Tensor, Tensor],
    queries: QuerySide,
    k: Tensor,
    v: Tensor,
    tasks: Tasks,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Add to `into` = (dq, dk, dv) what these tasks contribute."""
    dq, dk, dv = (x.transpose(0, 1) for x in into)
    q, k, v, grad_out = (x.transpose(0, 1) for x in (queries.q, k, v, queries.grad_out))
    dtype = accumulation_dtype(q.dtype)
    for rows, keys, hidden in _blocks(tasks, q.device):
        logits, slope = _logits(q[:, rows], k[:, keys], hidden, scale, softcap)
        weights = torch.exp(logits - queries.lse[:, rows, None])
        grad = grad_out[:, rows].to(dtype)
        dv[:, keys] += _group(weights, v).transpose(1, 2) @ _group(grad, v)
        grad_weights = (_group(grad, v) @ v[:, keys].to(dtype).transpose(1, 2)).view_as(weights)
        grad_logits = weights * (grad_weights - queries.delta[:, rows, None])
        if slope is not None:
            grad_logits = grad_logits * slope
        dq[:, rows] += scale * (_group(grad_logits, k) @ k[:, keys].to(dtype)).view_as(q[:, rows])
        dk[:, keys] += scale * (_group(grad_logits, k).transpose(1, 2) @ _group(q[:, rows].to(dtype), k))


def _blocks(tasks: Tasks, device: torch.device) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(queries, keys, hidden pairs or None) in pieces of at most Q_BLOCK × K_BLOCK."""
    for q0, q1, k0, k1, lo, hi in tasks.rows.tolist():
        for a in range(q0, q1, Q_BLOCK):
            b = min(a + Q_BLOCK, q1)
            first, last = max(k0, a + lo), min(k1, b + hi)
            for c in range(first, last, K_BLOCK):
                d = min(c + K_BLOCK, last)
                hidden = None
                if (b - 1 + lo > c and lo > -NO_LIMIT) or (a + hi < d - 1 and hi < NO_LIMIT):
                    distance = torch.arange(c, d, device=device)[None, :] - torch.arange(a, b, device=device)[:, None]
                    hidden = (distance < lo) | (distance > hi)
                yield slice(a, b), slice(c, d), hidden


def _logits(
    q: Tensor, k: Tensor, hidden: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """The capped and masked logits (H, q, k), and their derivative by the raw ones where there is a cap."""
    dtype = accumulation_dtype(q.dtype)
    logits = (_group(q.to(dtype), k) @ k.to(dtype).transpose(1, 2)).view(*q.shape[:2], -1) * scale
    slope = None
    if softcap is not None:
        capped = torch.tanh(logits / softcap)
        logits, slope = softcap * capped, 1 - capped * capped
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    return logits, slope


def _group(x: Tensor, shared: Tensor) -> Tensor:
    """(H, n, d) -> (Hk, H/Hk · n, d): the query heads of one K/V head side by side, so nothing is repeated."""
    return x.reshape(shared.shape[0], -1, x.shape[-1])
