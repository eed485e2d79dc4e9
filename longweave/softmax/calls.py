"""One attention call on a pack: which plan and strategy it gets, and its forward and backward on this rank's tokens.

Call (mask, window, strategy, options, …) + head shape ──▶ PlannedCall: plan, strategy      made once, kept by the pack
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from longweave.comm.ledger import RecordedCall
from longweave.core import PackCore
from longweave.errors import InputError
from longweave.kernels.attention import Kernel, choose
from longweave.plan.cost import Shape
from longweave.plan.mask import Mask
from longweave.plan.schedule import Plan, check_options
from longweave.softmax.allgather import AllGatherStrategy
from longweave.softmax.groupcast import GroupCastStrategy
from longweave.softmax.ring import RingStrategy
from longweave.softmax.strategy import Result, Strategy
from longweave.tensors import FLOATS, aligned, kind_of, on_one_device

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "groupcast": GroupCastStrategy,
    "ring": RingStrategy,
    "ulysses": RingStrategy,
    "allgather": AllGatherStrategy,
}


class Call(NamedTuple):
    """Everything about a call that is not a tensor, in the form in which operators take it."""

    mask: str  # "" is the pack's; "causal", "full", or the fingerprint of a mask that the pack remembers
    window: int | None
    strategy: str
    scale: float | None
    softcap: float | None
    backend: str
    options: str  # "stages=2,keep_kv=1"

    @property
    def way(self) -> tuple[str, int | None, str, str]:
        """What the plan depends on."""
        return self.mask, self.window, self.strategy, self.options

    def kernel(self, core: PackCore, q: Tensor, k: Tensor, v: Tensor) -> Kernel:
        """Only dtype, device and dims decide which kernel serves."""
        scale = float(q.shape[-1]) ** -0.5 if self.scale is None else self.scale
        return choose(q, k, v, scale, self.softcap, core.backend if self.backend == "auto" else self.backend)


class PlannedCall:
    """The plan of a kind of call on a pack, and its strategy."""

    def __init__(self, core: PackCore, way: tuple[str, int | None, str, str], shape: Shape) -> None:
        name, window, strategy, options = way
        mask: str | Mask | None = core.masks.get(name, name) if name else None
        self.plan = core.plan(mask, window, strategy, shape, _read(options))
        # Calls that come to the same plan, such as a window that cuts nothing, share one.
        self.strategy = core.once(_strategy, self.plan)
        self.recorded: RecordedCall  # the last call that came to this plan, for its backward


def _strategy(core: PackCore, plan: Plan) -> Strategy:
    return STRATEGIES[plan.strategy](plan, core.shards)


def needs_inputs(core: PackCore, call: Call, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Does backward want q, k, v and out of this rank's tokens?"""
    return core.once(PlannedCall, call.way, _shape(q, k, v)).strategy.needs_inputs


def _shape(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    return Shape(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.element_size())


def forward(
    core: PackCore, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, return_lse: bool
) -> Result:
    """From token-first q, k, v. Of the result, out is (T, H, Dv) in the dtype of q and lse (T, H), if asked for."""
    tensors = (*map(kind_of, (q, k, v)), kind_of(sinks, per_token=False), on_one_device(q, k, v, sinks))
    recorded = core.enter(
        ("attention of q, k, v, sinks", *tensors, "with", *zip(Call._fields, call, strict=True), "lse", return_lse),
        lambda: _check(core, q, k, v, sinks, call),
        (q, k, v),
    )
    with recorded.forward(), torch.autocast(q.device.type, enabled=False):  # dtypes were decided before
        planned = core.once(PlannedCall, call.way, _shape(q, k, v))
        planned.recorded = recorded
        core.plans[planned.plan] = core.plans.get(planned.plan, 0) + 1
        kernel = call.kernel(core, q, k, v)
        result = planned.strategy.forward(kernel, aligned(q), aligned(k), aligned(v), sinks, return_lse)
    lse = None
    if return_lse and result.lse is not None:
        lse = result.lse.t().clone(memory_format=torch.contiguous_format)
    return Result(result.out, lse, result.kept_lse.reshape(-1), q.new_empty(0) if result.kept is None else result.kept)


def backward(
    core: PackCore,
    call: Call,
    sizes: Sequence[int],
    grad_out: Tensor,
    inputs: Sequence[Tensor],
    kept: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv (T, heads, dim) in the dtype of q, and dsinks (H,), empty without sinks.

    sizes: H, Hk, D; inputs: token-first q, k, v, out, if the strategy needs them; kept and lse: as forward kept them.
    """
    heads, kv_heads, dim = sizes
    tokens, _, v_dim = grad_out.shape
    planned = core.once(PlannedCall, call.way, Shape(heads, kv_heads, dim, v_dim, kept.element_size()))
    strategy = planned.strategy
    dims = ((heads, dim), (kv_heads, dim), (kv_heads, v_dim))
    kernel = call.kernel(core, *(kept.new_empty((0, *pair)) for pair in dims))
    with planned.recorded.backward(), torch.autocast(grad_out.device.type, enabled=False):
        needed = [aligned(x) for x in inputs] if strategy.needs_inputs else []
        grads = strategy.backward(kernel, aligned(grad_out), needed, kept, lse, sinks)
    # Always copies: dk and dv may be views of one buffer, which an operator must not return.
    dq, dk, dv = (kept.new_empty((tokens, *pair)).copy_(grad) for grad, pair in zip(grads[:3], dims, strict=True))
    dsinks = kept.new_empty(0) if sinks is None or grads[3] is None else grads[3].to(sinks.dtype)
    return dq, dk, dv, dsinks


def _read(options: str) -> dict[str, int]:
    found = {}
    for item in options.split(",") if options else ():
        name, _, value = item.partition("=")
        try:
            found[name] = int(value)
        except ValueError as error:
            check_options("auto", {name: 1})  # an unknown name is the better thing to say
            raise InputError(f"{name} is {value!r}; options are ints") from error
    return found


def _check(core: PackCore, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> None:
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
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise InputError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give one floating dtype of {listed}")
    if not q.device == k.device == v.device:
        raise InputError(f"q, k, v are on {q.device}, {k.device}, {v.device}; put them on one device")
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise InputError(f"sinks has shape {tuple(sinks.shape)}; give one logit per query head, ({q.shape[1]},)")
    if sinks is not None and not sinks.is_floating_point():
        raise InputError(f"sinks is {sinks.dtype}; give floating logits")
    if sinks is not None and sinks.device != q.device:
        raise InputError(f"sinks is on {sinks.device} and q on {q.device}; put them on one device")
    if call.softcap is not None and not 0 < call.softcap < inf:
        raise InputError(f"softcap is {call.softcap}; give a positive number or None")
    if call.scale is not None and not isfinite(call.scale):
        raise InputError(f"scale is {call.scale}; give a finite number or None")
    core.once(PlannedCall, call.way, _shape(q, k, v))
    call.kernel(core, q, k, v)
