"""What the modules of a model do with tokens: the table by which `lw.parallelize` accepts or refuses a model.

    role          meaning                                                        what parallelize does
    tokenwise     each token for itself (linear, norm, MLP, experts, embedding)  nothing
    layer         only joins its parts, or calls longweave's operators itself    looks at the parts
    model         a Hugging Face model: takes the batch, calls the layers        its forward hands the batch on
    attention     softmax attention through transformers' attention interface    switches the interface
    an adapter    mixes tokens in its own way                                    its forward becomes the adapter

A module that is none of these might mix tokens, and would then silently see only those of its own rank: it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from longweave.errors import InputError, shown

Adapter = Callable[..., Any]
Role = str | Adapter

# The roles that have names, with what a module of the role does.
ROLES = {
    "tokenwise": "each token's output depends on that token alone",
    "layer": "only joins its parts, or calls longweave's operators itself",
    "model": "a whole model, whose forward takes batch.inputs",
    "attention": "calls transformers' attention interface and hands its keyword arguments on",
}

# Families of transformers whose source was read for this table. In others the same class names could mean other things.
FAMILIES = (
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gpt_oss",
    "kimi_linear",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
)

# The first pattern that fits decides. The adapters live in a module that is loaded when one is needed.
_BY_NAME: tuple[tuple[str, str], ...] = (
    (r"\w*Vision\w*", "refused"),
    (r"KimiLinearDeltaAttention", "longweave.models.adapters:kimi_linear"),
    (r"Qwen3NextGatedDeltaNet", "longweave.models.adapters:qwen3_next"),
    (r"Qwen3_5(Moe)?GatedDeltaNet", "longweave.models.adapters:qwen3_5"),
    (r"\w+(RMSNorm|RMSNormGated|RotaryEmbedding|ForgetGate)", "tokenwise"),
    (r"\w+(MLP|Experts|TopKRouter|TopkRouter|Router|SparseMoeBlock|SparseMoeLayer|MoE)", "tokenwise"),
    (r"\w+Attention", "attention"),
    (r"\w+DecoderLayer", "layer"),
    (r"\w+(ForCausalLM|Model)", "model"),
)

# Whatever a subclass does (quantised weights, fused kernels), it stays what it is.
_TORCH_TOKENWISE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)

# Only with torch's own forward: a subclass may do anything.
_TORCH_PLAIN = (
    nn.Identity,
    nn.Dropout,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Sequential,
    nn.ParameterList,
    nn.ParameterDict,
)

# What users told us about classes, until they call `unregister`.
_registered: dict[type[nn.Module], Role] = {}


def register(module_class: type[nn.Module], role: Role) -> None:
    """Tell `lw.parallelize` what the modules of a class do.

    role: "tokenwise" if each token's output depends on that token alone; "layer" for a module that only joins its parts
        or calls longweave's operators itself; "attention" if it calls transformers' attention interface with its
        keyword arguments handed on; "model" for a whole model whose forward takes `batch.inputs`; or an adapter, a
        function `adapter(module, pack, *args, **kwargs)` that runs in the place of `module.forward(*args, **kwargs)`.
        `pack` is the batch's `lw.Pack`. A model's tensors are (1, tokens, …): `longweave.models.unbatch` makes them the
        (tokens, …) that `lw.attention` and its siblings take, and `rebatch` is the way back.

        from longweave.models import rebatch, register, unbatch

        def my_mixer(module, pack, hidden_states, **kwargs):
            x = unbatch(hidden_states, pack)
            return rebatch(lw.causal_conv1d(x, module.weight, None, pack), pack)

        register(MyMixer, my_mixer)
    """
    _check_class(module_class)
    if not callable(role) and not (isinstance(role, str) and role in ROLES):
        raise InputError(f"role is {shown(role)}; give one of {', '.join(ROLES)}, or an adapter function")
    _registered[module_class] = role


def unregister(module_class: type[nn.Module]) -> None:
    """Forget what `register` said."""
    _check_class(module_class)
    _registered.pop(module_class, None)


def _check_class(module_class: object) -> None:
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise InputError(f"register takes a class of modules, not {shown(module_class)}; give type(module)")


def roles(model: nn.Module) -> list[tuple[str, nn.Module, Role]]:
    """Name, module and role of every part of the model. Raises one InputError for all parts without a role.

    What is inside a module with an adapter is the adapter's affair.
    """
    found: list[tuple[str, nn.Module, Role]] = []
    unknown: dict[type[nn.Module], str] = {}  # with the name of the first one
    adapted: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if adapted and name.startswith(adapted):
            continue
        role = _role(module)
        if role is None or role == "refused":
            _refuse_special(name, module)
            unknown.setdefault(type(module), name)
            continue
        if isinstance(role, str) and ":" in role:
            role = _load(role)
        if callable(role):
            adapted += (f"{name}.",)
        found.append((name, module, role))
    if unknown:
        raise InputError(_refusal(unknown))
    return found


def is_model(module: nn.Module) -> bool:
    """Is it a whole model, with or without a head?"""
    return _role(module) == "model"


def _role(module: nn.Module) -> Role | None:
    for base in type(module).__mro__:
        if base.__module__.startswith("torch.distributed.fsdp"):
            continue  # the class that fully_shard makes of the module's own, which follows
        if base in _registered:
            return _registered[base]
        if base.__module__ == "peft.tuners.lora.model":
            return "layer"
        if "forward" in vars(base):
            break  # what base classes of this one do no longer matters
    if isinstance(module, _TORCH_TOKENWISE):
        return "tokenwise"
    where, name = base.__module__, base.__qualname__
    if isinstance(module, _TORCH_PLAIN) and where.startswith("torch.nn.modules."):
        return "tokenwise"
    if where == "torch.nn.modules.activation" and name != "MultiheadAttention":
        return "tokenwise"
    if where == "transformers.activations" or where.startswith("peft.tuners.lora."):
        return "tokenwise"
    if where in ("peft.peft_model", "peft.utils.other"):
        return "layer"
    family = re.fullmatch(r"transformers\.models\.(\w+)\.modeling_\w+", where)
    if family and family[1] in FAMILIES:
        for pattern, role in _BY_NAME:
            if re.fullmatch(pattern, name):
                return role
    return None


def _load(path: str) -> Adapter:
    module, _, name = path.partition(":")
    adapter: Adapter = getattr(import_module(module), name)
    return adapter


def _refuse_special(name: str, module: nn.Module) -> None:
    """Modules for which a role would be the wrong remedy."""
    cls = type(module)
    if isinstance(module, nn.parallel.DistributedDataParallel) or cls.__name__ == "OptimizedModule":
        raise InputError(
            f"the model is already wrapped in {cls.__name__}; call lw.parallelize first and wrap afterwards"
        )
    if "Vision" in cls.__name__ or "ConditionalGeneration" in cls.__name__:
        raise InputError(
            f"{name or 'the model'} is a {cls.__module__}.{cls.__qualname__}, a multimodal part; only the text part "
            "can be parallel: load it with AutoModelForCausalLM, or give lw.parallelize the language model inside"
        )


def _refusal(unknown: dict[type[nn.Module], str]) -> str:
    places = [f"{name or 'the model'} is a {cls.__module__}.{cls.__qualname__}" for cls, name in unknown.items()]
    meanings = [(f'"{role}"', meaning) for role, meaning in ROLES.items()]
    meanings.append(("an adapter", "adapter(module, pack, *args, **kwargs) runs in the place of its forward"))
    imports, lines = ["import longweave.models"], []
    for cls, name in unknown.items():
        shown = cls.__qualname__
        if "." in shown:  # defined inside a function or a class: there is nothing to import
            shown = f'type(model.get_submodule("{name}"))'
        elif cls.__module__ != "__main__":
            imports.append(f"from {cls.__module__} import {shown}")
        lines.append(f"longweave.models.register({shown}, ROLE)")
    return "\n".join(
        [
            "the model has classes without a role:",
            *(f"    {place}" for place in places),
            "A module that mixes tokens would see only those of its own rank. Say what each class does:",
            *(f"    {role:<13}{meaning}" for role, meaning in meanings),
            "These lines, with a role in the place of each ROLE (see longweave.models.register):",
            *(f"    {line}" for line in [*imports, *lines]),
        ]
    )
