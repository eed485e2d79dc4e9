"""Tokens between layouts: `shard`, `unshard`, `reshard`.

             full ── shard ──▶ local ── reshard ──▶ local' ── unshard ──▶ full
bytes              nothing           only what moves         each shard to every rank
gradient           scatter           the reverse route       SUM over ranks, home to the owner
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longweave.comm.agree import agree
from longweave.comm.exchange import all_gather_v, all_to_all_v, reduce_scatter_v
from longweave.comm.groups import Comm, Group, resolve
from longweave.errors import GroupError, InputError
from longweave.kernels.index import Indices
from longweave.plan.layout import Layout, SpanTable
from longweave.plan.ranges import Ints, expand
from longweave.plan.routing import Route, route, run_index


def shard(x: Tensor, layout: Layout, group: Group = None, dim: int = 0) -> Tensor:
    """This rank's tokens of a tensor that every rank has in full. No communication.

    x: any shape and dtype with `layout.total` entries in dimension `dim`. Returns a new tensor with
    `layout.counts[rank]` entries there, in the order of the rank's spans. The gradient with respect to `x` is nonzero
    only at this rank's tokens: the part that this rank's loss causes.
    """
    comm = comm_for(layout, group)
    dim = _check_tokens(x, layout.total, dim, "the layout's total")
    (index,) = _indices_of_rank(layout.table, comm.rank).on(x.device)
    return _restored(_Select.apply(_movable(x), dim, index), x.dtype)  # type: ignore[no-untyped-call]


def unshard(x_local: Tensor, layout: Layout, group: Group = None, dim: int = 0) -> Tensor:
    """The full tensor on every rank, in token order, from the shards of all ranks.

    Backward gives each rank the SUM over all ranks of the gradients of its tokens, which is right when every rank goes
    on to compute its own part of the loss. If instead every rank computes the *same* whole loss from the full tensor,
    the gradient comes out `world_size` times too large: divide that loss by the world size, or let one rank compute it.
    """
    comm = comm_for(layout, group)
    dim = _checked(x_local, [layout], layout.counts[comm.rank], dim, comm, "unshard")
    full = _Unshard.apply(_movable(x_local), layout, dim, comm)  # type: ignore[no-untyped-call]
    return _restored(full, x_local.dtype)


def reshard(x_local: Tensor, src: Layout, dst: Layout, group: Group = None, dim: int = 0) -> Tensor:
    """This rank's tokens under `dst`, from its tokens under `src`: one all-to-all-v; backward is the reverse one.

    Each token that changes rank is sent once, tokens that stay are copied locally, and nothing is sent if no token
    changes rank (then, if the local order is the same too, the result is `x_local` itself).

        y_local = lw.reshard(x_local, lw.Layout.zigzag(cu, 8), lw.Layout.contiguous(total, 8), group)
    """
    comm = comm_for(src, group)
    path = route(src, dst, comm.rank)
    dim = _checked(x_local, [src, dst], path.tokens_in, dim, comm, "reshard")
    if path.is_identity:
        return x_local
    moved = _Reshard.apply(_movable(x_local), path, dim, comm)  # type: ignore[no-untyped-call]
    return _restored(moved, x_local.dtype)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, index: Tensor) -> Tensor:
        ctx.dim, ctx.size, ctx.index = dim, x.shape[dim], index
        return x.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        shape = list(grad.shape)
        shape[ctx.dim] = ctx.size
        return grad.new_zeros(shape).index_copy_(ctx.dim, ctx.index, grad), None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, layout: Layout, dim: int, comm: Comm) -> Tensor:
        ctx.args = layout, dim, comm
        by_rank = all_gather_v(x_local.movedim(dim, 0), layout.counts, comm).wait()
        return by_rank.index_select(0, token_order(layout.table, x_local.device)).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _SumHome.apply(grads[0], *ctx.args), None, None, None  # type: ignore[no-untyped-call]


class _SumHome(torch.autograd.Function):
    """The transpose of `_Unshard`, and the other way round: gradients of gradients are right, too."""

    @staticmethod
    def forward(ctx: Any, x_full: Tensor, layout: Layout, dim: int, comm: Comm) -> Tensor:
        ctx.args = layout, dim, comm
        by_rank = x_full.movedim(dim, 0).index_select(0, rank_order(layout.table, x_full.device))
        return reduce_scatter_v(by_rank, layout.counts, comm).wait().movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Unshard.apply(grads[0], *ctx.args), None, None, None  # type: ignore[no-untyped-call]


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, path: Route, dim: int, comm: Comm) -> Tensor:
        ctx.path, ctx.dim, ctx.comm = path, dim, comm
        return _walk(x_local.movedim(dim, 0), path, comm).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = _Reshard.apply(grads[0], ctx.path.reversed(), ctx.dim, ctx.comm)  # type: ignore[no-untyped-call]
        return back, None, None, None


def _walk(x: Tensor, path: Route, comm: Comm) -> Tensor:
    """Send what leaves, copy what stays while that is on its way, put what arrives in place."""
    pending = None
    if path.communicates:
        pending = all_to_all_v(_take(x, path.send_runs), path.send_splits, path.recv_splits, comm)
    out = x.new_empty((path.tokens_out, *x.shape[1:]))
    _put(out, path.keep_dst_runs, _take(x, path.keep_src_runs))
    if pending:
        _put(out, path.recv_runs, pending.wait())
    return out


def _take(x: Tensor, runs: Ints) -> Tensor:
    if len(runs) == 1:
        return x[runs[0, 0] : runs[0, 1]]
    return x.index_select(0, _run_index(runs, x.device))


def _put(out: Tensor, runs: Ints, values: Tensor) -> None:
    if len(runs) == 1:
        out[runs[0, 0] : runs[0, 1]] = values
    else:
        out.index_copy_(0, _run_index(runs, out.device), values)


# -- indices, made once ---------------------------------------------------------------------------------


class _ByIdentity:
    """An array as a cache key: the arrays of cached routes live as long as their routes."""

    __slots__ = ("array",)

    def __init__(self, array: Ints) -> None:
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.array is self.array

    def __hash__(self) -> int:
        return id(self.array)


def _run_index(runs: Ints, device: torch.device) -> Tensor:
    return _indices_of_runs(_ByIdentity(runs)).on(device)[0]


@lru_cache(maxsize=32)
def _indices_of_runs(runs: _ByIdentity) -> Indices:
    return Indices(run_index(runs.array))


@lru_cache(maxsize=8)
def _indices_of_rank(table: SpanTable, rank: int) -> Indices:
    return Indices(Layout(table).indices(rank))


@lru_cache(maxsize=8)
def _orders(table: SpanTable) -> Indices:
    by_rank = expand(table.starts, table.stops)
    return Indices(by_rank, np.argsort(by_rank))


def rank_order(table: SpanTable, device: torch.device) -> Tensor:
    """The global index of every token, rank after rank: turns token order into rank order."""
    return _orders(table).on(device)[0]


def token_order(table: SpanTable, device: torch.device) -> Tensor:
    """Where each token stands when the shards lie rank after rank: turns rank order into token order."""
    return _orders(table).on(device)[1]


# -- dtypes --------------------------------------------------------------------------------------------

# Dtypes that torch cannot index travel as these, which have the same size.
_STAND_INS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _movable(x: Tensor) -> Tensor:
    """The same bits in a dtype that can be indexed; conjugate and negative views written out."""
    x = x.resolve_conj().resolve_neg()
    if x.dtype in _STAND_INS:
        return x.view(_STAND_INS[x.dtype])
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


def _restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.view(dtype)


# -- the door ----------------------------------------------------------------------------------------


def comm_for(layout: Layout, group: Group) -> Comm:
    comm = resolve(group)
    if comm.size != layout.world_size:
        raise GroupError(
            f"the group has {comm.size} ranks but the layout is for {layout.world_size}; "
            "make the layout with world_size = the size of the group"
        )
    return comm


def _check_tokens(x: Tensor, expected: int, dim: int, what: str) -> int:
    if not isinstance(x, Tensor):
        raise InputError(f"expected a tensor, got a {type(x).__name__}")
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"dim is {dim} but the tensor has shape {tuple(x.shape)}")
    if x.shape[dim] != expected:
        raise InputError(
            f"the tensor has {x.shape[dim]} tokens in dimension {dim} (shape {tuple(x.shape)}) but {what} is "
            f"{expected}; pass the tensor that belongs to this layout, or another dim"
        )
    return dim % x.ndim


def _checked(x: Tensor, layouts: list[Layout], expected: int, dim: int, comm: Comm, call: str) -> int:
    """Validate this rank's tensor; on the first use of a layout, with all ranks at once."""
    problem = None
    try:
        dim = _check_tokens(x, expected, dim, f"the count of rank {comm.rank}")
        trailing = [*x.shape[:dim], *x.shape[dim + 1 :]]
        call = f"{call} of {x.dtype} {trailing} along dim {dim}"
    except InputError as error:
        problem = error
    agree(comm, layouts, call, problem)
    return dim
