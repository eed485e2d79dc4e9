"""`lw.attention`: checks, then one of two registered operators, which find their pack, its plan and its strategy.

    lw.attention(q, k, v, pack) ──▶ longweave::attention(q, k, v, pack.handle, …) ──▶ plan ──▶ strategy ──▶ kernel

The operators take the pack's handle, a tensor, because that is what `torch.compile` can put into a graph without making
it a constant of the graph. Nothing in the graph depends on the pack but sizes: what backward needs besides the inputs
is flat and of a size that only the pack knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from longweave.core import PackCore
from longweave.errors import InputError
from longweave.kernels.attention import Kernel, choose
from longweave.pack import Pack, core_of
from longweave.plan.cost import Shape
from longweave.plan.mask import Mask
from longweave.plan.schedule import Plan
from longweave.softmax.allgather import AllGatherStrategy
from longweave.softmax.groupcast import GroupCastStrategy
from longweave.softmax.ring import RingStrategy
from longweave.softmax.strategy import Strategy
from longweave.tensors import accumulation_dtype, eager

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "groupcast": GroupCastStrategy,
    "ring": RingStrategy,
    "ulysses": RingStrategy,
    "allgather": AllGatherStrategy,
}


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, pack: Pack, *, mask: str | Mask | None = None, window: int | None = None,
    strategy: str = "auto", scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    return_lse: Literal[False] = False, backend: str = "auto", **strategy_options: int,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, pack: Pack, *, mask: str | Mask | None = None, window: int | None = None,
    strategy: str = "auto", scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    return_lse: Literal[True], backend: str = "auto", **strategy_options: int,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pack: Pack,
    *,
    mask: str | Mask | None = None,
    window: int | None = None,
    strategy: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **strategy_options: int,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over the whole packed sequence, from and to this rank's tokens.

    q: (tokens, H, D); k: (tokens, Hk, D); v: (tokens, Hk, Dv), all with the tokens of this rank in the order of
        `pack.layout`. H must be a multiple of Hk. Dv may differ from D (MLA).
    mask, window: who sees whom, where it is not as the pack says: "causal", "full" or a Mask; and how many tokens a
        token sees back, itself included.
    strategy: "groupcast", "ring", "allgather", "ulysses", or "auto": the pack's, else the fastest by the cost model.
    scale: multiplies the logits; D^-1/2 by default.
    softcap: logits become softcap · tanh(logits / softcap).
    sinks: (H,) learned logits, one more key per head with the value 0.
    backend: a kernel by name, or "auto"; what ran is logged at debug level by `longweave.kernels`.
    strategy_options: `stages`, `keep_kv` (groupcast); `ulysses_size` (ring, ulysses); `heads_k_stride`,
        `bwd_head_first_stride`, `bwd_head_last_stride` (allgather). A named strategy refuses options of another; with
        "auto" they hold if the strategy that is taken has them.

    Returns out (tokens, H, Dv) in the dtype of q, and with `return_lse` also the log-sum-exp of the logits (tokens, H)
    in float32, which carries no gradient. A query that sees nothing gives 0 and −∞. Under autocast, q, k and v are
    cast as they would be for `scaled_dot_product_attention`.

    Raises, before anything is sent, `InputError` for shapes, dtypes and options that do not fit, `BackendError` for a
    named kernel that cannot serve; on the first pack of a group on all ranks alike, and `GroupError` where the ranks'
    calls differ.

        pack = lw.Pack(cu_seqlens, group)
        out = lw.attention(q, k, v, pack)
    """
    if not isinstance(pack, Pack):
        raise InputError(f"pack is a {type(pack).__name__}; make one per batch: lw.Pack(cu_seqlens, group)")
    misfit = _misfit(q, k, v, window, strategy, scale, softcap, sinks, backend)
    if misfit is None and strategy_options.pop("dropout_p", 0):
        misfit = "dropout_p is not 0; attention across ranks has no dropout: leave it out"
    if misfit is not None:
        _refuse(pack.core, misfit)
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out, lse, _, _ = torch.ops.longweave.attention(
        q, k, v, sinks, pack.handle, _mask_name(pack, mask), window, strategy, scale, softcap, backend,
        _written(strategy_options), return_lse,
    )  # fmt: skip
    return (out, lse.detach()) if return_lse else out


# -- the operators -------------------------------------------------------------------------------------

_CALL = "str mask, int? window, str strategy, float? scale, float? softcap, str backend, str options"


@torch.library.custom_op(
    "longweave::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor handle, {_CALL}, bool return_lse)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: Tensor, mask: str, window: int | None,
    strategy: str, scale: float | None, softcap: float | None, backend: str, options: str, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out (T, H, Dv), lse (T, H) or empty, and for backward: flat tensors in the dtype of q and in that of lse."""
    core = core_of(handle)
    way = (mask, window, strategy, options)
    how = (scale, softcap, backend, return_lse)
    core.enter(_kind(q, k, v, sinks, way, how), lambda: _check(core, q, k, v, sinks, way, how))
    core.check_tokens(q, k, v)
    runner = _runner(core, way, _shape(q, k, v))
    core.plans[runner.plan] = core.plans.get(runner.plan, 0) + 1
    kernel = _kernel(core, q, k, v, scale, softcap, backend)
    q_heads, k_heads, v_heads = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):  # dtypes were decided before
        result = runner.strategy.forward(kernel, q_heads, k_heads, v_heads, sinks, return_lse)
    out = result.out.transpose(0, 1).to(q.dtype).contiguous()
    empty = result.kept_lse.new_empty(0)
    lse = empty if result.lse is None or not return_lse else result.lse.t().clone(memory_format=torch.contiguous_format)
    return out, lse, q.new_empty(0) if result.kept is None else result.kept, result.kept_lse.reshape(-1)


@torch.library.custom_op(
    "longweave::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor[] inputs, Tensor kept, Tensor lse, Tensor? sinks, Tensor handle, int[] sizes,"
    f" {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    grad_out: Tensor, inputs: list[Tensor], kept: Tensor, lse: Tensor, sinks: Tensor | None, handle: Tensor,
    sizes: list[int], mask: str, window: int | None, strategy: str, scale: float | None, softcap: float | None,
    backend: str, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv (T, heads, dim) and dsinks (H,), empty without sinks. sizes: H, Hk, D."""
    core = core_of(handle)
    heads, kv_heads, dim = sizes
    shape = Shape(heads, kv_heads, dim, grad_out.shape[-1], kept.element_size())
    runner = _runner(core, (mask, window, strategy, options), shape)
    if not runner.strategy.needs_inputs:
        inputs = []
    tokens, _, v_dim = grad_out.shape
    # Only dtype, device and dims decide which kernel serves.
    q, k, v = (kept.new_empty((0, n, d)) for n, d in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim)))
    kernel = _kernel(core, q, k, v, scale, softcap, backend)
    with torch.autocast(grad_out.device.type, enabled=False):
        heads_first = [x.transpose(0, 1).contiguous() for x in inputs]
        grads = runner.strategy.backward(kernel, grad_out.transpose(0, 1).contiguous(), heads_first, kept, lse, sinks)
    # Always copies: dk and dv may be views of one buffer, which an operator must not return.
    dq, dk, dv = (
        kept.new_empty((tokens, *one.shape[1:])).copy_(grad.transpose(0, 1))
        for grad, one in zip(grads[:3], (q, k, v), strict=True)
    )
    dsinks = kept.new_empty(0) if sinks is None or grads[3] is None else grads[3].to(sinks.dtype)
    return dq, dk, dv, dsinks


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: Tensor, mask: str, window: int | None,
    strategy: str, scale: float | None, softcap: float | None, backend: str, options: str, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, heads, _ = q.shape
    wide = accumulation_dtype(q.dtype)
    kept, kept_lse = (torch.library.get_ctx().new_dynamic_size() for _ in range(2))
    return (
        q.new_empty(tokens, heads, v.shape[-1]),
        q.new_empty((tokens, heads) if return_lse else (0,), dtype=wide),
        q.new_empty(kept),
        q.new_empty(kept_lse, dtype=wide),
    )


@_attention_backward.register_fake
def _(
    grad_out: Tensor, inputs: list[Tensor], kept: Tensor, lse: Tensor, sinks: Tensor | None, handle: Tensor,
    sizes: list[int], *call: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    heads, kv_heads, dim = sizes
    tokens, _, v_dim = grad_out.shape
    return (
        kept.new_empty((tokens, heads, dim)),
        kept.new_empty((tokens, kv_heads, dim)),
        kept.new_empty((tokens, kv_heads, v_dim)),
        kept.new_empty(0) if sinks is None else torch.empty_like(sinks),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, v, sinks, handle, mask, window, strategy, scale, softcap, backend, options, _ = inputs
    out, _, kept, kept_lse = output
    ctx.sizes = [q.shape[1], k.shape[1], q.shape[2]]
    ctx.call = (mask, window, strategy, scale, softcap, backend, options)
    # While a graph is traced the handle has no value and the strategy is not known: keep the inputs in any case.
    needed = True
    if type(handle) is Tensor:
        runner = _runner(core_of(handle), (mask, window, strategy, options), _shape(q, k, v))
        needed = runner.strategy.needs_inputs
    ctx.has_sinks = sinks is not None
    # The handle keeps what backward needs of the pack.
    given = [*([sinks] if ctx.has_sinks else []), *([q, k, v, out] if needed else [])]
    ctx.save_for_backward(handle, kept, kept_lse, *given)


def _differentiate(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
    handle, kept, lse, *rest = ctx.saved_tensors
    sinks = rest.pop(0) if ctx.has_sinks else None
    dq, dk, dv, dsinks = torch.ops.longweave.attention_backward(
        grad_out, rest, kept, lse, sinks, handle, ctx.sizes, *ctx.call
    )
    return dq, dk, dv, (dsinks if ctx.has_sinks else None), *[None] * 9


_attention.register_autograd(_differentiate, setup_context=_setup_context)


# -- from a call to what runs it -------------------------------------------------------------------------

Way = tuple[str, int | None, str, str]  # mask, window, strategy, options
How = tuple[float | None, float | None, str, bool]  # scale, softcap, backend, return_lse


class _Runner:
    """The plan of a kind of call on a pack, and its strategy. The pack keeps it."""

    def __init__(self, core: PackCore, way: Way, shape: Shape) -> None:
        mask, window, strategy, options = way
        self.plan = core.plan(_mask_named(core, mask), window, strategy, shape, _read(options))
        # Calls that come to the same plan, such as a window that cuts nothing, share one.
        self.strategy = core.once(_strategy, self.plan, shape)


def _strategy(core: PackCore, plan: Plan, shape: Shape) -> Strategy:
    return STRATEGIES[plan.strategy](plan, core.shards)


def _runner(core: PackCore, way: Way, shape: Shape) -> _Runner:
    return core.once(_Runner, way, shape)


def _shape(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    return Shape(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.element_size())


def _kernel(
    core: PackCore, q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float | None, backend: str
) -> Kernel:
    scale = float(q.shape[-1]) ** -0.5 if scale is None else scale
    return choose(q, k, v, scale, softcap, core.backend if backend == "auto" else backend)


# A Mask cannot be an argument of an operator: the pack remembers it, and its fingerprint goes in its place.


def _mask_name(pack: Pack, mask: str | Mask | None) -> str:
    if mask is None:
        return ""
    return _remember(pack.core, mask) if isinstance(mask, Mask) else mask


@eager
def _remember(core: PackCore, mask: Mask) -> str:
    core.masks[mask.fingerprint] = mask
    return mask.fingerprint


def _mask_named(core: PackCore, name: str) -> str | Mask | None:
    return core.masks.get(name, name) if name else None


# Options are one string in the operators: "stages=2,keep_kv=1".


def _written(options: dict[str, int]) -> str:
    items = [(name, int(value) if isinstance(value, bool) else value) for name, value in options.items()]
    return ",".join([f"{name}={value}" for name, value in items if value is not None])


def _read(options: str) -> dict[str, int]:
    found = {}
    for item in options.split(",") if options else ():
        name, _, value = item.partition("=")
        try:
            found[name] = int(value)
        except ValueError as error:
            raise InputError(f"{name} is {value!r}; options are ints") from error
    return found


# -- checks --------------------------------------------------------------------------------------------

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _kind(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, way: Way, how: How) -> tuple[object, ...]:
    """What must be alike on all ranks."""
    tensors = (*(part for x in (q, k, v) for part in (x.dtype, tuple(x.shape[1:]))), sinks is not None)
    return ("attention of q, k, v, sinks", *tensors, "mask, window, strategy, options", *way, "scale, softcap", *how)


def _misfit(
    q: object, k: object, v: object, window: object, strategy: object, scale: object, softcap: object, sinks: object,
    backend: object,
) -> str | None:  # fmt: skip
    """What is wrong with arguments that the operator could not even be called with."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return "q, k and v must be tensors of shape (tokens, heads, dim)"
    if sinks is not None and not isinstance(sinks, Tensor):
        return f"sinks is a {type(sinks).__name__}; give a tensor with one logit per query head"
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        return f"window is {window!r}; give the number of tokens seen, itself included, at least 1, or None"
    for name, text in (("backend", backend), ("strategy", strategy)):
        if not isinstance(text, str):
            return f"{name} is {text!r}; give a name, or 'auto'"
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not isinstance(value, int | float):
            return f"{name} is {value!r}; give a number or None"
    return None


@eager
def _refuse(core: PackCore, misfit: str) -> None:
    """Raise, and on the first pack of a group let the other ranks know."""

    def check() -> None:
        raise InputError(misfit)

    core.enter(("attention",), check)


def _check(core: PackCore, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, way: Way, how: How) -> None:
    tokens, rank = core.tokens, core.comm.rank
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise InputError(f"{shapes}: each must be (tokens, heads, dim); pack a batch by giving every row as a document")
    if not q.shape[0] == k.shape[0] == v.shape[0] == tokens:
        raise InputError(f"{shapes}: rank {rank} has {tokens} tokens in this pack; shard with pack.shard")
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
    scale, softcap, backend, _ = how
    if softcap is not None and not softcap > 0:
        raise InputError(f"softcap is {softcap}; give a positive number or None")
    _runner(core, way, _shape(q, k, v))
    _kernel(core, q, k, v, scale, softcap, backend)
