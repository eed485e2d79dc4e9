"""The layers of a model across ranks: what `lw.parallelize` and `lw.pool` change inside a decoder.

    config               modules refer to a copy whose attention implementation is ours
    linear mixers        their forward becomes the adapter (`longweave.models.adapters`)

Both find the running pack by themselves (`longweave.models.running`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial, wraps
from typing import Any

from torch import nn

from longweave.errors import InputError
from longweave.models.adapters import NAME, register_with_transformers
from longweave.models.changes import Undo
from longweave.models.roles import Role
from longweave.models.running import KEY, Alone, current, find_pack

Parts = Sequence[tuple[str, nn.Module, Role]]


def check_layers(parts: Parts, modules: Iterable[nn.Module]) -> None:
    """Raise for layers that would depend on which tokens a rank happens to hold; `modules` are all of the model."""
    for name, module, _ in parts:
        _check_rotary(name, module)
    for module in modules:
        _check_lora(module)


def switch_layers(parts: Parts, modules: Iterable[nn.Module], undo: Undo) -> None:
    """Let the parts run across ranks; `modules` are all that share their configs."""
    if any(role == "attention" for *_, role in parts):
        register_with_transformers()
        _switch_configs(modules, undo)
    for _, module, role in parts:
        if callable(role):
            undo.replace(module, "forward", partial(_adapter_forward, role))


def config_sharers(model: nn.Module, decoders: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules inside the decoders, and those around them whose config is the decoders' own or contains it.

    Others (a vision tower, a second encoder) keep the attention that they have.
    """
    inside = [module for decoder in decoders for module in decoder.modules()]
    ours = {id(vars(module)["config"]) for module in inside if "config" in vars(module)}
    return [module for module in model.modules() if _contains(vars(module).get("config"), ours)]


def _contains(config: Any, ours: set[int]) -> bool:
    if not hasattr(config, "_attn_implementation"):
        return False
    return id(config) in ours or any(_contains(part, ours) for part in vars(config).values())


def check_mask(parts: Parts, mask: str) -> None:
    """Raise if attention layers see ahead and the mask does not, or the other way round."""
    for name, module, role in parts:
        if role != "attention":
            continue
        config = getattr(module, "config", None)
        wanted = "causal" if getattr(module, "is_causal", True) and getattr(config, "is_causal", True) else "full"
        if wanted != mask:
            sees = "sees what stands before a token only" if wanted == "causal" else "sees the whole document"
            raise InputError(
                f'mask is "{mask}", but {name}, a {type(module).__name__}, {sees}; give lw.pool(..., mask="{wanted}"), '
                'which is "causal" for a decoder and "full" for an encoder'
            )


def _switch_configs(modules: Iterable[nn.Module], undo: Undo) -> None:
    """Give the model configs of its own: other models may share the objects that it was made with."""
    copies: dict[int, Any] = {}
    for module in modules:
        config = vars(module).get("config")
        if not hasattr(config, "_attn_implementation"):
            continue
        if id(config) not in copies:
            copies[id(config)] = changed = copy(config)
            vars(changed)["_attn_implementation_internal"] = NAME
            undo.configs.append((config, changed, {}))
        undo.set(module, "config", copies[id(config)])
    for _, changed, was in undo.configs:
        for name, value in vars(changed).items():
            if id(value) in copies:
                vars(changed)[name] = copies[id(value)]
        was.update(vars(changed))


def _adapter_forward(adapter: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that calls the adapter with the pack of this batch."""

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(current(), Alone):
            return original(self, *args, **kwargs)
        pack = find_pack(kwargs)
        kwargs.pop(KEY, None)
        return adapter(self, pack, *args, **kwargs)

    return forward


def _check_rotary(name: str, module: nn.Module) -> None:
    kind = getattr(module, "rope_type", "default")
    kinds = kind.values() if isinstance(kind, dict) else (kind,)
    for one in kinds:
        if isinstance(one, str) and (one == "longrope" or "dynamic" in one):
            raise InputError(
                f"{name} is a rotary embedding of type {one!r}, whose frequencies depend on the longest position that "
                "a rank happens to hold; set rope_parameters to a type that does not, such as 'yarn' or 'default'"
            )


def _check_lora(module: nn.Module) -> None:
    configs = getattr(module, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        if getattr(config, "alora_invocation_tokens", None):
            raise InputError(
                "the LoRA is an activated one (alora_invocation_tokens), which looks for tokens that another rank may "
                "hold; train without them"
            )
