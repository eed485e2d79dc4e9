"""Tiny models of every family, a ragged batch, and what one process makes of it: one document after another."""

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import plain_transformers  # noqa: F401 - before models are made
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTHS = [23, 1, 8, 3, 37, 2, 11]  # odd, one token, fewer tokens than ranks
CU = [0, 23, 24, 32, 35, 72, 74, 85]
VOCAB = 97

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "experts_implementation": "eager",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}

# name: transformers folder, config class, model class, what is special
FAMILIES: dict[str, tuple[str, str, str, dict]] = {
    "llama": ("llama", "LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("qwen2", "Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": (
        "qwen3",
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**EXPERTS, "norm_topk_prob": True}),
    "mistral": ("mistral", "MistralConfig", "MistralForCausalLM", {"sliding_window": 7}),
    "mixtral": (
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gemma2": (
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"sliding_window": 6, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "head_dim": 4,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "intermediate_size": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]},
    ),
    "qwen3_5": ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**DELTA_NET}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "kimi_linear": (
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            **LATENT,
            "q_lora_rank": None,
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "linear_conv_kernel_dim": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


def build(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: object) -> nn.Module:
    """A model with weights large enough, and decays slow enough, that every mistake shows."""
    folder, config_name, model_name, special = FAMILIES[family]
    package = importlib.import_module(f"transformers.models.{folder}")
    config = getattr(package, config_name)(**{**SMALL, **special, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(package, model_name)(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-3, -1)
            elif name.endswith("dt_bias"):
                p.uniform_(-2, 0)
            elif p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
            else:
                p.normal_(std=0.2)
    return model.to(dtype).train()


@dataclass
class Data:
    ids: Tensor
    labels: Tensor
    weights: Tensor


def data(seed: int = 1) -> Data:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (CU[-1],), generator=g)
    labels = ids.clone()
    labels[torch.rand(CU[-1], generator=g) < 0.2] = -100
    labels[CU[2] : CU[3]] = -100  # nothing of this document counts
    return Data(ids, labels, torch.rand(CU[-1], generator=g, dtype=torch.float64))


@contextmanager
def exact(dtype: torch.dtype, family: str) -> Iterator[None]:
    """Inside, a float64 model computes in float64: its modules round many things to float32 by name."""
    if dtype != torch.float64:
        yield
        return
    folder = FAMILIES[family][0]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    proxy = ModuleType("torch")
    proxy.__getattr__ = lambda name: getattr(torch, name)
    proxy.float32 = proxy.float = torch.float64
    real, to_float = module.torch, Tensor.float
    module.torch = proxy
    Tensor.float = lambda x: x if x.dtype == torch.float64 else to_float(x)
    try:
        yield
    finally:
        module.torch, Tensor.float = real, to_float


@dataclass
class Expected:
    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]
    logprobs: Tensor


def one_process(model: nn.Module, family: str, batch: Data, weighted: bool = False) -> Expected:
    """The unmodified model, eager attention, one document at a time, mean loss over the labels that count."""
    model = copy.deepcopy(model)
    dtype = next(model.parameters()).dtype
    pieces, losses, logprobs, valid = [], [], [], 0
    with exact(dtype, family):
        for start, stop in pairwise(CU):
            logits = model(input_ids=batch.ids[None, start:stop], use_cache=False).logits[0]
            targets = batch.labels[start + 1 : stop]
            nll = F.cross_entropy(logits[:-1], targets, ignore_index=-100, reduction="none")
            losses.append((nll * batch.weights[start + 1 : stop]).sum() if weighted else nll.sum())
            valid += int((targets != -100).sum())
            pieces.append(logits.detach())
            logprobs.append(torch.cat([nll.new_zeros(1), -nll.detach()]))
        loss = sum(losses) / valid
        loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return Expected(torch.cat(pieces), loss.detach(), grads, torch.cat(logprobs))
