"""The entry to every attention backend: `attend` and `attend_backward`, and the `Kernel` that strategies use.

    attend            Partial.empty ──▶ Kernel.forward(into, q, k, v, tasks) … once per arriving K/V ──▶ out, lse
    attend_backward   QuerySide(grad_out, q, out, lse) ──▶ Kernel.backward((dq, dk, dv), queries, k, v, tasks) …

Tensors are token-first: q (Tq, H, D), k (Tk, Hk, D), v (Tk, Hk, Dv), H a multiple of Hk, with any strides of tokens and
heads. K/V heads are never repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longweave.errors import BackendError, InputError, did_you_mean
from longweave.kernels.attention import cpu_flash, cuda_flash, flex, reference, spans
from longweave.kernels.attention.partial import Partial, QuerySide, Tasks
from longweave.tensors import accumulation_dtype

log = logging.getLogger("longweave.kernels")

BACKENDS = ("cpu_flash", "flash_attn", "aten_flash", "triton", "flex", "reference")
OF_LINEAR_MIXERS = ("torch", "fla", "recurrent")  # backends of other operators, `longweave.linear.engines`


def check_backend(backend: object) -> None:
    """Raise unless softmax attention has a backend of this name, or it is "auto"."""
    names = ("auto", *BACKENDS)
    if backend in names:
        return
    hint = did_you_mean(backend, names)
    if backend in OF_LINEAR_MIXERS:
        hint = (
            f"; {backend!r} belongs to linear mixers, which choose by themselves or by backend= in their own call, "
            f"such as lw.gated_delta_rule(…, backend={backend!r})"
        )
    raise InputError(f"backend is {backend!r}; softmax attention has {', '.join(names)}{hint}")


@dataclass(frozen=True)
class Kernel:
    """A backend with its options fixed.

    `lists` is a second backend, for lists of tasks that the first one serves badly: on a GPU windows and many short
    tasks go to Triton kernels, large causal and full ones to flash attention. Their results merge all the same.

    `runs` is for head counts that do not divide: (q start, q stop, k start, k stop) ranges of heads, in each of which
    every K/V head serves the same number of query heads. None: that holds for all heads together.
    """

    backend: str
    scale: float
    softcap: float | None = None
    lists: str | None = None
    runs: tuple[tuple[int, int, int, int], ...] | None = None

    def forward(self, into: Partial, q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, fresh: bool = False) -> None:
        """Add to `into` what q sees in k, v. `fresh`: `into` has seen nothing yet."""
        if not len(tasks):
            return
        for a, b, c, d in self._runs(q, k):
            self._forward(into.heads(a, b), q[:, a:b], k[:, c:d], v[:, c:d], tasks, fresh)

    def backward(
        self, into: tuple[Tensor, Tensor, Tensor], queries: QuerySide, k: Tensor, v: Tensor, tasks: Tasks
    ) -> None:
        """Add to `into` = (dq, dk, dv) what these tasks contribute."""
        if not len(tasks):
            return
        dq, dk, dv = into
        for a, b, c, d in self._runs(queries.q, k):
            grads = dq[:, a:b], dk[:, c:d], dv[:, c:d]
            self._backward(grads, queries.heads(a, b), k[:, c:d], v[:, c:d], tasks)

    def serving(self, tasks: Tasks) -> str:
        """The backend that these tasks go to."""
        if self.lists is None or cuda_flash.suits(tasks):
            return self.backend
        return self.lists

    def _runs(self, q: Tensor, k: Tensor) -> tuple[tuple[int, int, int, int], ...]:
        return ((0, q.shape[1], 0, k.shape[1]),) if self.runs is None else self.runs

    def _forward(self, into: Partial, q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, fresh: bool) -> None:
        backend = self.serving(tasks)
        if backend == "cpu_flash":
            cpu_flash.forward(into, q, k, v, tasks, self.scale, fresh)
        elif backend == "reference":
            reference.forward(into, q, k, v, tasks, self.scale, self.softcap)
        elif backend == "flex":
            flex.forward(into, q, k, v, tasks, self.scale, self.softcap)
        elif backend == "triton":
            spans.forward(into, q, k, v, tasks, self.scale, self.softcap, fresh)
        else:
            cuda_flash.forward(into, q, k, v, tasks, self.scale, self.softcap, backend, fresh)

    def _backward(
        self, into: tuple[Tensor, Tensor, Tensor], queries: QuerySide, k: Tensor, v: Tensor, tasks: Tasks
    ) -> None:
        backend = self.serving(tasks)
        if backend == "cpu_flash":
            cpu_flash.backward(into, queries, k, v, tasks, self.scale)
        elif backend == "reference":
            reference.backward(into, queries, k, v, tasks, self.scale, self.softcap)
        elif backend == "flex":
            flex.backward(into, queries, k, v, tasks, self.scale, self.softcap)
        elif backend == "triton":
            spans.backward(into, queries, k, v, tasks, self.scale, self.softcap)
        else:
            cuda_flash.backward(into, queries, k, v, tasks, self.scale, self.softcap, backend)


def choose(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, backend: str = "auto") -> Kernel:
    """The named backend, or the best that can serve. Raises `BackendError` if the named one cannot."""
    # Flash kernels multiply after they have masked: what is hidden, −∞, would become NaN or +∞.
    flash = None if scale > 0 else f"scale is {scale}; flash kernels need a positive one"
    reasons: dict[str, Callable[[], str | None]] = {
        "cpu_flash": lambda: flash or cpu_flash.why_not(q, k, v, softcap),
        "flash_attn": lambda: flash or cuda_flash.why_not_flash_attn(q, k, v),
        "aten_flash": lambda: flash or cuda_flash.why_not_aten(q, k, v, softcap),
        "triton": lambda: spans.why_not(q, k, v),
        "flex": lambda: flex.why_not(q, k, v),
        "reference": lambda: None,
    }
    check_backend(backend)
    lists = None
    if backend == "auto":
        order = ("cpu_flash", *cuda_flash.order(), "triton", "flex", "reference")
        backend = next(name for name in order if reasons[name]() is None)
        if backend in ("flash_attn", "aten_flash") and reasons["triton"]() is None:
            # Softcaps and head dims that flash kernels would have to fill up go to the other altogether.
            odd = q.shape[-1] != v.shape[-1] or q.shape[-1] % 8
            backend, lists = ("triton", None) if odd or softcap is not None else (backend, "triton")
    elif reason := reasons[backend]():
        able = [repr(name) for name, why_not in reasons.items() if why_not() is None]
        raise BackendError(f"backend {backend!r} cannot serve this call: {reason}; use 'auto' or {' or '.join(able)}")
    log.debug("attention backend %s for %s on %s, q %s", backend, q.dtype, q.device, tuple(q.shape))
    return Kernel(backend, scale, softcap, lists)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tasks: Tasks,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of q over k, v on one rank: out (Tq, H, Dv) and lse (H, Tq), both float32 (float64 for float64)."""
    kernel = choose(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, softcap, backend)
    result = Partial.empty(q, v.shape[-1])
    kernel.forward(result, q, k, v, tasks, fresh=True)
    return result.finish(sinks, result.out.dtype), result.lse


def attend_backward(
    queries: QuerySide,
    k: Tensor,
    v: Tensor,
    tasks: Tasks,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in float32 (float64 for float64)."""
    q = queries.q
    kernel = choose(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, softcap, backend)
    grads = zeros_like_sum(q), zeros_like_sum(k), zeros_like_sum(v)
    kernel.backward(grads, queries, k, v, tasks)
    return grads


def zeros_like_sum(x: Tensor) -> Tensor:
    """A contiguous zero tensor of the shape of x, in the dtype in which its gradient is summed."""
    return torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device)
