"""What the modules of a model do with tokens: the table by which `lw.parallelize` accepts or refuses a model.

    role          meaning                                                        what parallelize does
    tokenwise     each token for itself (linear, norm, MLP, experts, embedding)  nothing
    layer         a decoder layer: only joins its parts                          looks at the parts
    model         a Hugging Face model: takes the batch, calls the layers        its forward hands the batch on
    attention     softmax attention through transformers' attention interface    switches the interface
    an adapter    mixes tokens in its own way                                    its forward becomes the adapter

A module that is none of these might mix tokens, and would then silently see only those of its own rank: it is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import nn

from longweave.errors import InputError

Adapter = Callable[..., Any]
Role = str | Adapter

ROLES = ("tokenwise", "layer", "model", "attention")

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
    (r"KimiLinearDeltaAttention", "longweave.models.recurrent:kimi_linear"),
    (r"Qwen3NextGatedDeltaNet", "longweave.models.recurrent:qwen3_next"),
    (r"Qwen3_5(Moe)?GatedDeltaNet", "longweave.models.recurrent:qwen3_5"),
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

_registered: dict[type[nn.Module], Role] = {}


def register(module_class: type[nn.Module], role: Role) -> None:
    """Tell `lw.parallelize` what the modules of a class do.

    role: "tokenwise" if each token's output depends on that token alone; "layer" for a module that only calls others;
        "attention" if it calls transformers' attention interface, causally, with its keyword arguments handed on;
        "model" for a whole model whose forward takes `batch.inputs`; or an adapter, a function
        `adapter(module, step, *args, **kwargs)` that runs in the place of `module.forward(*args, **kwargs)`. `step`
        has `tokens`, `layout`, `cu_seqlens`, `group`, `plan(window=None)`, and `enter` / `leave`, which turn the
        model's (1, tokens, …) into the (tokens, …) that `lw.attention` and its siblings take, and back.

        def my_mixer(module, step, hidden_states, **kwargs):
            x = step.enter(hidden_states)
            return step.leave(lw.causal_conv1d(x, module.weight, None, step.layout, step.cu_seqlens, step.group))

        longweave.models.register(MyMixer, my_mixer)
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise InputError(f"register takes a class of modules, not {module_class!r}; give type(module)")
    if role not in ROLES and not callable(role):
        raise InputError(f"role is {role!r}; give one of {', '.join(ROLES)}, or an adapter function")
    _registered[module_class] = role


def unregister(module_class: type[nn.Module]) -> None:
    """Forget what `register` said."""
    _registered.pop(module_class, None)


def roles(model: nn.Module) -> Iterator[tuple[str, nn.Module, Role]]:
    """Name, module and role of every part of the model. Raises InputError for the first part without a role.

    What is inside a module with an adapter is the adapter's affair.
    """
    is_plain = not any(_role(part) == "model" for part in model.modules())
    adapted: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if adapted and name.startswith(adapted):
            continue
        role = _role(module)
        if role is None and is_plain and _uses_longweave(type(module)):
            role = "layer"
        if role is None or role == "refused":
            raise InputError(_refusal(name, module))
        if isinstance(role, str) and ":" in role:
            role = _load(role)
        if callable(role):
            adapted += (f"{name}.",)
        yield name, module, role


def _role(module: nn.Module) -> Role | None:
    for base in type(module).__mro__:
        if base in _registered:
            return _registered[base]
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
    if where.startswith("peft.peft_model"):
        return "layer"
    family = re.fullmatch(r"transformers\.models\.(\w+)\.modeling_\w+", where)
    if family and family[1] in FAMILIES:
        for pattern, role in _BY_NAME:
            if re.fullmatch(pattern, name):
                return role
    return None


def _uses_longweave(cls: type[nn.Module]) -> bool:
    """Whether the file that defines the class has imported longweave: then it divides its own work."""
    for value in list(vars(sys.modules.get(cls.__module__, sys)).values()):
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str) and home.split(".")[0] == "longweave":
            return True
    return False


def _load(path: str) -> Adapter:
    from importlib import import_module

    module, _, name = path.partition(":")
    adapter: Adapter = getattr(import_module(module), name)
    return adapter


def _refusal(name: str, module: nn.Module) -> str:
    cls = type(module)
    shown = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(module, nn.parallel.DistributedDataParallel) or cls.__name__ == "OptimizedModule":
        return f"the model is already wrapped in {cls.__name__}; call lw.parallelize first and wrap afterwards"
    if "Vision" in cls.__name__ or "ConditionalGeneration" in cls.__name__:
        return (
            f"{name or 'the model'} is a {shown}, a multimodal part; only the text part can be parallel: load it with "
            "AutoModelForCausalLM, or give lw.parallelize the language model inside"
        )
    return (
        f"{name or 'the model'} is a {shown}, which is not known: if it mixes tokens, it would see only those of its "
        "own rank. If it treats each token for itself, say longweave.models.register("
        f'{cls.__name__}, "tokenwise"); if it mixes tokens, register an adapter that uses lw.attention, '
        "lw.gated_delta_rule, lw.causal_conv1d or lw.gather_recompute (see longweave.models.register)"
    )
