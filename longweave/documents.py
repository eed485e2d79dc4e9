"""Tokens and their documents: `lw.shift`, `lw.document_sum`, `lw.document_mean`.

document        a b c d e           f g h
held by         0 0 1 1 0           1 1 0
shift by 1      b c d e ·           g h ·        across shard borders, never across documents
document_sum    a+b+c+d+e           f+g+h        on every rank
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from longweave.comm.exchange import Comm, all_reduce_sum
from longweave.comm.ledger import RecordedCall, call_of
from longweave.core import PackCore
from longweave.errors import InputError, shown
from longweave.pack import Pack, checked_core
from longweave.plan.routing import shift_route
from longweave.tensors import Indices, check_fill, check_tensor, eager, kind_of, widened
from longweave.tokens import TokenRoute


@eager
def shift(x_local: Tensor, pack: Pack, by: int = 1, fill: float = 0) -> Tensor:
    """For each of this rank's tokens the entry `by` tokens later in the same document, whoever holds it.

    x_local: (tokens, …) of any dtype, in the order of `pack.layout`; by: how far to look, back if negative; fill: what
    stands where the document has no such token. One exchange, of only what crosses a border between ranks.
    Differentiable: gradients go back to the token they came from. Raises `InputError` where the arguments do not fit.

        labels = lw.shift(input_ids, pack, fill=-100)  # what each token should predict
        second = lw.shift(input_ids, pack, by=2, fill=-100)  # multi-token prediction
    """
    core = checked_core(pack)
    # As text: True and 1.0 are equal to 1, but not as welcome.
    kind = ("shift of", *kind_of(x_local), f"by {by!r}", f"fill {fill!r}")
    whole = not isinstance(x_local, Tensor) or not (x_local.is_floating_point() or x_local.is_complex())
    with core.enter(kind, lambda: _check_shift(core, x_local, by, fill), [x_local]).forward():
        return core.once(_shift_route, by).walk(x_local, 0, fill if whole else float(fill))


@eager
def document_sum(x_local: Tensor, pack: Pack) -> Tensor:
    """The sum over the tokens of each document: (documents, …), the same on every rank; 0 for an empty document.

    x_local: (tokens, …), floating, in the order of `pack.layout`. Adds in float32 (float64 for float64) with one cast.

    Backward gives each token the SUM over all ranks of the gradients of its document, as `lw.unshard` does: right when
    every rank goes on with its own part of the loss. A loss that every rank computes alike from all documents must be
    divided by `pack.world_size`.

        loss = loss_of(lw.document_sum(x, pack)) / pack.world_size
    """
    core = checked_core(pack)
    with _enter_sum("document_sum", core, x_local).forward():
        return _sum(core, x_local)


@eager
def document_mean(x_local: Tensor, pack: Pack) -> Tensor:
    """The mean over the tokens of each document: (documents, …), the same on every rank; 0 for an empty document.

    As `lw.document_sum`, divided by the lengths of the documents.
    """
    core = checked_core(pack)
    with _enter_sum("document_mean", core, x_local).forward():
        total = _sum(core, widened(x_local))
    (lengths,) = core.once(_lengths).on(total.device)
    return (total / lengths.view(-1, *[1] * (total.ndim - 1))).to(x_local.dtype)


def _check_shift(core: PackCore, x: Tensor, by: int, fill: float) -> None:
    check_tensor("x_local", x)
    core.check_tokens(x)
    if isinstance(by, bool) or not isinstance(by, int):
        raise InputError(f"by is {shown(by)}; give the number of tokens to look ahead, negative to look back")
    check_fill(fill, x.dtype)


def _enter_sum(name: str, core: PackCore, x: Tensor) -> RecordedCall:
    def check() -> None:
        check_tensor("x_local", x)
        core.check_tokens(x)
        if not x.is_floating_point():
            raise InputError(f"x_local is {x.dtype}; give a floating dtype, such as x_local.float()")

    return core.enter((name, "of", *kind_of(x)), check, [x])


def _sum(core: PackCore, x: Tensor) -> Tensor:
    total: Tensor = _DocumentSum.apply(x, core.once(_Documents))  # type: ignore[no-untyped-call]
    return total


def _shift_route(core: PackCore, by: int) -> TokenRoute:
    return TokenRoute(shift_route(core.layout, core.cu_seqlens, core.comm.rank, by), core.comm)


def _lengths(core: PackCore) -> Indices:
    """Tokens of each document, 1 for an empty one."""
    return Indices(np.maximum(np.diff(core.cu_seqlens), 1))


class _Documents:
    """The document of each of this rank's tokens."""

    def __init__(self, core: PackCore) -> None:
        tokens = core.layout.indices(core.comm.rank)
        self.comm: Comm = core.comm
        self.count = len(core.cu_seqlens) - 1
        self.of_tokens = Indices(np.searchsorted(core.cu_seqlens, tokens, side="right") - 1)


class _DocumentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, documents: _Documents) -> Tensor:
        ctx.documents, ctx.call = documents, call_of(documents.comm.ledger, "document_sum")
        wide = widened(x)
        own = wide.new_zeros((documents.count, *x.shape[1:])).index_add_(0, documents.of_tokens.on(x.device)[0], wide)
        return next(all_reduce_sum([own], documents.comm)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with ctx.call.backward():
            return _SpreadSum.apply(grads[0], ctx.documents), None  # type: ignore[no-untyped-call]


class _SpreadSum(torch.autograd.Function):
    """The transpose of `_DocumentSum`, and the other way round."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, documents: _Documents) -> Tensor:
        ctx.documents, ctx.call = documents, call_of(documents.comm.ledger, "document_sum")
        (total,) = all_reduce_sum([widened(grad)], documents.comm)
        return total.to(grad.dtype).index_select(0, documents.of_tokens.on(grad.device)[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with ctx.call.backward():
            return _DocumentSum.apply(grads[0], ctx.documents), None  # type: ignore[no-untyped-call]
