"""ring-flash-attention on CPUs: the package as it is installed, over torch's kernel in place of flash_attn's.

    ring_flash_attn  ──▶  flash_attn.flash_attn_interface  =  stand-ins  ──▶  torch's flash attention for CPUs

Both sides of a race then compute with the same kernel. The package calls it as it calls flash_attn's: causal parts in
the kernel's own causal mode. Ours cuts them into squares (`kernels.attention.cpu_flash`), which belongs to the
comparison as messages, adds and balance do. The stand-ins are in `sys.modules` while the package is imported, and no
longer: nothing else takes them for flash_attn. They serve float32 without dropout, windows, softcap and ALiBi.

In float32, 0.1.8's zigzag backward overwrites its own sums (`_Buffer`); here it does not, at the price of a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from longweave.kernels.attention import cpu_flash
from longweave.kernels.attention.cpu_flash import FlashCall
from longweave.kernels.attention.partial import NO_LIMIT, Partial, QuerySide, TaskRows, Tasks

PACKAGE = "ring_flash_attn"
READY = "_longweave_stand_ins"  # an attribute of the package when all of it is in its place


class AbsentError(Exception):
    """A peer cannot take part; the text says why."""


def ring_flash_attention() -> Any:
    """The package, imported over torch's kernel. Raises `AbsentError` if it is not installed or does not import."""
    if hasattr(sys.modules.get(PACKAGE), READY):
        return sys.modules[PACKAGE]
    if find_spec(PACKAGE) is None:
        raise AbsentError("not installed: pip install --no-deps ring-flash-attn")
    try:
        with _in_modules(_stand_ins()):
            package = import_module(PACKAGE)
            vars(import_module(f"{PACKAGE}.zigzag_ring_flash_attn"))["torch"] = _TorchOfBuffers()
            setattr(package, READY, True)
            return package
    except Exception as error:
        raise AbsentError(f"does not import: {type(error).__name__}: {error}") from error


@contextmanager
def _in_modules(modules: dict[str, ModuleType]) -> Iterator[None]:
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _stand_ins() -> dict[str, ModuleType]:
    interface = ModuleType("flash_attn.flash_attn_interface")
    for name, function in (
        ("_flash_attn_forward", forward),
        ("_flash_attn_backward", backward),
        ("_flash_attn_varlen_forward", varlen_forward),
        ("_flash_attn_varlen_backward", varlen_backward),
    ):
        setattr(interface, name, function)
    flash_attn = ModuleType("flash_attn")
    flash_attn.__dict__.update(flash_attn_interface=interface, __version__="2.8.0")
    adapters = ModuleType(f"{PACKAGE}.adapters")  # for models of transformers 4; not needed here, and 5 fails in them
    adapters.__dict__.update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    return {module.__name__: module for module in (interface, flash_attn, adapters)}


class _Buffer(Tensor):
    """What `to` gives is another tensor, as it is for bfloat16.

    The zigzag backward begins its sums as `buffer.to(torch.float32)` and writes into the buffer again. For float32 that
    is the buffer itself, and the gradients are wrong.
    """

    def to(self, *args: Any, **options: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


class _TorchOfBuffers:
    """`torch` as the zigzag module sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **options: Any) -> Tensor:
        return torch.empty(*args, **options).as_subclass(_Buffer)


# -- flash_attn's functions, by keyword as the package calls them ----------------------------------------


def forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, **rest: Any
) -> tuple[Tensor, Tensor, None, None]:
    """q, k, v (1, tokens, heads, dim) → out alike, lse (1, heads, tokens), and what only dropout has."""
    out, lse = _attend(q[0], k[0], v[0], _rows(len(q[0]), len(k[0]), causal), softmax_scale)
    return out[None], lse[None], None, None


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    softmax_scale: float,
    causal: bool,
    **rest: Any,
) -> None:
    """Into dq, dk, dv."""
    queries = QuerySide(dout[0], q[0], out[0], softmax_lse[0])
    grads = dq.as_subclass(Tensor)[0], dk.as_subclass(Tensor)[0], dv.as_subclass(Tensor)[0]
    _attend_backward(grads, queries, k[0], v[0], _rows(len(q[0]), len(k[0]), causal), softmax_scale)


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    **rest: Any,
) -> tuple[Tensor, Tensor, None, None]:
    """q, k, v (tokens, heads, dim) → out alike, lse (heads, tokens). A document's last query sees its last key."""
    out, lse = _attend(q, k, v, _document_rows(cu_seqlens_q, cu_seqlens_k, causal), softmax_scale)
    return out, lse, None, None


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    **rest: Any,
) -> None:
    """Into dq, dk, dv."""
    tasks = _document_rows(cu_seqlens_q, cu_seqlens_k, causal)
    _attend_backward((dq, dk, dv), QuerySide(dout, q, out, softmax_lse), k, v, tasks, softmax_scale)


# -- torch's kernel --------------------------------------------------------------------------------------

Row = tuple[int, int, int, int, int, int]
_tasks: dict[tuple[Row, ...], Tasks] = {}  # of the few calls of a race; dies with the worker process


class WholeTasks(Tasks):
    """One call for what all rows see, and one in causal mode for the triangle behind it."""

    __slots__ = ()

    def compiled(self, compiler: Any) -> Any:
        return super().compiled(_whole_calls)


def _whole_calls(rows: TaskRows) -> tuple[FlashCall, ...]:
    calls = []
    for q0, q1, k0, k1, _, hi in rows.tolist():
        causal = hi < NO_LIMIT
        if causal and q0 + hi < k0:
            raise AbsentError(f"asks for {q1 - q0} causal queries on {k1 - k0} keys, some of which see nothing")
        diagonal = q0 + hi if causal else k1
        if diagonal > k0:
            calls.append(FlashCall(q0, q1, k0, diagonal, first=True))
        if causal:
            calls.append(FlashCall(q0, q1, diagonal, k1, True, first=diagonal == k0))
    return tuple(calls)


def _kept_tasks(rows: tuple[Row, ...]) -> Tasks:
    """Tasks remember the kernel calls that they become: the peer pays for that once, as a pack does."""
    if rows not in _tasks:
        _tasks[rows] = WholeTasks(rows)  # type: ignore[arg-type]
    return _tasks[rows]


def _rows(queries: int, keys: int, causal: bool) -> Tasks:
    return _kept_tasks(((0, queries, 0, keys, -NO_LIMIT, keys - queries if causal else NO_LIMIT),))


def _document_rows(cu_q: Tensor, cu_k: Tensor, causal: bool) -> Tasks:
    rows = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        if b > a:
            rows.append((a, b, c, d, -NO_LIMIT, d - b if causal else NO_LIMIT))
    return _kept_tasks(tuple(rows))


def _attend(q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, scale: float) -> tuple[Tensor, Tensor]:
    into = Partial(q.new_empty((*q.shape[:2], v.shape[-1])), q.new_full((q.shape[1], len(q)), -torch.inf))
    cpu_flash.forward(into, q, k, v, tasks, scale, fresh=True)
    return into.out, into.lse


def _attend_backward(
    into: tuple[Tensor, Tensor, Tensor], queries: QuerySide, k: Tensor, v: Tensor, tasks: Tasks, scale: float
) -> None:
    for grad in into:
        grad.zero_()
    cpu_flash.backward(into, queries, k, v, tasks, scale)
