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

from longweave.comm.exchange import all_reduce_sum
from longweave.comm.groups import Comm
from longweave.core import PackCore
from longweave.errors import InputError
from longweave.pack import Pack
from longweave.plan.routing import shift_route
from longweave.tensors import Indices, eager, widened
from longweave.tokens import TokenRoute, check_tokens


@eager
def shift(x_local: Tensor, pack: Pack, by: int = 1, fill: float = 0) -> Tensor:
    """For each of this rank's tokens the entry `by` tokens later in the same document, whoever holds it.

    x_local: (tokens, …) of any dtype, in the order of `pack.layout`; by: how far to look, back if negative; fill: what
    stands where the document has no such token. One exchange, of only what crosses a border between ranks.
    Differentiable: gradients go back to the token they came from. Raises `InputError` where the arguments do not fit.

        labels = lw.shift(input_ids, pack, fill=-100)  # what each token should predict
        second = lw.shift(input_ids, pack, by=2, fill=-100)  # multi-token prediction
    """
    core = _core(pack)
    kind = ("shift of", *_kind(x_local), "by", by, "fill", fill)
    core.enter(kind, lambda: _check_shift(core, x_local, by))
    return core.once(_shift_route, by).walk(x_local, 0, fill)


@eager
def document_sum(x_local: Tensor, pack: Pack) -> Tensor:
    """The sum over the tokens of each document: (documents, …), the same on every rank; 0 for an empty document.

    x_local: (tokens, …), floating, in the order of `pack.layout`. Adds in float32 (float64 for float64) with one cast.

    Backward gives each token the SUM over all ranks of the gradients of its document, as `lw.unshard` does: right when
    every rank goes on with its own part of the loss. A loss that every rank computes alike from all documents must be
    divided by `pack.world_size`.

        loss = loss_of(lw.document_sum(x, pack)) / pack.world_size
    """
    core = _core(pack)
    core.enter(("document_sum of", *_kind(x_local)), lambda: _check_sum(core, x_local))
    core.check_tokens(x_local)
    total: Tensor = _DocumentSum.apply(x_local, core.once(_Documents))  # type: ignore[no-untyped-call]
    return total


@eager
def document_mean(x_local: Tensor, pack: Pack) -> Tensor:
    """The mean over the tokens of each document: (documents, …), the same on every rank; 0 for an empty document.

    As `lw.document_sum`, divided by the lengths of the documents.
    """
    core = _core(pack)
    lengths = torch.from_numpy(np.maximum(np.diff(core.cu_seqlens), 1)).to(x_local.device)
    total = document_sum(widened(x_local), pack)
    return (total / lengths.view(-1, *[1] * (total.ndim - 1))).to(x_local.dtype)


def _core(pack: Pack) -> PackCore:
    if not isinstance(pack, Pack):
        raise InputError(f"pack is a {type(pack).__name__}; make one per batch: lw.Pack(cu_seqlens, group)")
    return pack.core


def _kind(x: Any) -> tuple[object, ...]:
    return (x.dtype, x.shape[1:]) if isinstance(x, Tensor) else (type(x).__name__,)


def _check_shift(core: PackCore, x: Tensor, by: int) -> None:
    check_tokens(x, core.tokens, 0, f"the count of rank {core.comm.rank}")
    if isinstance(by, bool) or not isinstance(by, int):
        raise InputError(f"by is {by!r}; give the number of tokens to look ahead, negative to look back")


def _check_sum(core: PackCore, x: Tensor) -> None:
    check_tokens(x, core.tokens, 0, f"the count of rank {core.comm.rank}")
    if not x.is_floating_point():
        raise InputError(f"x_local is {x.dtype}; give a floating dtype, such as x_local.float()")


def _shift_route(core: PackCore, by: int) -> TokenRoute:
    return TokenRoute(shift_route(core.layout, core.cu_seqlens, core.comm.rank, by), core.comm)


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
        ctx.documents = documents
        wide = widened(x)
        own = wide.new_zeros((documents.count, *x.shape[1:])).index_add_(0, documents.of_tokens.on(x.device)[0], wide)
        return all_reduce_sum([own], documents.comm)[0].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _SpreadSum.apply(grads[0], ctx.documents), None  # type: ignore[no-untyped-call]


class _SpreadSum(torch.autograd.Function):
    """The transpose of `_DocumentSum`, and the other way round."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, documents: _Documents) -> Tensor:
        ctx.documents = documents
        (total,) = all_reduce_sum([widened(grad)], documents.comm)
        return total.to(grad.dtype).index_select(0, documents.of_tokens.on(grad.device)[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _DocumentSum.apply(grads[0], ctx.documents), None  # type: ignore[no-untyped-call]
