"""What a decoder costs, for the cost model of `lw.pool`. Results never depend on it.

    flops_per_token    every weight that the token uses, and what linear layers do besides
    flops_per_pair     attention layers, those with the same window together
    flops_to_sum_up    linear layers, once more, for a part in the middle of a cut document

FLOPs count as those of a matrix product that takes as long. Linear layers work in small pieces, at a lower rate. All
are those of a forward pass; a backward pass has twice as many, but for frozen weights, which get no gradient.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from longweave.models.layers import Parts
from longweave.models.weights import is_flattened
from longweave.plan.cost import Shape
from longweave.plan.document_work import AttentionWork, DecoderWork

LINEAR_CHUNK = 64  # tokens that linear layers take at once, at most
SLOWDOWN = 5.0  # of their FLOPs; on CPUs 4 (heads of 128) to 8 (heads of 32) were measured
SUM_UP_SHARE = 0.5  # of mixing: the FLOPs of a summary, forward and backward, over those of mixing, both ways


def work_of(decoder: nn.Module, parts: Parts) -> DecoderWork:
    """Read off the decoder's config, weights and layers, as if all weights were trained."""
    config: Any = getattr(decoder, "config", None)
    default = Shape()
    heads = getattr(config, "num_attention_heads", default.heads)
    hidden = getattr(config, "hidden_size", heads * default.head_dim)
    shape = Shape(
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or max(hidden // heads, 1),
        itemsize=next((p.element_size() for p in decoder.parameters()), default.itemsize),
    )
    active = sum(_active(p, config) for p in _multiplied(decoder))
    windows = Counter(_window(module) for _, module, role in parts if role == "attention")

    def with_window(window: int | None) -> AttentionWork:
        layers = windows[window]
        return AttentionWork(window, float(shape.flops_per_pair * layers), float(shape.kv_bytes * layers))

    everywhere = with_window(None)
    linear = [module for _, module, role in parts if callable(role)]
    mixing = SLOWDOWN * sum(map(_mixing_flops, linear))
    return DecoderWork(
        2.0 * active + mixing,
        everywhere.flops_per_pair,
        float(hidden * shape.itemsize),
        everywhere.kv_bytes,
        is_chained=bool(linear),
        flops_to_sum_up=SUM_UP_SHARE * mixing,
        windowed=tuple(with_window(window) for window in sorted(window for window in windows if window is not None)),
    )


def work_of_call(decoder: nn.Module, work: DecoderWork, with_head: bool) -> DecoderWork:
    """The same for a call: with the output layer, if that runs where the tokens are, and with weights that are frozen.

    Of three units of work a frozen weight has two. Which are frozen is known now: LoRA may come after `lw.pool`.
    """
    config: Any = getattr(decoder, "config", None)
    per_token = work.flops_per_token
    if with_head:
        per_token += 2.0 * getattr(config, "hidden_size", 0) * getattr(config, "vocab_size", 0)
    if torch.is_grad_enabled() and not is_flattened(decoder):
        per_token -= 2.0 * sum(_active(p, config) for p in _multiplied(decoder) if not p.requires_grad) / 3
    return replace(work, flops_per_token=per_token)


def _multiplied(decoder: nn.Module) -> list[Tensor]:
    """The weights without embeddings, which are looked up."""
    embeddings = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
    return [p for p in decoder.parameters() if id(p) not in embeddings]


def _window(module: Any) -> int | None:
    """Of an attention layer. Some modules have it, of others their config says it."""
    if hasattr(module, "sliding_window"):
        found: int | None = module.sliding_window
        return found
    config = getattr(module, "config", None)
    kinds, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and number is not None and kinds[number] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def _active(p: Tensor, config: Any) -> float:
    """The entries of a weight that a token uses: of stacked experts only those that it is sent to."""
    known = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in known if getattr(config, name, None)), 0)
    is_stacked = p.ndim == 3 and p.shape[0] == experts
    return p.numel() * getattr(config, "num_experts_per_tok", 1) / experts if is_stacked else p.numel()


def _mixing_flops(module: Any) -> float:
    """Of a token in a linear layer: scores and values inside a chunk, and reading and writing a state (K, V) a head.

    Hugging Face's modules say their sizes by these names; of one that does not nothing is known.
    """
    dim = getattr(module, "head_dim", 0)
    heads = getattr(module, "num_v_heads", getattr(module, "num_heads", 0))
    K, V = getattr(module, "head_k_dim", dim), getattr(module, "head_v_dim", dim)
    return 2.0 * heads * (2 * LINEAR_CHUNK * (K + V) + 3 * K * V)
