"""`lw.attention`: arguments are looked at, then an operator finds the pack, its plan and its strategy.

lw.attention(q, k, v, pack) ──▶ operator (`operators.py`) ──▶ call on a core (`calls.py`) ──▶ strategy ──▶ kernel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, overload

import torch
from torch import Tensor

from longweave.core import PackCore
from longweave.errors import InputError, shown
from longweave.pack import Pack, checked_core
from longweave.plan.mask import Mask
from longweave.plan.schedule import OPTIONS
from longweave.softmax.operators import call_operator
from longweave.tensors import eager, why_unusual


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
    core = checked_core(pack)
    misfit = _misfit(q, k, v, mask, window, strategy, scale, softcap, sinks, backend)
    if misfit is None and not isinstance(return_lse, bool):
        misfit = f"return_lse is {shown(return_lse)}; give True or False"
    dropout = strategy_options.pop("dropout_p", 0)
    if misfit is None and not (dropout is None or (isinstance(dropout, int | float) and dropout == 0)):
        misfit = f"dropout_p is {shown(dropout)}; attention across ranks has no dropout: leave it out"
    if misfit is None:
        misfit = _misfit_option(strategy_options)
    if misfit is not None:
        _refuse(core, misfit)
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    window = None if window is None else min(window, 1 << 40)  # operators take 64 bits
    call = (_mask_name(pack, mask), window, strategy, scale, softcap, backend, _written(strategy_options))
    out, lse = call_operator(q, k, v, sinks, pack.handle, call, return_lse)
    return (out, lse.detach()) if return_lse else out


def _misfit(
    q: object, k: object, v: object, mask: object, window: object, strategy: object, scale: object, softcap: object,
    sinks: object, backend: object,
) -> str | None:  # fmt: skip
    """What is wrong with arguments that the operator could not even be called with."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        given = ", ".join([type(x).__name__ for x in (q, k, v)])
        return f"q, k and v must be tensors of shape (tokens, heads, dim); got {given}"
    if sinks is not None and not isinstance(sinks, Tensor):
        return f"sinks is a {type(sinks).__name__}; give a tensor with one logit per query head"
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        unusual = None if x is None else why_unusual(x)
        if unusual is not None:
            return f"{name} is {unusual}; give a dense tensor that has values"
    if mask is not None and not isinstance(mask, str | Mask):
        return f"mask is a {type(mask).__name__}; give 'causal', 'full' or a Mask, such as lw.Mask.from_slices(…)"
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        return f"window is {shown(window)}; give the number of tokens seen, itself included, at least 1, or None"
    for name, text in (("backend", backend), ("strategy", strategy)):
        if not isinstance(text, str):
            return f"{name} is {shown(text)}; give a name, or 'auto'"
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            return f"{name} is {shown(value)}; give a number or None"
        if isinstance(value, int) and abs(value) > 1 << 1000:  # operators take floats
            return f"{name} is {shown(value)}; give a smaller number"
    return None


def _misfit_option(options: Mapping[str, object]) -> str | None:
    """Of values that would become other ones when they are written into one string."""
    for name, value in options.items():
        if isinstance(value, str | bytes) or (isinstance(value, bool) and name != "keep_kv"):
            return f"{name} is {shown(value)}; options are ints"
    return None


@eager
def _refuse(core: PackCore, misfit: str) -> None:
    """Raise, and on the first pack of a group let the other ranks know."""

    def check() -> None:
        raise InputError(misfit)

    core.enter(("attention",), check)


# Operators take neither masks nor dictionaries. The pack remembers a mask, and its fingerprint goes in its place;
# options are one string, such as "stages=2,keep_kv=1".


def _mask_name(pack: Pack, mask: str | Mask | None) -> str:
    if mask is None:
        return ""
    return _remember(pack.core, mask) if isinstance(mask, Mask) else mask


@eager
def _remember(core: PackCore, mask: Mask) -> str:
    core.masks[mask.fingerprint] = mask
    return mask.fingerprint


_KNOWN = [name for names in OPTIONS.values() for name in names]  # None is "not given" of these


def _written(options: dict[str, int]) -> str:
    items = [(name, int(value) if isinstance(value, bool) else value) for name, value in options.items()]
    return ",".join([f"{name}={value}" for name, value in items if value is not None or name not in _KNOWN])
