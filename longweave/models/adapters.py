"""The parts of Hugging Face models that mix tokens, over a sequence that is divided over ranks.

softmax attention   one function behind transformers' attention interface
linear attention    one function in the place of a module's forward
experts             the load-balancing loss, which is about all tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longweave.comm.exchange import all_reduce_sum
from longweave.errors import InputError
from longweave.linear.conv import causal_conv1d
from longweave.linear.mixers import gated_delta_rule, kimi_delta_attention
from longweave.models.running import find_pack, model_tokens, rebatch, unbatch
from longweave.pack import Pack
from longweave.plan.mask import Mask
from longweave.softmax.attention import attention
from longweave.tensors import accumulation_dtype, eager, widened

# -- softmax attention -----------------------------------------------------------------------------------

NO_DROPOUT = "set config.attention_dropout = 0 before the model is made, or the module's attention_dropout = 0"
NAME = "longweave"  # of the attention implementation, in transformers' registry


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over the whole pack, for one layer of a parallel model.

    transformers calls it with q (1, H, tokens, D), k and v with their own number of heads (never repeated), and what is
    special in a layer as keywords: `scaling`, `sliding_window`, `softcap`, `s_aux` (sinks). It wants (1, tokens, H, Dv)
    back.
    """
    pack = find_pack(kwargs)
    name = type(module).__name__
    if attention_mask is not None:
        raise InputError(
            f"{name} got an attention mask of shape {tuple(attention_mask.shape)}, which knows nothing of other ranks; "
            "give padding to lw.shard_batch(input_ids, attention_mask=...) and other masks to lw.shard_batch(mask=...) "
            "or to a pooled model padding of its rows as attention_mask"
        )
    if dropout > 0:
        raise InputError(f"{name} asks for attention dropout {dropout} in training; {NO_DROPOUT}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        _check_full(name, pack)
    if query.shape[2] != key.shape[2]:
        raise InputError(
            f"{name} got {key.shape[2]} keys for {query.shape[2]} queries: a KV cache; "
            "call lw.restore(model) before generating, or give a pooled model, not its layers, the past_key_values"
        )
    q, k, v = (unbatch(x.transpose(1, 2), pack) for x in (query, key, value))
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    out = attention(q, k, v, pack, window=window, scale=scaling, softcap=softcap, sinks=s_aux)
    return rebatch(out, pack), None


@eager
def _check_full(name: str, pack: Pack) -> None:
    if pack.mask != Mask.full(pack.cu_seqlens):
        raise InputError(
            f"{name} is not causal: its tokens see their whole document, but the batch has another mask; give "
            'lw.shard_batch(..., mask="full"), or lw.pool(model, mask="full")'
        )


def no_mask(*args: Any, **kwargs: Any) -> None:
    """In the place of transformers' mask builders: the pack says who sees whom."""


def register_with_transformers() -> None:
    """Make the name known. Done once; a model uses it only while its config says so."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, no_mask)


# -- linear attention ------------------------------------------------------------------------------------

# The module's own projections and norms around the operators across ranks:
#
#     hidden ─ projections ─┬─ q k v ─ causal_conv1d ─┬─ gated_delta_rule ─ gated norm ─ out
#                           ├─ b → β, a → g ──────────┘                        │
#                           └─ z ──────────────────────────────────────────────┘
#
# Qwen3-Next has its projections interleaved by key head, Qwen3.5 one after another; Kimi-Linear decays per channel.


def qwen3_next(module: Any, pack: Pack, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Qwen3NextGatedDeltaNet."""
    _check_linear(module, kwargs)
    qkvz, ba = module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
    q, k, v, z, b, a = module.fix_query_key_value_ordering(qkvz, ba)
    mixed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    return _gated_delta_net(module, pack, mixed, z, b, a)


def qwen3_5(module: Any, pack: Pack, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Qwen3_5GatedDeltaNet and Qwen3_5MoeGatedDeltaNet."""
    _check_linear(module, kwargs)
    z = _heads(module.in_proj_z(hidden_states), module.num_v_heads, module.head_v_dim)
    b, a = module.in_proj_b(hidden_states), module.in_proj_a(hidden_states)
    return _gated_delta_net(module, pack, module.in_proj_qkv(hidden_states), z, b, a)


def _gated_delta_net(module: Any, pack: Pack, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """mixed: q, k, v side by side (1, tokens, C); z (1, tokens, Hv, V); b, a (1, tokens, Hv)."""
    mixed = _conv(module, pack, mixed)
    q, k, v = torch.split(mixed, [module.key_dim, module.key_dim, module.value_dim], dim=-1)
    q, k = (_heads(x, module.num_k_heads, module.head_k_dim) for x in (q, k))
    v = _heads(v, module.num_v_heads, module.head_v_dim)
    g = -widened(module.A_log).exp() * F.softplus(widened(a) + module.dt_bias)
    out = gated_delta_rule(q, k, v, unbatch(g, pack), unbatch(b.sigmoid(), pack), pack, qk_l2norm=True)
    out = rebatch(out, pack)
    normed = module.norm(out.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim))
    projected: Tensor = module.out_proj(normed.view(z.shape).flatten(2))
    return projected


def kimi_linear(module: Any, pack: Pack, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """KimiLinearDeltaAttention."""
    _check_linear(module, kwargs)
    heads = (module.num_heads, module.head_dim)
    mixed = torch.cat([proj(hidden_states) for proj in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
    q, k, v = (_heads(x, *heads) for x in _conv(module, pack, mixed).chunk(3, dim=-1))
    g, beta = module.forget_gate(hidden_states), torch.sigmoid(module.b_proj(hidden_states))
    out = kimi_delta_attention(q, k, v, unbatch(g, pack), unbatch(beta, pack), pack, qk_l2norm=True)
    gate = _heads(module.g_b_proj(module.g_a_proj(hidden_states)), *heads)
    projected: Tensor = module.o_proj(module.o_norm(rebatch(out, pack), gate).flatten(2))
    return projected


def _conv(module: Any, pack: Pack, mixed: Tensor) -> Tensor:
    """The short convolution over this rank's tokens, which reads the tokens before them wherever they are."""
    weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    x = unbatch(mixed, pack)
    return causal_conv1d(x.to(weight.dtype), weight, bias, pack, activation="silu").to(x.dtype)


def _check_linear(module: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("cache_params") is not None:
        raise InputError("a KV cache reached a parallel model; call lw.restore(model) before generating")
    if kwargs.get("attention_mask") is not None:
        raise InputError(
            "a layer across ranks takes no attention mask; give padding to lw.shard_batch(..., attention_mask=), or to "
            "a pooled model itself"
        )
    if module.activation not in ("silu", "swish"):
        raise InputError(f"{type(module).__name__} convolves with {module.activation!r}; only silu is supported")


def _heads(x: Tensor, heads: int, dim: int) -> Tensor:
    return x.reshape(*x.shape[:-1], heads, dim)


# -- experts ---------------------------------------------------------------------------------------------

# aux = E · Σ_e f_e · P_e      f_e: how often expert e was chosen, P_e: its mean probability, both over all tokens
#
# It is a product of means, so means over the tokens of one rank give another loss. The counts f carry no gradient: with
# the global f, each rank's part E · Σ_e f_e · (its share of P_e) adds up, and so do the gradients.


def balancing_loss(router_logits: Sequence[Tensor], num_experts: int, top_k: int, pack: Pack) -> Tensor:
    """This rank's part of the load-balancing loss; the SUM over ranks is that of one process.

    router_logits: for each layer (tokens, num_experts), as Hugging Face models return them.
    """

    def check() -> None:
        if not router_logits:
            raise InputError("router_logits is empty; call the model with output_router_logits=True")
        for logits in router_logits:
            if logits.shape != (model_tokens(pack), num_experts):
                raise InputError(
                    f"router logits have the shape {tuple(logits.shape)} but this rank has {pack.tokens} tokens and "
                    f"{num_experts} experts; give those of this batch"
                )

    recorded = pack.core.enter(("balancing loss of", len(router_logits), "layers", num_experts, "experts"), check)
    chosen = torch.zeros(num_experts, device=router_logits[0].device)
    likely = chosen.to(accumulation_dtype(router_logits[0].dtype))
    for logits in router_logits:
        weights = torch.softmax(logits[: pack.tokens].to(likely.device), dim=-1)
        picks = torch.topk(weights, top_k, dim=-1).indices
        chosen = chosen + torch.bincount(picks.reshape(-1), minlength=num_experts)
        likely = likely + weights.to(likely.dtype).sum(0)
        likely = likely + logits[pack.tokens :].sum() * 0  # a placeholder token must take part in backward
    rows = pack.layout.total * len(router_logits)
    with recorded.forward():
        check()
        (chosen,) = all_reduce_sum([chosen.to(likely.dtype)], pack.core.comm)
    return num_experts * torch.sum(chosen / rows * (likely / rows))
