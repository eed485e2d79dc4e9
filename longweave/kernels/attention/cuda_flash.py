"""Flash attention on CUDA with `cu_seqlens`: PyTorch's own kernels, or the flash-attn package where it is installed.

Both take many (query range, key range) segments in one call, causal aligned at the bottom right, but a query only once
per call. So tasks are dealt into waves: each wave is one call in which no query occurs twice, and the results of the
waves are merged. No GPU has run this yet: the preparation of arguments is tested, the kernels are not.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longweave.kernels.attention.partial import NO_LIMIT, Partial, QuerySide, TaskRows, Tasks
from longweave.tensors import Indices


class Wave(NamedTuple):
    """One varlen call: segment i has the queries q[i] and keys k[i], as (start, stop); the window is (left, right)."""

    q: tuple[tuple[int, int], ...]
    k: tuple[tuple[int, int], ...]
    window: tuple[int, int]
    borders: Indices  # cu_seqlens of queries and of keys


def why_not_aten(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    if softcap is not None:
        return "it has no softcap"
    return _why_not(q, v)


def why_not_flash_attn(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if not _has_flash_attn():
        return "flash-attn is not installed"
    return _why_not(q, v)


@lru_cache(maxsize=1)  # a constant of the process
def _has_flash_attn() -> bool:
    return find_spec("flash_attn") is not None


def _why_not(q: Tensor, v: Tensor) -> str | None:
    if q.device.type != "cuda":
        return f"tensors are on {q.device.type}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "it needs compute capability 8.0"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {q.dtype}"
    if q.shape[-1] > 256 or v.shape[-1] > 256:
        return f"head dims {q.shape[-1]} and {v.shape[-1]} exceed 256"
    return None


def compile_waves(rows: TaskRows) -> tuple[Wave, ...]:
    """Deal tasks into as few waves as greedy filling gives; one wave has one window."""
    waves: list[tuple[tuple[int, int], list[tuple[int, int]], list[tuple[int, int]]]] = []
    for q0, q1, k0, k1, lo, hi in sorted(rows.tolist()):
        window = _window(q1, k1, lo, hi)
        fitting = (wave for wave in waves if wave[0] == window and wave[1][-1][1] <= q0)
        wave = next(fitting, None)
        if wave is None:
            wave = (window, [], [])
            waves.append(wave)
        wave[1].append((q0, q1))
        wave[2].append((k0, k1))
    return tuple(Wave(tuple(qs), tuple(ks), window, Indices(_borders(qs), _borders(ks))) for window, qs, ks in waves)


def _borders(spans: list[tuple[int, int]]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *(b - a for a, b in spans)]).astype(np.int32)


def _window(q1: int, k1: int, lo: int, hi: int) -> tuple[int, int]:
    """Limits on k − q as flash-attention's window, which counts from the bottom right corner; −1 is no limit.

    Row i of n may see column j of m if  i + (m − n) − left <= j <= i + (m − n) + right.
    """
    left = -1 if lo <= -NO_LIMIT else k1 - q1 - lo
    right = -1 if hi >= NO_LIMIT else q1 + hi - k1
    return left, right


def forward(
    into: Partial, q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, scale: float, softcap: float | None, backend: str
) -> None:
    v_dim = v.shape[-1]
    for wave in tasks.compiled(compile_waves):
        args = _arguments(wave, q, k, v)
        out, lse = _call_forward(args, wave, scale, softcap, backend)
        at = 0
        for q0, q1 in wave.q:
            part = slice(at, at + q1 - q0)
            into.add(q0, q1, out[part, :, :v_dim].transpose(0, 1), lse[:, part])
            at += q1 - q0


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
    dq, dk, dv = into
    q, dtype = queries.q, queries.q.dtype
    for wave in tasks.compiled(compile_waves):
        args = _arguments(wave, q, k, v)
        dim = args["q"].shape[-1]
        out, grad_out = (_take(x.to(dtype), wave.q, dim) for x in (queries.out, queries.grad_out))
        lse = torch.cat([queries.lse[:, a:b] for a, b in wave.q], 1).float()
        gq, gk, gv = _call_backward(args, {"out": out, "grad_out": grad_out}, lse, wave, scale, softcap, backend)
        for total, grad, spans in ((dq, gq, wave.q), (dk, gk, wave.k), (dv, gv, wave.k)):
            at = 0
            for a, b in spans:
                total[:, a:b] += grad[at : at + b - a, :, : total.shape[-1]].transpose(0, 1)
                at += b - a


def _arguments(wave: Wave, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Packed q, k, v (tokens, heads, dim) of a wave and their borders; head dims filled up to a multiple of 8."""
    dim = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    cu_q, cu_k = wave.borders.on(q.device)
    return {
        "q": _take(q, wave.q, dim),
        "k": _take(k, wave.k, dim),
        "v": _take(v, wave.k, dim),
        "cu_q": cu_q,
        "cu_k": cu_k,
        "max_q": max(b - a for a, b in wave.q),
        "max_k": max(b - a for a, b in wave.k),
    }


def _take(x: Tensor, spans: tuple[tuple[int, int], ...], dim: int) -> Tensor:
    packed = torch.cat([x[:, a:b] for a, b in spans], 1).transpose(0, 1)
    if packed.shape[-1] < dim:
        packed = torch.nn.functional.pad(packed, (0, dim - packed.shape[-1]))
    return packed.contiguous()


def _call_forward(
    a: dict[str, Any], wave: Wave, scale: float, softcap: float | None, backend: str
) -> tuple[Tensor, Tensor]:
    """out (queries, H, dim), lse (H, queries)."""
    left, right = wave.window
    if backend == "flash_attn":
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, lse, *_ = _flash_attn_varlen_forward(
            a["q"], a["k"], a["v"], a["cu_q"], a["cu_k"], a["max_q"], a["max_k"],
            dropout_p=0.0, softmax_scale=scale, causal=False,
            window_size_left=left, window_size_right=right, softcap=softcap or 0.0, return_softmax=False,
        )  # fmt: skip
        return out, lse
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        a["q"], a["k"], a["v"], a["cu_q"], a["cu_k"], a["max_q"], a["max_k"],
        0.0, False, False, scale=scale, window_size_left=_limit(left), window_size_right=_limit(right),
    )  # fmt: skip
    return out, lse


def _call_backward(
    a: dict[str, Any],
    merged: dict[str, Tensor],
    lse: Tensor,
    wave: Wave,
    scale: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = wave.window
    if backend == "flash_attn":
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        grads = torch.empty_like(a["q"]), torch.empty_like(a["k"]), torch.empty_like(a["v"])
        _flash_attn_varlen_backward(
            merged["grad_out"], a["q"], a["k"], a["v"], merged["out"], lse, *grads,
            a["cu_q"], a["cu_k"], a["max_q"], a["max_k"],
            dropout_p=0.0, softmax_scale=scale, causal=False, window_size_left=left, window_size_right=right,
            softcap=softcap or 0.0, alibi_slopes=None, deterministic=True,
        )  # fmt: skip
        return grads
    none = torch.zeros(2, dtype=torch.uint64, device=lse.device)  # the random state of a dropout that is not there
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        merged["grad_out"], a["q"], a["k"], a["v"], merged["out"], lse, a["cu_q"], a["cu_k"], a["max_q"], a["max_k"],
        0.0, False, none, none[:0], scale=scale, window_size_left=_limit(left), window_size_right=_limit(right),
    )  # fmt: skip
    return dq, dk, dv


def _limit(window: int) -> int | None:
    return None if window < 0 else window
