"""Small models of the families that users train, from their Hugging Face configurations, with random weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from longweave.errors import InputError
from longweave.tools.train.data import VOCABULARY


def build(family: str, hidden: int, layers: int) -> nn.Module:
    """A random model of a family; `hidden` is a multiple of 32."""
    from transformers import AutoModelForCausalLM

    if family not in FAMILIES:
        raise InputError(f"model is {family!r}; choose one of {', '.join(FAMILIES)}")
    if hidden % 32 or hidden < 32:
        raise InputError(f"hidden is {hidden}; give a multiple of 32")
    model: nn.Module = AutoModelForCausalLM.from_config(_config(family, hidden, layers))  # type: ignore[no-untyped-call]
    return model


def _config(family: str, hidden: int, layers: int) -> Any:
    from transformers import AutoConfig

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": False,
        "use_cache": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    name, extra = FAMILIES[family]
    return AutoConfig.for_model(name, **common, **extra(hidden, layers))


def _hybrid(hidden: int, layers: int) -> dict[str, Any]:
    """Three layers of GatedDeltaNet to one of softmax attention, as in Qwen3.5."""
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)]
    return {
        "layer_types": kinds,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": hidden // 4,
        "linear_value_head_dim": hidden // 4,
        "linear_conv_kernel_dim": 4,
    }


def _experts(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": hidden,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }


FAMILIES: dict[str, tuple[str, Any]] = {
    "qwen3_5": ("qwen3_5_text", _hybrid),
    "qwen3_next": ("qwen3_next", lambda h, n: _hybrid(h, n) | _experts(h, n)),
    "llama": ("llama", lambda h, n: {}),
    "qwen3": ("qwen3", lambda h, n: {}),
    "qwen3_moe": ("qwen3_moe", _experts),
    "mistral": ("mistral", lambda h, n: {"sliding_window": 128}),
}
