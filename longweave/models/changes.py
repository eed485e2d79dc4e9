"""What is changed on a model, and how it is put back: `lw.restore`.

    set         an attribute of one module: a forward of our own, another config
    checkpoints remember what was running, for the recomputation in backward

Weights, hooks, and the class of every module stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from longweave.errors import InputError
from longweave.models.running import current, rerun

M = TypeVar("M", bound=nn.Module)

_UNDO = "_longweave_undo"
_GONE = object()
_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")


@dataclass
class Undo:
    """How each module was before. A deep copy of a model takes its own along, because all of it is found by module."""

    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    configs: list[tuple[Any, Any, dict[str, Any]]] = field(default_factory=list)  # original, copy, copy as it began
    hooks: list[tuple[nn.Module, int]] = field(default_factory=list)
    methods: list[tuple[nn.Module, str, Callable[..., Any]]] = field(default_factory=list)

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        self.attributes.append((module, name, vars(module).get(name, _GONE)))
        vars(module)[name] = value

    def replace(self, module: nn.Module, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """In the place of a method comes `make(method)`; both take the module first."""
        before = vars(module).get(name)
        if before is None:
            method = make(getattr(type(module), name))
        else:  # somebody has already put one on this very module
            method = make(_unbound(before))
        # A bound method: a deep copy of the model binds it to the copied module.
        self.set(module, name, MethodType(method, module))
        self.methods.append((module, name, method))

    def hook(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Call `before` and `after` around every call of the module, with its keyword arguments."""
        first = module.register_forward_pre_hook(before, with_kwargs=True)
        last = module.register_forward_hook(after, with_kwargs=True)
        self.hooks += [(module, first.id), (module, last.id)]

    def keep(self, model: nn.Module) -> None:
        """Write it down on the module that `restore` will be given."""
        self.set(model, _UNDO, self)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise InputError(
            "a model that is parallel or pooled cannot be pickled, by torch.save(model) or for another process; call "
            "lw.restore(model) first, or save model.state_dict() or model.save_pretrained(folder)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Undo:
        attributes = [
            (deepcopy(module, memo), name, before if before is _GONE else deepcopy(before, memo))
            for module, name, before in self.attributes
        ]
        return Undo(
            attributes,
            [(deepcopy(old, memo), deepcopy(new, memo), dict(was)) for old, new, was in self.configs],
            [(deepcopy(module, memo), number) for module, number in self.hooks],
            [(deepcopy(module, memo), name, method) for module, name, method in self.methods],
        )


def _unbound(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of one module as a function that takes a module first: of a bound one, a deep copy uses its own."""
    if isinstance(method, MethodType):
        return method.__func__

    def function(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return function


def is_changed(model: nn.Module) -> bool:
    """Was any part of it changed by `lw.parallelize` or `lw.pool`, as a part of whatever was given to them?"""
    return any(name.startswith("_longweave") for module in model.modules() for name in vars(module))


def restore(model: M) -> M:
    """Undo `lw.parallelize` or `lw.pool`: the model runs in one process again. Returns the model.

    Changes that were made to `model.config` in between stay.
    """
    undo = vars(model).get(_UNDO) if isinstance(model, nn.Module) else None
    if undo is None:
        raise InputError(
            "the model is neither parallel nor pooled; restore takes the module that was given to lw.parallelize or "
            "lw.pool"
        )
    for module, name, method in undo.methods:
        now = vars(module).get(name)
        if getattr(now, "__func__", now) is not method:
            raise InputError(
                f"the {name} of {type(module).__name__} was replaced after lw.parallelize or lw.pool, as accelerate "
                "and TRL do; to restore would undo that, too. Restore before, or pool a copy: copy.deepcopy(model)"
            )
    _unbind_checkpoints(model)
    for module, number in undo.hooks:
        for name in _HOOKS:
            vars(module)[name].pop(number, None)
    for module, name, before in reversed(undo.attributes):
        if before is _GONE:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = before
    for original, changed, was in undo.configs:
        for name, value in vars(changed).items():
            if name not in was or value is not was[name]:
                vars(original)[name] = value
    return model


class PackCheckpoint:
    """A layer's checkpoint function that remembers the pack for the recomputation in backward."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now = current()
        again = function if now is None else partial(rerun, now, function)
        return self.checkpoint(again, *args, **kwargs)


def bind_checkpoints(model: nn.Module) -> None:
    """Done in every forward: `gradient_checkpointing_enable` may be called at any time."""
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if function is not None and not isinstance(function, PackCheckpoint):
            vars(module)["_gradient_checkpointing_func"] = PackCheckpoint(function)


def _unbind_checkpoints(model: nn.Module) -> None:
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if isinstance(function, PackCheckpoint):
            vars(module)["_gradient_checkpointing_func"] = function.checkpoint
