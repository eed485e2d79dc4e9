"""Flash attention on CUDA with `cu_seqlens`: PyTorch's own operator, or the flash-attn package.

    tasks ──▶ waves (waves.py) ──▶ for each: one call on q, k, v as they lie in memory, and one merge

Both are FlashAttention-2; `torch.nn.attention.activate_flash_attention_impl` puts version 3 or 4 under the operator of
PyTorch. No GPU has run this yet. The operator itself has run, with CPU kernels that follow the rules of each version.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from longweave.kernels.attention.partial import Partial, QuerySide, Tasks
from longweave.kernels.attention.waves import Wave, compile_waves
from longweave.tensors import aligned

# -- who serves ----------------------------------------------------------------------------------------


def order() -> tuple[str, str]:
    """In which order `auto` tries the two.

    flash-attn is there because someone wanted it, and has softcap. But whoever has activated another version under
    PyTorch's operator wants that one: on its hardware it is up to twice as fast.
    """
    return ("flash_attn", "aten_flash") if _activated() is None else ("aten_flash", "flash_attn")


def why_not_aten(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    if softcap is not None:
        return "it has no softcap"
    return _why_not(q, v) or _why_not_activated(q, v)


def why_not_flash_attn(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    # In this order: the package is imported only where it can serve.
    return _why_not(q, v) or _flash_attn()[1]


def _why_not(q: Tensor, v: Tensor) -> str | None:
    if (capability := _capability(q)) is None:
        return f"tensors are on {q.device.type}"
    if capability < (8, 0):
        return "it needs compute capability 8.0"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {q.dtype}"
    if q.shape[-1] > 256 or v.shape[-1] > 256:
        return f"head dims {q.shape[-1]} and {v.shape[-1]} exceed 256"
    return None


def _capability(q: Tensor) -> tuple[int, int] | None:
    """Of the device, if it is one for these kernels."""
    return torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None


def _why_not_activated(q: Tensor, v: Tensor) -> str | None:
    """What version 3 or 4 under PyTorch's operator cannot do.

    All of them take strided tensors, windows and segments without queries or keys, and give lse as (heads, tokens).
    """
    name, dim = _activated(), _even(max(q.shape[-1], v.shape[-1]))
    major = (_capability(q) or (0, 0))[0]
    if name is None:
        return None
    remedy = "torch.nn.attention.restore_flash_attention_impl() brings back PyTorch's own"
    if name == "FA3":
        if major != 9:
            return f"the activated FA3 needs compute capability 9, not {major}; {remedy}"
        if dim > 192 and torch.are_deterministic_algorithms_enabled():
            return f"the activated FA3 has no deterministic backward for head dim {dim}; {remedy}"
    elif name == "FA4":
        if major not in (9, 10):
            return f"the activated FA4 needs compute capability 9 or 10, not {major}; {remedy}"
        if major == 10 and dim > 128 and dim != 256:
            return f"the activated FA4 takes head dims up to 128, and 256, but not {dim}; {remedy}"
    else:
        return f"what the activated {name} does with windows and empty segments is not known; {remedy}"
    return None


def _activated() -> str | None:
    """The name of what was put under PyTorch's operator; None is its own FlashAttention-2."""
    current: Callable[[], str | None] | None = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()  # torch < 2.11 has nothing to activate


@lru_cache(maxsize=1)  # a constant of the process
def _flash_attn() -> tuple[Any, str | None]:
    """The module of flash-attn with the functions that are called here, or why there is none."""
    try:
        spec = find_spec("flash_attn")
        if spec is None:
            return None, "flash-attn is not installed"
        if spec.origin is None:  # a folder without __init__.py: what flash-attn-4 alone leaves there
            return None, "flash-attn is not installed (flash-attn-4 is: activate_flash_attention_impl('FA4') serves it)"
        module = import_module("flash_attn.flash_attn_interface")
    except Exception as error:  # whatever a broken installation raises
        return None, f"flash-attn cannot be imported: {type(error).__name__}: {error}"
    for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
        if not hasattr(module, name):
            return None, f"flash-attn has no {name}; version 2.7 or later is needed"
    return module, None


def suits(tasks: Tasks) -> bool:
    """Do these kernels beat one that walks the list of tasks? They need large causal or full calls, and few of them.

    They hand back a partial per wave, and merging it moves 10·D bytes for each query and head (out read in 16 bits, and
    read and written in 32), where the other keeps it in registers; backward likewise. What they win depends on the
    version: FlashAttention-2 is taken where one call does all, a newer one that was activated also for several. No
    rates were measured: at 600 against 400 TFLOP/s and 3.3 TB/s, 4·D operations for each pair and head make up for a
    merge at 900 pairs a query. For windows no gain is known.
    """
    waves = tasks.compiled(compile_waves)
    most = 1 if _activated() is None else 4
    if len(waves) > most or any(wave.window not in ((-1, -1), (-1, 0)) for wave in waves):
        return False
    enough = 1024 if len(waves) == 1 else 4096  # the sums of backward, too, are made for each of several
    return sum(wave.area for wave in waves) >= enough * sum(wave.q[1] - wave.q[0] for wave in waves)


# -- forward and backward ------------------------------------------------------------------------------


def forward(
    into: Partial,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tasks: Tasks,
    scale: float,
    softcap: float | None,
    backend: str,
    fresh: bool = False,
) -> None:
    v_dim = v.shape[-1]
    q, k, v = _fitted(q, k, v)
    for wave in tasks.compiled(compile_waves):
        (a, b), (c, d) = wave.q, wave.k
        out, lse = _call_forward(q[a:b], k[c:d], v[c:d], wave, scale, softcap, backend)
        if fresh and wave.first:
            into.write(a, b, out[..., :v_dim], lse)
        else:
            into.add(a, b, out[..., :v_dim], lse)  # of a query in a gap, out is 0 and lse ±∞


def backward(
    into: tuple[Tensor, Tensor, Tensor],
    queries: QuerySide,
    k: Tensor,
    v: Tensor,
    tasks: Tasks,
    scale: float,
    softcap: float | None,
    backend: str,
) -> None:
    """The merged lse makes the weights, so it is −∞ only for queries that see nothing anywhere: those are in gaps."""
    dtype = queries.q.dtype
    q, k, v, out, grad_out = _fitted(queries.q, k, v, queries.out.to(dtype), queries.grad_out.to(dtype))
    for wave in tasks.compiled(compile_waves):
        (a, b), (c, d) = wave.q, wave.k
        lse = queries.lse[:, a:b].contiguous()
        grads = _call_backward(
            grad_out[a:b], q[a:b], k[c:d], v[c:d], out[a:b], lse, wave, scale, softcap, backend
        )  # fmt: skip
        for total, grad, (start, stop) in zip(into, grads, (wave.q, wave.k, wave.k), strict=True):
            total[start:stop] += grad[..., : total.shape[-1]]


def _fitted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """One head dim for all, a multiple of 8, and rows that loads of 16 bytes can begin at: copies only where needed."""
    dim = _even(max(x.shape[-1] for x in tensors))
    return tuple(
        aligned(torch.nn.functional.pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x) for x in tensors
    )


def _even(dim: int) -> int:
    return -(-dim // 8) * 8


# -- calls ---------------------------------------------------------------------------------------------


def _call_forward(
    q: Tensor, k: Tensor, v: Tensor, wave: Wave, scale: float, softcap: float | None, backend: str
) -> tuple[Tensor, Tensor]:
    """out (queries, H, dim), lse (H, queries)."""
    left, right = wave.window
    shape = (*wave.borders.on(q.device), wave.max_q, wave.max_k)
    if backend == "flash_attn":
        out, lse, *_ = _flash_attn()[0]._flash_attn_varlen_forward(
            q, k, v, *shape, dropout_p=0.0, softmax_scale=scale, causal=False,
            window_size_left=left, window_size_right=right, softcap=softcap or 0.0, return_softmax=False,
        )  # fmt: skip
        return out, lse
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *shape, 0.0, False, False,
        scale=scale, window_size_left=_limit(left), window_size_right=_limit(right),
    )  # fmt: skip
    return out, lse


def _call_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    wave: Wave,
    scale: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = wave.window
    shape = (*wave.borders.on(q.device), wave.max_q, wave.max_k)
    if backend == "flash_attn":
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn()[0]._flash_attn_varlen_backward(
            grad_out, q, k, v, out, lse, *grads, *shape, dropout_p=0.0, softmax_scale=scale, causal=False,
            window_size_left=left, window_size_right=right, softcap=softcap or 0.0, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),  # the operator of PyTorch asks that itself
        )  # fmt: skip
        return grads
    none = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout that is not there
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out, q, k, v, out, lse, *shape, 0.0, False, none, none[:0],
        scale=scale, window_size_left=_limit(left), window_size_right=_limit(right),
    )  # fmt: skip
    return dq, dk, dv


def _limit(window: int) -> int | None:
    return None if window < 0 else window
