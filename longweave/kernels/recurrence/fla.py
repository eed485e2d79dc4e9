"""flash-linear-attention as a backend, used on CUDA when it is installed. No other file calls it.

Its op wants a batch of one, `(1, tokens, heads, dim)`, 16-bit q, k, v, one head of q and k per value head,
and no empty segments.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longweave.errors import BackendError

HALF = (torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)  # a constant of the process
def load_op() -> Callable[..., Any] | None:
    """`chunk_gated_delta_rule` of flash-linear-attention, or None if it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    module = importlib.import_module("fla.ops.gated_delta_rule")
    op: Callable[..., Any] = module.chunk_gated_delta_rule
    return op


def refusal(q: Tensor) -> str | None:
    """Why flash-linear-attention cannot serve this call, or None."""
    if q.device.type != "cuda":
        return f"inputs are on {q.device}; it runs on CUDA: move them there, or use backend='torch'"
    if q.dtype not in HALF:
        return f"inputs are {q.dtype}; it takes bfloat16 or float16: cast them, or use backend='torch'"
    if load_op() is None:
        return "it is not installed: pip install flash-linear-attention, or use backend='torch'"
    return None


def can_serve(q: Tensor) -> bool:
    return refusal(q) is None


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    spans: Sequence[tuple[int, int]],
    initial_state: Tensor | None,
    output_final_state: bool,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor | None]:
    """Out (tokens, Hv, V) and, if wanted, final states (segments, Hv, K, V).

    Inputs as `check_mixer` wants them. `spans` are the segments, which fill the tokens in order. `initial_state` is
    (segments, Hv, K, V); None is zero.
    """
    reason = refusal(q)
    op = load_op()
    if reason is not None or op is None:
        raise BackendError(f"flash-linear-attention cannot serve this call: {reason}")
    group = v.shape[1] // k.shape[1]
    if group > 1:
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    filled = [segment for segment, (start, stop) in enumerate(spans) if stop > start]
    all_filled = len(filled) == len(spans)
    if not filled:
        out = torch.zeros_like(v)
        return out, _final(initial_state, None, filled, len(spans), q, v) if output_final_state else None
    index = torch.tensor(filled, device=q.device)
    bounds = torch.tensor([0, *(spans[segment][1] for segment in filled)], device=q.device)
    start = None if initial_state is None else initial_state.float()
    out, final = op(
        q=q.unsqueeze(0).contiguous(),
        k=k.unsqueeze(0).contiguous(),
        v=v.unsqueeze(0).contiguous(),
        g=g.float().unsqueeze(0).contiguous(),
        beta=beta.unsqueeze(0).contiguous(),
        scale=scale,
        initial_state=start if start is None or all_filled else start.index_select(0, index),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=qk_l2norm,
        cu_seqlens=bounds,
    )
    if not output_final_state:
        return out.squeeze(0), None
    return out.squeeze(0), final if all_filled else _final(initial_state, final, filled, len(spans), q, v)


def _final(
    initial: Tensor | None, final: Tensor | None, filled: list[int], segments: int, q: Tensor, v: Tensor
) -> Tensor:
    """Final states of all segments: an empty one keeps its initial state."""
    if initial is None:
        states = torch.zeros((segments, v.shape[1], q.shape[2], v.shape[2]), device=v.device)
    else:
        states = initial.float()
    if final is None:
        return states
    return states.index_copy(0, torch.tensor(filled, device=v.device), final.float())
