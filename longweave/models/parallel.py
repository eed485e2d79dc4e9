"""`lw.parallelize` and `lw.restore`: switch a model between one process and one sequence over many ranks.

What changes in the model, and nothing else:

    config                   modules refer to a copy whose attention implementation is ours
    forward of models        takes the step from the batch, checks the call (`longweave.models.shell`)
    forward of linear mixers the adapter (`longweave.models.recurrent`)

`restore` puts every one of these back. Weights, hooks, and the class of every module stay as they are.
"""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from longweave.comm.groups import Group, name_of, resolve
from longweave.errors import InputError
from longweave.models.attention import NAME, register_with_transformers
from longweave.models.known import Role, roles
from longweave.models.shell import adapted, guarded, unbind_checkpoints

M = TypeVar("M", bound=nn.Module)

_MARK = "_longweave_group"
_UNDO = "_longweave_undo"
_GONE = object()


@dataclass
class Undo:
    """How each module was before. A deep copy of a model takes its own along, because all of it is found by module."""

    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    configs: list[tuple[Any, Any, dict[str, Any]]] = field(default_factory=list)  # original, copy, copy as it began

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        self.attributes.append((module, name, vars(module).get(name, _GONE)))
        vars(module)[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Undo:
        attributes = [
            (deepcopy(module, memo), name, before if before is _GONE else deepcopy(before, memo))
            for module, name, before in self.attributes
        ]
        return Undo(
            attributes, [(deepcopy(old, memo), deepcopy(new, memo), dict(was)) for old, new, was in self.configs]
        )


def parallelize(model: M, group: Group = None) -> M:
    """Let the model run on batches whose sequence is divided over the ranks of a group. In place; returns the model.

    group: a ProcessGroup, a 1-D DeviceMesh such as `mesh["cp"]`, or None for the default group.

    From then on the model takes `lw.shard_batch(...).inputs` and nothing else; `lw.restore` makes it as it was. Call it
    before DistributedDataParallel or torch.compile; `fully_shard` may come before or after. A model of plain PyTorch
    that calls `lw.attention` itself passes unchanged.

    Raises `InputError` for a model that holds a module which is not known (it names the module and says how to register
    it), for rotary embeddings that depend on the longest sequence seen, for a model that is already parallel, and for a
    mesh of several dimensions.

        lw.parallelize(model, mesh["cp"])
        batch = lw.shard_batch(input_ids, cu_seqlens, mesh["cp"])
        loss = batch.loss(model(**batch.inputs).logits)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    resolve(group)
    if any(_MARK in vars(module) for module in model.modules()):
        raise InputError("the model is parallel already; call lw.restore(model) first to give it another group")
    parts = list(roles(model))  # raises before anything is changed
    for name, module, _ in parts:
        _check_rotary(name, module)
    undo = Undo()
    if any(role == "attention" for *_, role in parts):
        register_with_transformers()
        _switch_configs(parts, undo)
    for _, module, role in parts:
        if role == "model":
            undo.set(module, _MARK, name_of(group))
            _replace_forward(module, guarded, undo)
        elif callable(role):
            _replace_forward(module, lambda original, role=role: adapted(original, role), undo)
    if _MARK not in vars(model):
        undo.set(model, _MARK, name_of(group))
    undo.set(model, _UNDO, undo)
    return model


def restore(model: M) -> M:
    """Undo `lw.parallelize`: the model runs in one process again, can generate and keep a KV cache. Returns the model.

    Changes that were made to `model.config` in between stay.
    """
    undo = vars(model).get(_UNDO) if isinstance(model, nn.Module) else None
    if undo is None:
        raise InputError("the model is not parallel; restore takes the module that was given to lw.parallelize")
    unbind_checkpoints(model)
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


def _replace_forward(module: nn.Module, make: Any, undo: Undo) -> None:
    before = vars(module).get("forward")
    if before is None:
        forward = make(type(module).forward)
    else:  # somebody has already put a forward on this very module
        forward = make(lambda self, *args, **kwargs: before(*args, **kwargs))
    # A bound method: a deep copy of the model binds it to the copied module.
    undo.set(module, "forward", MethodType(forward, module))


def _switch_configs(parts: list[tuple[str, nn.Module, Role]], undo: Undo) -> None:
    """Give the model configs of its own: other models may share the objects that it was made with."""
    copies: dict[int, Any] = {}
    holders = [module for _, module, _ in parts if hasattr(vars(module).get("config"), "_attn_implementation")]
    for module in holders:
        config = vars(module)["config"]
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


def _check_rotary(name: str, module: nn.Module) -> None:
    kind = getattr(module, "rope_type", "default")
    kinds = kind.values() if isinstance(kind, dict) else (kind,)
    for one in kinds:
        if isinstance(one, str) and (one == "longrope" or "dynamic" in one):
            raise InputError(
                f"{name} is a rotary embedding of type {one!r}, whose frequencies depend on the longest position that "
                "a rank happens to hold; set rope_parameters to a type that does not, such as 'yarn' or 'default'"
            )
