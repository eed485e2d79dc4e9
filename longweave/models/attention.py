"""Softmax attention of Hugging Face models: one function behind transformers' attention interface.

transformers calls it with q (1, H, tokens, D), k and v with their own number of heads (never repeated), and what is
special in a layer as keywords: `scaling`, `sliding_window`, `softcap`, `s_aux` (sinks). It wants (1, tokens, H, Dv)
back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from longweave.errors import InputError
from longweave.models.step import find
from longweave.softmax.attention import attention

NAME = "longweave"


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
    """Attention over the whole pack, for one layer of a parallel model."""
    step = find(kwargs)
    name = type(module).__name__
    if attention_mask is not None:
        raise InputError(
            f"{name} got an attention mask of shape {tuple(attention_mask.shape)}, which knows nothing of other ranks; "
            "give padding to lw.shard_batch(input_ids, attention_mask=...) instead of to the model"
        )
    if dropout > 0:
        raise InputError(
            f"{name} asks for attention dropout {dropout} in training; set config.attention_dropout = 0 before the "
            "model is made, or the module's attention_dropout = 0"
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise InputError(f"{name} is not causal; parallel models attend causally inside each document")
    if query.shape[2] != key.shape[2]:
        raise InputError(
            f"{name} got {key.shape[2]} keys for {query.shape[2]} queries: a KV cache; "
            "call lw.restore(model) before generating"
        )
    q, k, v = (step.enter(x.transpose(1, 2)) for x in (query, key, value))
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    plan = step.plan(
        window,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        v_dim=v.shape[2],
        itemsize=q.element_size(),
        on_cpu=int(q.device.type == "cpu"),
    )
    out = attention(q, k, v, plan, step.group, scale=scaling, softcap=softcap, sinks=s_aux, **step.options)
    return step.leave(out), None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """In the place of transformers' mask builders: the plan says who sees whom."""


def register_with_transformers() -> None:
    """Make the name known. Done once; a model uses it only while its config says so."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, no_mask)
