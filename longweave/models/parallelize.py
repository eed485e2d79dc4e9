"""`lw.parallelize` and `lw.restore`: switch a model between one process and one sequence over many ranks.

What changes in the model, and nothing else:

    config                   modules refer to a copy whose attention implementation is ours
    forward of models        checks the call, makes the batch's pack the running one, corrects the balancing loss
    forward of linear mixers the adapter (`longweave.models.adapters`)
    checkpoint functions     remember the pack for the recomputation in backward

`restore` puts every one of these back. Weights, hooks, and the class of every module stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import signature
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from longweave.comm.exchange import Group, name_of, resolve
from longweave.errors import GroupError, InputError
from longweave.models.adapters import NAME, balancing_loss, register_with_transformers
from longweave.models.roles import Role, roles
from longweave.models.running import KEY, find_pack, model_tokens, rerun, running
from longweave.pack import Pack

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
    before DistributedDataParallel or torch.compile, and after `peft.get_peft_model`; `fully_shard` may come before or
    after. A model that calls `lw.attention` itself does not need it.

    Raises `InputError` for a model with modules that have no role (it names them all and says how to register them),
    for rotary embeddings that depend on the longest sequence seen, for a model that is already parallel, and for a mesh
    of several dimensions.

        lw.parallelize(model, mesh["cp"])
        batch = lw.shard_batch(input_ids, cu_seqlens, mesh["cp"])
        loss = batch.loss(model(**batch.inputs).logits)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    resolve(group)
    if any(_MARK in vars(module) for module in model.modules()):
        raise InputError("the model is parallel already; call lw.restore(model) first to give it another group")
    parts = roles(model)  # raises before anything is changed
    for name, module, _ in parts:
        _check_rotary(name, module)
        _check_lora(module)
    undo = Undo()
    if any(role == "attention" for *_, role in parts):
        register_with_transformers()
        _switch_configs(parts, undo)
    for _, module, role in parts:
        if role == "model":
            undo.set(module, _MARK, name_of(group))
            _replace_forward(module, _model_forward, undo)
        elif callable(role):
            _replace_forward(module, partial(_adapter_forward, role), undo)
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
    _unbind_checkpoints(model)
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


def _check_lora(module: nn.Module) -> None:
    configs = getattr(module, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        if getattr(config, "alora_invocation_tokens", None):
            raise InputError(
                "the LoRA is an activated one (alora_invocation_tokens), which looks for tokens that another rank may "
                "hold; train without them"
            )


# -- forward of a parallel model -------------------------------------------------------------------------


def _model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward in the place of `original`, which is the unbound forward of a model's class."""
    parameters = signature(original)

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        pack = find_pack(kwargs)
        asked = {**parameters.bind_partial(self, *args, **kwargs).arguments, **kwargs}
        _check_call(self, pack, asked)
        _bind_checkpoints(self)
        with running(pack):
            out = original(self, *args, **kwargs)
        return _correct_balancing_loss(self, pack, asked, out)

    return forward


def _adapter_forward(adapter: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that calls the adapter with the pack of this batch."""

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        pack = find_pack(kwargs)
        kwargs.pop(KEY, None)
        return adapter(self, pack, *args, **kwargs)

    return forward


class PackCheckpoint:
    """A layer's checkpoint function that remembers the pack for the recomputation in backward."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(partial(rerun, find_pack({}), function), *args, **kwargs)


def _bind_checkpoints(model: nn.Module) -> None:
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


def _check_call(model: nn.Module, pack: Pack, asked: Mapping[str, Any]) -> None:
    group = vars(model).get(_MARK)
    if group is not None and name_of(pack.group) != group:
        raise GroupError(
            "the batch was made for another process group than the model; give lw.shard_batch and lw.parallelize the "
            'same group, such as mesh["cp"]'
        )
    if asked.get("use_cache") or asked.get("past_key_values") is not None:
        raise InputError(
            f"use_cache is {asked.get('use_cache')}: a parallel model keeps no KV cache; leave use_cache=False as in "
            "batch.inputs, or lw.restore(model) before generating"
        )
    if asked.get("attention_mask") is not None:
        raise InputError(
            "a parallel model takes no attention_mask: it would cover this rank's tokens only; give padding to "
            "lw.shard_batch(input_ids, attention_mask=...) and other masks to lw.shard_batch(..., mask=...)"
        )
    if asked.get("output_attentions"):
        raise InputError("a parallel model never holds attention weights; call it without output_attentions")
    if asked.get("labels") is not None and asked.get("shift_labels") is None:
        raise InputError(
            "labels were given to the parallel model itself, which would shift them inside this rank's tokens; "
            "give them to lw.shard_batch(..., labels=labels)"
        )
    for name in ("input_ids", "inputs_embeds"):
        x = asked.get(name)
        if x is not None and tuple(x.shape[:2]) != (1, model_tokens(pack)):
            raise InputError(
                f"{name} has the shape {tuple(x.shape)} but this rank's batch has (1, {model_tokens(pack)}); "
                "call the model with batch.inputs unchanged"
            )


def _correct_balancing_loss(model: Any, pack: Pack, asked: Mapping[str, Any], out: Any) -> Any:
    """Replace the loss over this rank's tokens that the model computed by this rank's part of the true one."""
    aux = getattr(out, "aux_loss", None)
    wanted = asked.get("output_router_logits")
    if wanted is None:
        wanted = getattr(getattr(model, "config", None), "output_router_logits", False)
    if aux is None and not (wanted and isinstance(out, tuple)):
        return out
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    if aux is None or not all(hasattr(model, name) for name in names):
        raise InputError(
            f"{type(model).__name__} returns a load-balancing loss in a form that is not known, over this rank's "
            "tokens only; call it with output_router_logits=False, or with return_dict=True"
        )
    part = balancing_loss(out.router_logits, model.num_experts, model.num_experts_per_tok, pack)
    if out.loss is not None:
        out.loss = out.loss + model.router_aux_loss_coef * (part - aux).to(out.loss.device)
    out.aux_loss = part
    return out
