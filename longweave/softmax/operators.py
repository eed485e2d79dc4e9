"""The operators behind `lw.attention`: one pair as PyTorch runs it, one pair as `torch.compile` puts it into a graph.

                         what backward needs besides the inputs          sizes
    attention            its outputs: autograd and its hooks see them    as they are
    attention_in_graph   held by the memory of a handle, an output       none that a graph would have to guess

All take the pack's handle, a tensor, because that is no constant of a graph; only numbers of tokens are symbols in it.
Keys that a strategy received, and tensors in exchanged form, have sizes that only the pack knows. A graph with such
outputs would be broken around every call, so there they hang on a handle of their own (`longweave.tensors.Handles`):
autograd keeps it until backward is done, and frees it, and them, with the rest of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longweave.pack import core_of
from longweave.softmax.calls import Call, backward, forward, needs_inputs
from longweave.tensors import Handles, accumulation_dtype

CallArguments = tuple[str, int | None, str, float | None, float | None, str, str]  # the fields of a Call
Four = tuple[Tensor, Tensor, Tensor, Tensor]

_CALL = "str mask, int? window, str strategy, float? scale, float? softcap, str backend, str options"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor handle, {_CALL}, bool return_lse)"
_BACKWARD = f"Tensor? sinks, Tensor handle, int[] sizes, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)"


def call_operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: Tensor, call: CallArguments, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (T, H), which is empty if it was not asked for."""
    operators = torch.ops.longweave
    operator = operators.attention_in_graph if torch.compiler.is_compiling() else operators.attention
    out, lse, *_ = operator(q, k, v, sinks, handle, *call, return_lse)
    return out, lse


# -- as PyTorch runs it ----------------------------------------------------------------------------------


@torch.library.custom_op(
    "longweave::attention", mutates_args=(), schema=f"{_FORWARD} -> (Tensor, Tensor, Tensor, Tensor)"
)
def _attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: Tensor, *arguments: Any) -> Four:
    """out, lse, and for backward: flat tensors in the dtype of q and in that of lse."""
    return _run(q, k, v, sinks, handle, *arguments)


def _run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: Tensor, *arguments: Any) -> Four:
    *call, return_lse = arguments
    result = forward(core_of(handle), Call(*call), q, k, v, sinks, return_lse)
    assert result.kept is not None
    lse = result.kept_lse.new_empty(0) if result.lse is None else result.lse
    return result.out, lse, result.kept, result.kept_lse


@torch.library.custom_op(
    "longweave::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor[] inputs, Tensor kept, Tensor lse, {_BACKWARD}",
)
def _attention_backward(
    grad_out: Tensor, inputs: list[Tensor], kept: Tensor, lse: Tensor, sinks: Tensor | None, handle: Tensor,
    sizes: list[int], *call: Any,
) -> Four:  # fmt: skip
    return backward(core_of(handle), Call(*call), sizes, grad_out, inputs, kept, lse, sinks)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Four) -> None:
    q, k, v, sinks, handle, *call, _ = inputs
    out, _, kept, kept_lse = output
    ctx.set_materialize_grads(False)  # zeros for outputs that nobody differentiates
    ctx.shape = out.shape
    ctx.sizes, ctx.call, ctx.has_sinks = [q.shape[1], k.shape[1], q.shape[2]], call, sinks is not None
    ctx.core = core_of(handle)  # what backward needs of the pack, also where a hook copies the handle
    needed = needs_inputs(ctx.core, Call(*call), q, k, v)
    ctx.save_for_backward(
        handle, kept, kept_lse, *([sinks] if ctx.has_sinks else []), *([q, k, v, out] if needed else [])
    )


def _differentiate(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    handle, kept, lse, *rest = ctx.saved_tensors
    if grad_out is None:  # other ranks may have one, and wait for this rank's part
        grad_out = kept.new_zeros(ctx.shape)
    sinks = rest.pop(0) if ctx.has_sinks else None
    grads = torch.ops.longweave.attention_backward(grad_out, rest, kept, lse, sinks, handle, ctx.sizes, *ctx.call)
    return _gradients(ctx, grads)


def _gradients(ctx: Any, grads: Four) -> tuple[Any, ...]:
    dq, dk, dv, dsinks = grads
    return dq, dk, dv, (dsinks if ctx.has_sinks else None), *[None] * (2 + len(ctx.call))


_attention.register_autograd(_differentiate, setup_context=_setup)


# -- as a graph has it -----------------------------------------------------------------------------------


@dataclass
class Kept:
    """What a call in a graph keeps for backward, besides its inputs and its output."""

    kept: Tensor
    lse: Tensor


_kept: Handles[Kept] = Handles()


@torch.library.custom_op(
    "longweave::attention_in_graph", mutates_args=(), schema=f"{_FORWARD} -> (Tensor, Tensor, Tensor)"
)
def _attention_in_graph(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the handle of what backward needs."""
    out, lse, kept, kept_lse = _run(q, k, v, sinks, handle, *arguments)
    return out, lse, _kept.issue(Kept(kept, kept_lse))


@torch.library.custom_op(
    "longweave::attention_in_graph_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor kept_handle, {_BACKWARD}",
)
def _attention_in_graph_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept_handle: Tensor, sinks: Tensor | None,
    handle: Tensor, sizes: list[int], *call: Any,
) -> Four:  # fmt: skip
    held = _kept.find(kept_handle)
    return backward(core_of(handle), Call(*call), sizes, grad_out, [q, k, v, out], held.kept, held.lse, sinks)


@_attention_in_graph.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, _ = q.shape
    lse = q.new_empty((tokens, heads) if arguments[-1] else (0,), dtype=accumulation_dtype(q.dtype))
    return q.new_empty(tokens, heads, v.shape[-1]), lse, torch.empty_like(handle)


@_attention_in_graph_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept_handle: Tensor, sinks: Tensor | None,
    *rest: Any,
) -> Four:  # fmt: skip
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _setup_in_graph(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sinks, handle, *call, _ = inputs
    out, _, kept_handle = output
    ctx.sizes, ctx.call, ctx.has_sinks = [q.shape[1], k.shape[1], q.shape[2]], call, sinks is not None
    # Which strategy runs is not known while the graph is traced: the inputs are kept in any case.
    ctx.save_for_backward(q, k, v, out, kept_handle, handle, *([sinks] if ctx.has_sinks else []))


def _differentiate_in_graph(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    q, k, v, out, kept_handle, handle, *sinks = ctx.saved_tensors
    grads = torch.ops.longweave.attention_in_graph_backward(
        grad_out, q, k, v, out, kept_handle, sinks[0] if sinks else None, handle, ctx.sizes, *ctx.call
    )
    return _gradients(ctx, grads)


_attention_in_graph.register_autograd(_differentiate_in_graph, setup_context=_setup_in_graph)
