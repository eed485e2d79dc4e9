"""The forward of a parallel Hugging Face model: what is checked before the layers run, and what is mended after.

Its own forward runs unchanged in between, with the batch's step in the context variable for layers that get no keyword
arguments, and bound to every checkpointed layer, which will run again in backward when no forward is running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import signature
from typing import Any

from torch import nn

from longweave.comm.groups import name_of
from longweave.errors import GroupError, InputError
from longweave.models.experts import balancing_loss
from longweave.models.step import KEY, Step, find, rerun, running


def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward in the place of `original`, which is the unbound forward of a model's class."""

    parameters = signature(original)

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        step = find(kwargs)
        asked = {**parameters.bind_partial(self, *args, **kwargs).arguments, **kwargs}
        _check(self, step, asked)
        bind_checkpoints(self)
        with running(step):
            out = original(self, *args, **kwargs)
        return _mend_balancing_loss(self, step, asked, out)

    return forward


def adapted(original: Callable[..., Any], adapter: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that calls the adapter with the step of this batch."""

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        step = find(kwargs)
        kwargs.pop(KEY, None)
        return adapter(self, step, *args, **kwargs)

    return forward


class Bound:
    """A layer's checkpoint function that remembers the step for the recomputation in backward."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(partial(rerun, find({}), function), *args, **kwargs)


def bind_checkpoints(model: nn.Module) -> None:
    """Done in every forward: `gradient_checkpointing_enable` may be called at any time."""
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if function is not None and not isinstance(function, Bound):
            vars(module)["_gradient_checkpointing_func"] = Bound(function)


def unbind_checkpoints(model: nn.Module) -> None:
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if isinstance(function, Bound):
            vars(module)["_gradient_checkpointing_func"] = function.checkpoint


def _check(model: nn.Module, step: Step, asked: Mapping[str, Any]) -> None:
    group = find_group(model)
    if group is not None and name_of(step.group) != group:
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
            "a parallel model takes no attention_mask: it would cover this rank's tokens only; give it to "
            "lw.shard_batch(input_ids, attention_mask=...)"
        )
    if asked.get("output_attentions"):
        raise InputError("a parallel model never holds attention weights; call it without output_attentions")
    if asked.get("labels") is not None and asked.get("shift_labels") is None:
        raise InputError(
            "labels were given to the parallel model itself, which would shift them inside this rank's tokens; "
            "give them to lw.shard_batch(..., labels=labels)"
        )
    ids = asked.get("input_ids")
    if ids is not None and tuple(ids.shape) != (1, max(step.tokens, 1)):
        raise InputError(
            f"input_ids has the shape {tuple(ids.shape)} but this rank's batch has (1, {max(step.tokens, 1)}); "
            "call the model with batch.inputs unchanged"
        )


def find_group(model: nn.Module) -> str | None:
    """The name of the group that the model was made parallel on. Inner models know it from the outer one's mark."""
    return vars(model).get("_longweave_group")


def _mend_balancing_loss(model: Any, step: Step, asked: Mapping[str, Any], out: Any) -> Any:
    """Replace the loss over this rank's tokens that the model computed by this rank's part of the true one."""
    aux = getattr(out, "aux_loss", None)
    wanted = asked.get("output_router_logits")
    wanted = getattr(model.config, "output_router_logits", False) if wanted is None else wanted
    if aux is None and not (wanted and isinstance(out, tuple)):
        return out
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    if aux is None or not all(hasattr(model, name) for name in names):
        raise InputError(
            f"{type(model).__name__} returns a load-balancing loss in a form that is not known, over this rank's "
            "tokens only; call it with output_router_logits=False, or with return_dict=True"
        )
    part = balancing_loss(out.router_logits, model.num_experts, model.num_experts_per_tok, step)
    if out.loss is not None:
        out.loss = out.loss + model.router_aux_loss_coef * (part - aux).to(out.loss.device)
    out.aux_loss = part
    return out
