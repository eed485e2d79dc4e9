"""`lw.parallelize`: switch a model from one process to one sequence over many ranks.

What changes in the model, and nothing else:

    config, linear mixers    run across ranks (`longweave.models.layers`)
    forward of models        checks the call, makes the batch's pack the running one, corrects the balancing loss
    checkpoint functions     remember the pack for the recomputation in backward

`lw.restore` puts every one of these back (`longweave.models.changes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from torch import nn

from longweave.comm.exchange import Group, name_of, resolve
from longweave.errors import GroupError, InputError
from longweave.models.adapters import balancing_loss
from longweave.models.changes import Undo, bind_checkpoints, is_changed
from longweave.models.layers import check_layers, switch_layers
from longweave.models.roles import roles
from longweave.models.running import current, find_pack, model_tokens, running
from longweave.models.weights import note_weights
from longweave.pack import Pack

M = TypeVar("M", bound=nn.Module)

_MARK = "_longweave_group"
_COMPARES = "_longweave_compares_weights"


def parallelize(model: M, group: Group = None, *, compare_weights: bool = True) -> M:
    """Let the model run on batches whose sequence is divided over the ranks of a group. In place; returns the model.

    group: a ProcessGroup, a 1-D DeviceMesh such as `mesh["cp"]`, or None for the default group.
    compare_weights: let a checksum of the weights ride on the comparison of some packs, so that a forgotten
        `lw.reduce_gradients` is named. Not for models whose ranks hold different weights, such as their own experts.

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
    if is_changed(model):
        raise InputError("the model is parallel or pooled already; call lw.restore(model) first")
    parts = roles(model)  # raises before anything is changed
    check_layers(parts, model.modules())
    undo = Undo()
    switch_layers(parts, [module for _, module, _ in parts], undo)
    for _, module, role in parts:
        if role == "model":
            undo.set(module, _MARK, name_of(group))
            undo.set(module, _COMPARES, compare_weights)
            undo.replace(module, "forward", _model_forward)
    if _MARK not in vars(model):
        undo.set(model, _MARK, name_of(group))
    undo.keep(model)
    return model


# -- forward of a parallel model -------------------------------------------------------------------------


def _model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward in the place of `original`, which is the unbound forward of a model's class."""
    parameters = signature(original)

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        pack = find_pack(kwargs)
        asked = {**parameters.bind_partial(self, *args, **kwargs).arguments, **kwargs}
        _check_call(self, pack, asked)
        bind_checkpoints(self)
        if vars(self)[_COMPARES] and current() is None:  # the outermost of models in models
            note_weights(self, pack.core.comm.ledger)
        with running(pack):
            out = original(self, *args, **kwargs)
        return _correct_balancing_loss(self, pack, asked, out)

    return forward


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
