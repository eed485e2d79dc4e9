"""Linear layers of Hugging Face models: the module's own projections and norms around the operators across ranks.

    hidden ─ projections ─┬─ q k v ─ causal_conv1d ─┬─ gated_delta_rule ─ gated norm ─ out
                          ├─ b → β, a → g ──────────┘                        │
                          └─ z ──────────────────────────────────────────────┘

Qwen3-Next has its projections interleaved by key head, Qwen3.5 one after another; Kimi-Linear decays per channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longweave.errors import InputError
from longweave.linear import halo, mixers
from longweave.models.step import Step, outside_graphs

# Exchanges of linear layers are made of many small calls: torch.compile steps around them.
causal_conv1d, gated_delta_rule, kimi_delta_attention = (
    outside_graphs(fn) for fn in (halo.causal_conv1d, mixers.gated_delta_rule, mixers.kimi_delta_attention)
)


def qwen3_next(module: Any, step: Step, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Qwen3NextGatedDeltaNet."""
    _check(module, kwargs)
    qkvz, ba = module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
    q, k, v, z, b, a = module.fix_query_key_value_ordering(qkvz, ba)
    mixed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    return _gated_delta_net(module, step, mixed, z, b, a)


def qwen3_5(module: Any, step: Step, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Qwen3_5GatedDeltaNet and Qwen3_5MoeGatedDeltaNet."""
    _check(module, kwargs)
    z = _heads(module.in_proj_z(hidden_states), module.num_v_heads, module.head_v_dim)
    b, a = module.in_proj_b(hidden_states), module.in_proj_a(hidden_states)
    return _gated_delta_net(module, step, module.in_proj_qkv(hidden_states), z, b, a)


def _gated_delta_net(module: Any, step: Step, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """mixed: q, k, v side by side (1, tokens, C); z (1, tokens, Hv, V); b, a (1, tokens, Hv)."""
    mixed = _conv(module, step, mixed)
    q, k, v = torch.split(mixed, [module.key_dim, module.key_dim, module.value_dim], dim=-1)
    q, k = (_heads(x, module.num_k_heads, module.head_k_dim) for x in (q, k))
    v = _heads(v, module.num_v_heads, module.head_v_dim)
    g = -_high(module.A_log).exp() * F.softplus(_high(a) + module.dt_bias)
    out = gated_delta_rule(
        q,
        k,
        v,
        step.enter(g),
        step.enter(b.sigmoid()),
        step.layout,
        step.cu_seqlens,
        step.group,
        method=step.method,
        qk_l2norm=True,
    )
    out = step.leave(out)
    normed = module.norm(out.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim))
    projected: Tensor = module.out_proj(normed.view(z.shape).flatten(2))
    return projected


def kimi_linear(module: Any, step: Step, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """KimiLinearDeltaAttention."""
    _check(module, kwargs)
    heads = (module.num_heads, module.head_dim)
    mixed = torch.cat([proj(hidden_states) for proj in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
    q, k, v = (_heads(x, *heads) for x in _conv(module, step, mixed).chunk(3, dim=-1))
    g, beta = module.forget_gate(hidden_states), torch.sigmoid(module.b_proj(hidden_states))
    out = kimi_delta_attention(
        q,
        k,
        v,
        step.enter(g),
        step.enter(beta),
        step.layout,
        step.cu_seqlens,
        step.group,
        method=step.method,
        qk_l2norm=True,
    )
    gate = _heads(module.g_b_proj(module.g_a_proj(hidden_states)), *heads)
    projected: Tensor = module.o_proj(module.o_norm(step.leave(out), gate).flatten(2))
    return projected


def _conv(module: Any, step: Step, mixed: Tensor) -> Tensor:
    """The short convolution over this rank's tokens, which reads the tokens before them wherever they are."""
    weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    x = step.enter(mixed)
    out: Tensor = causal_conv1d(
        x.to(weight.dtype), weight, bias, step.layout, step.cu_seqlens, step.group, activation="silu"
    )
    return out.to(x.dtype)


def _check(module: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("cache_params") is not None:
        raise InputError("a KV cache reached a parallel model; call lw.restore(model) before generating")
    if kwargs.get("attention_mask") is not None:
        raise InputError(
            "a parallel model takes no attention mask; give padding to lw.shard_batch(..., attention_mask=)"
        )
    if module.activation not in ("silu", "swish"):
        raise InputError(f"{type(module).__name__} convolves with {module.activation!r}; only silu is supported")


def _heads(x: Tensor, heads: int, dim: int) -> Tensor:
    return x.reshape(*x.shape[:-1], heads, dim)


def _high(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
