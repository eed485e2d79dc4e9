"""`lw.attention`: the door. Checks, then one of two registered operators; everything else is below them.

The operators take strings for the plan and the group, because that is what `torch.compile` can put into a graph.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longweave.comm.agree import agree
from longweave.comm.groups import Group, name_of, named
from longweave.errors import GroupError, InputError
from longweave.kernels.attention import choose
from longweave.kernels.dtypes import accumulation_dtype
from longweave.plan.schedule import Plan, recall
from longweave.softmax.strategies import Call, Strategy, strategy_of


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    group: Group = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **strategy_options: int,
) -> Any:
    """Softmax attention over the whole packed sequence, from and to this rank's tokens.

    q: (tokens, H, D); k: (tokens, Hk, D); v: (tokens, Hk, Dv), all with the tokens of this rank in the order of
        `plan.layout`. H must be a multiple of Hk. Dv may differ from D (MLA).
    scale: multiplies the logits; D^-1/2 by default.
    softcap: logits become softcap · tanh(logits / softcap).
    sinks: (H,) learned logits, one more key per head with the value 0.
    backend: a kernel by name, or "auto"; what ran is logged at debug level by `longweave.kernels`.
    strategy_options: `stages`, `keep_kv` (groupcast); `ulysses_size` (ring, ulysses); `heads_k_stride`,
        `bwd_head_first_stride`, `bwd_head_last_stride` (allgather).

    Returns out (tokens, H, Dv) in the dtype of q, and with `return_lse` also the log-sum-exp of the logits (tokens, H)
    in float32, which carries no gradient. A query that sees nothing gives 0 and −∞. Under autocast, q, k and v are
    cast as they would be for `scaled_dot_product_attention`.

    Raises, before anything is sent, `InputError` for shapes, dtypes and options that do not fit, `GroupError` for a
    group of another size than the plan or ranks with different plans, `BackendError` for a named kernel that cannot
    serve.

        plan = lw.make_plan(lw.Mask.causal(cu), lw.Layout.zigzag(cu, world_size), "ring")
        out = lw.attention(q, k, v, plan, group)
    """
    if not isinstance(plan, Plan):
        raise InputError(f"plan is a {type(plan).__name__}; make one with lw.make_plan(mask, layout)")
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise InputError("q, k and v must be tensors of shape (tokens, heads, dim)")
    if sinks is not None and not isinstance(sinks, Tensor):
        raise InputError(f"sinks is a {type(sinks).__name__}; give a tensor with one logit per query head")
    if not isinstance(backend, str):
        raise InputError(f"backend is {backend!r}; give the name of a kernel, or 'auto'")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not isinstance(value, int | float):
            raise InputError(f"{name} is {value!r}; give a number or None")
    dropout = strategy_options.pop("dropout_p", 0)
    if dropout:
        raise InputError(f"dropout_p is {dropout}; attention across ranks has no dropout: leave it out")
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if return_lse:
        strategy_options["return_lse"] = 1
    options = ",".join(
        [
            f"{name}={int(value) if isinstance(value, bool) else value}"
            for name, value in strategy_options.items()
            if value is not None
        ]
    )
    out, lse, _ = torch.ops.longweave.attention(
        q, k, v, sinks, plan.key, name_of(group), scale, softcap, backend, options
    )
    return (out, lse.detach()) if return_lse else out


# -- the operators -------------------------------------------------------------------------------------

_CALL = "str key, str group, float? scale, float? softcap, str backend, str options"


@torch.library.custom_op(
    "longweave::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_CALL}) -> (Tensor, Tensor, Tensor[])",
)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key: str,
    group: str,
    scale: float | None,
    softcap: float | None,
    backend: str,
    options: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out (T, H, Dv), lse (T, H), and what backward needs besides the inputs and these two."""
    how = f"scale {scale}, softcap {softcap}, backend {backend}, sinks {sinks is not None}, options {options!r}"
    strategy = _open(q, k, v, sinks, key, group, options, softcap, how)
    kernel = choose(q, k, v, _scale(scale, q), softcap, backend)
    q_heads, k_heads, v_heads = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):  # dtypes were decided at the door
        out, lse, saved = strategy.forward(kernel, q_heads, k_heads, v_heads, sinks)
    return out.transpose(0, 1).to(q.dtype).contiguous(), lse.t().contiguous(), saved


@torch.library.custom_op(
    "longweave::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor[] saved, Tensor? sinks, int[] sizes, {_CALL})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    grad_out: Tensor,
    saved: list[Tensor],
    sinks: Tensor | None,
    sizes: list[int],
    key: str,
    group: str,
    scale: float | None,
    softcap: float | None,
    backend: str,
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv (T, heads, dim) and dsinks (H,), empty without sinks. sizes: H, Hk, saved token-first."""
    heads, kv_heads, at_the_door = sizes
    strategy = strategy_of(Call(recall(key), named(group), heads, kv_heads, _parse(options)))
    saved = [*(x.transpose(0, 1).contiguous() for x in saved[:at_the_door]), *saved[at_the_door:]]
    q, k, v = saved[:3]
    kernel = choose(q, k, v, _scale(scale, q), softcap, backend)
    with torch.autocast(q.device.type, enabled=False):
        grads = strategy.backward(kernel, grad_out.transpose(0, 1).contiguous(), saved, sinks)
    # Always copies: dk and dv may be views of one buffer, which an operator must not return.
    dq, dk, dv = (
        torch.empty(grad.transpose(0, 1).shape, dtype=q.dtype, device=q.device).copy_(grad.transpose(0, 1))
        for grad in grads[:3]
    )
    dsinks = q.new_empty(0) if sinks is None or grads[3] is None else grads[3].to(sinks.dtype)
    return dq, dk, dv, dsinks


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key: str,
    group: str,
    scale: float | None,
    softcap: float | None,
    backend: str,
    options: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    strategy = strategy_of(Call(recall(key), named(group), q.shape[1], k.shape[1], _parse(options)))
    tokens, heads, _ = q.shape
    has_lse = strategy.keeps_inputs or "return_lse" in options
    lse = q.new_empty((tokens, heads) if has_lse else (0,), dtype=accumulation_dtype(q.dtype))
    return q.new_empty(tokens, heads, v.shape[-1]), lse, strategy.extra(q, k, v)


@_attention_backward.register_fake
def _(
    grad_out: Tensor,
    saved: list[Tensor],
    sinks: Tensor | None,
    sizes: list[int],
    *call: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, kv_heads, _ = sizes
    tokens, dtype = grad_out.shape[0], saved[0].dtype
    k_dim, v_dim = saved[1].shape[-1], saved[2].shape[-1]
    dsinks = saved[0].new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (
        grad_out.new_empty((tokens, heads, k_dim), dtype=dtype),
        grad_out.new_empty((tokens, kv_heads, k_dim), dtype=dtype),
        grad_out.new_empty((tokens, kv_heads, v_dim), dtype=dtype),
        dsinks,
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    q, k, v, sinks, key, group, *call = inputs
    out, lse, extra = output
    ctx.plan = recall(key)
    strategy = strategy_of(Call(ctx.plan, named(group), q.shape[1], k.shape[1], _parse(call[-1])))
    at_the_door = [q, k, v, out, lse] if strategy.keeps_inputs else []
    ctx.sizes, ctx.call = [q.shape[1], k.shape[1], len(at_the_door)], (key, group, *call)
    ctx.has_sinks = sinks is not None
    ctx.save_for_backward(*at_the_door, *extra, *([sinks] if sinks is not None else []))


def _differentiate(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    kept = list(ctx.saved_tensors)
    sinks = kept.pop() if ctx.has_sinks else None
    dq, dk, dv, dsinks = torch.ops.longweave.attention_backward(grad_out, kept, sinks, ctx.sizes, *ctx.call)
    return dq, dk, dv, (dsinks if ctx.has_sinks else None), None, None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_setup_context)


# -- the door ------------------------------------------------------------------------------------------


def _open(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key: str,
    group: str,
    options: str,
    softcap: float | None,
    how: str,
) -> Strategy:
    """Check this rank's input; on the first use of a plan on a group, with all ranks at once."""
    plan, comm = recall(key), named(group)
    if comm.size != plan.world_size:
        raise GroupError(
            f"the group has {comm.size} ranks but the plan is for {plan.world_size}; "
            "make the layout with world_size = the size of the group"
        )
    strategy: Strategy | None = None
    problem: InputError | None = None
    try:
        _check(q, k, v, sinks, plan.layout.counts[comm.rank], comm.rank, softcap)
        strategy = strategy_of(Call(plan, comm, q.shape[1], k.shape[1], _parse(options)))
    except InputError as error:
        problem = error
    shapes = [tuple(x.shape[1:]) for x in (q, k, v)]
    agree(comm, [plan], f"attention of {q.dtype} {shapes}, {how}", problem)
    assert strategy is not None
    return strategy


def _check(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tokens: int, rank: int, softcap: float | None
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise InputError(f"{shapes}: each must be (tokens, heads, dim); pack a batch by giving every row as a document")
    if not q.shape[0] == k.shape[0] == v.shape[0] == tokens:
        raise InputError(f"{shapes}: rank {rank} has {tokens} tokens in this plan; shard with the plan's layout")
    if k.shape[1] != v.shape[1] or k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(f"{shapes}: k and v need the same number of heads, and q a multiple of it")
    if q.shape[2] != k.shape[2] or q.shape[2] == 0 or v.shape[2] == 0:
        raise InputError(f"{shapes}: q and k need the same head dim")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise InputError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give one floating dtype of {listed}")
    if not q.device == k.device == v.device:
        raise InputError(f"q, k, v are on {q.device}, {k.device}, {v.device}; put them on one device")
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise InputError(f"sinks has shape {tuple(sinks.shape)}; give one logit per query head, ({q.shape[1]},)")
    if sinks is not None and sinks.device != q.device:
        raise InputError(f"sinks is on {sinks.device} and q on {q.device}; put them on one device")
    if softcap is not None and not softcap > 0:
        raise InputError(f"softcap is {softcap}; give a positive number or None")


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _scale(scale: float | None, q: Tensor) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


@lru_cache(maxsize=256)
def _parse_items(options: str) -> tuple[tuple[str, int], ...]:
    items = []
    for item in options.split(",") if options else ():
        name, _, value = item.partition("=")
        try:
            items.append((name, int(value)))
        except ValueError as error:
            raise InputError(f"{name} is {value!r}; options are ints") from error
    return tuple(items)


def _parse(options: str) -> dict[str, int]:
    return dict(_parse_items(options))
