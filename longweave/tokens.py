"""Tokens between layouts: `shard`, `unshard`, `reshard`.

             full ── shard ──▶ local ── reshard ──▶ local' ── unshard ──▶ full
bytes              nothing           only what moves         each shard to every rank
gradient           scatter           the reverse route       SUM over ranks, home to the owner

These take a layout and a group; those that send compare the ranks in every call. A pack was compared when it was made:
`pack.shard` and `pack.unshard` use `Shards` directly, and what they look up is made once and lives in the pack.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longweave.comm.agreement import Fact, compare, same_calls
from longweave.comm.exchange import Comm, Group, all_gather_v, all_to_all_v, reduce_scatter_v, resolve
from longweave.comm.ledger import RecordedCall, call_of
from longweave.errors import GroupError, InputError, shown
from longweave.plan.layout import Layout
from longweave.plan.ranges import Ints, expand
from longweave.plan.routing import Route, route, run_index
from longweave.tensors import Indices, Order, check_tensor, kind_of, why_unusual


def shard(x: Tensor, layout: Layout, group: Group = None, dim: int = 0) -> Tensor:
    """This rank's tokens of a tensor that every rank has in full. No communication.

    x: any shape and dtype with `layout.total` entries in dimension `dim`. Returns a new tensor with
    `layout.counts[rank]` entries there, in the order of the rank's spans. The gradient with respect to `x` is nonzero
    only at this rank's tokens: the part that this rank's loss causes.
    """
    return Shards(layout, comm_for(layout, group)).shard(x, dim)


def unshard(x_local: Tensor, layout: Layout, group: Group = None, dim: int = 0) -> Tensor:
    """The full tensor on every rank, in token order, from the shards of all ranks.

    Backward gives each rank the SUM over all ranks of the gradients of its tokens, which is right when every rank goes
    on to compute its own part of the loss. If instead every rank computes the *same* whole loss from the full tensor,
    the gradient comes out `world_size` times too large: divide that loss by the world size, or let one rank compute it.
    """
    comm = resolve(group)
    with _compared(comm, [layout], x_local, dim, "unshard").forward():
        return Shards(layout, comm).unshard(x_local, dim)


def reshard(x_local: Tensor, src: Layout, dst: Layout, group: Group = None, dim: int = 0) -> Tensor:
    """This rank's tokens under `dst`, from its tokens under `src`: one all-to-all-v; backward is the reverse one.

    Each token that changes rank is sent once, tokens that stay are copied locally, and nothing is sent if no token
    changes rank (then, if the local order is the same too, the result is `x_local` itself).

        y_local = lw.reshard(x_local, lw.Layout.zigzag(cu, 8), lw.Layout.contiguous(total, 8), group)
    """
    comm = resolve(group)
    with _compared(comm, [src, dst], x_local, dim, "reshard").forward():
        return TokenRoute(route(src, dst, comm.rank), comm).walk(x_local, dim)


class Shards:
    """A layout seen from one of its ranks, with the index tensors that take tokens in and out of it."""

    def __init__(self, layout: Layout, comm: Comm) -> None:
        self.layout, self.comm = layout, comm

    @property
    def tokens(self) -> int:
        """Of this rank."""
        return self.layout.counts[self.comm.rank]

    @cached_property
    def _own(self) -> Indices:
        return Indices(self.layout.indices(self.comm.rank))

    @cached_property
    def order(self) -> Order:
        """Token order -> rank order: shards one after the other."""
        return Order(expand(self.layout.starts, self.layout.stops))

    def own(self, device: torch.device) -> Tensor:
        """The global index of each local token."""
        return self._own.on(device)[0]

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        dim = check_tokens(x, self.layout.total, dim, "the layout's total")
        return _restored(_Select.apply(_movable(x), dim, self.own(x.device)), x.dtype)  # type: ignore[no-untyped-call]

    def unshard(self, x_local: Tensor, dim: int = 0) -> Tensor:
        dim = check_tokens(x_local, self.tokens, dim, f"the count of rank {self.comm.rank}")
        return _restored(_Unshard.apply(_movable(x_local), self, dim), x_local.dtype)  # type: ignore[no-untyped-call]

    def gather(self, x_local: Tensor) -> Tensor:
        """Tokens first, without autograd: all tokens in token order, from the shards of all ranks."""
        return self.order.undo(all_gather_v(x_local, self.layout.counts, self.comm).wait())

    def sum_home(self, x_full: Tensor) -> Tensor:
        """The transpose of `gather`: the SUM over ranks of what each has for all tokens, at this rank's tokens."""
        return reduce_scatter_v(self.order.apply(x_full), self.layout.counts, self.comm).wait()

    def mine(self, x_full: Tensor) -> Tensor:
        """This rank's tokens, tokens first, without autograd."""
        return x_full.index_select(0, self.own(x_full.device))

    def spread(self, x_local: Tensor) -> Tensor:
        """The transpose of `mine`: local tokens at their places among all tokens, zeros elsewhere."""
        full = x_local.new_zeros((self.layout.total, *x_local.shape[1:]))
        return full.index_copy_(0, self.own(x_local.device), x_local)


class TokenRoute:
    """A route of one rank, with the index tensors that it needs."""

    def __init__(self, path: Route, comm: Comm) -> None:
        self.path, self.comm = path, comm

    @cached_property
    def back(self) -> TokenRoute:
        return TokenRoute(self.path.reversed(), self.comm)

    @cached_property
    def _indices(self) -> Indices:
        path = self.path
        runs = (path.send_runs, path.recv_runs, path.keep_src_runs, path.keep_dst_runs)
        return Indices(*(run_index(one) for one in runs))

    def walk(self, x_local: Tensor, dim: int = 0, fill: float = 0) -> Tensor:
        """Every token to its new place; `fill` where the route brings nothing. Differentiable."""
        dim = check_tokens(x_local, self.path.tokens_in, dim, f"the count of rank {self.comm.rank}")
        if self.path.is_identity:
            return x_local
        x = _movable(x_local)
        if fill and x.dtype != x_local.dtype:  # the number whose bits are those of `fill`
            fill = _movable(torch.tensor(fill, dtype=x_local.dtype)).item()
        moved = _Walk.apply(x, self, dim, fill)  # type: ignore[no-untyped-call]
        return _restored(moved, x_local.dtype)

    def move(self, x: Tensor, fill: float = 0) -> Tensor:
        """Send what leaves, copy what stays while that is on its way, put what arrives in place."""
        path, pending = self.path, None
        send, recv, keep_src, keep_dst = self._indices.on(x.device)
        if path.communicates:
            outgoing = _take(x, path.send_runs, send)
            pending = all_to_all_v(outgoing, path.send_splits, path.recv_splits, self.comm)
        shape = (path.tokens_out, *x.shape[1:])
        out = x.new_empty(shape) if path.is_complete else x.new_full(shape, fill)
        _put(out, path.keep_dst_runs, keep_dst, _take(x, path.keep_src_runs, keep_src))
        if pending:
            _put(out, path.recv_runs, recv, pending.wait())
        return out


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
    def forward(ctx: Any, x_local: Tensor, shards: Shards, dim: int) -> Tensor:
        ctx.args, ctx.call = (shards, dim), call_of(shards.comm.ledger, "unshard")
        return shards.gather(x_local.movedim(dim, 0)).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with ctx.call.backward():
            return _SumHome.apply(grads[0], *ctx.args), None, None  # type: ignore[no-untyped-call]


class _SumHome(torch.autograd.Function):
    """The transpose of `_Unshard`, and the other way round: gradients of gradients are right, too."""

    @staticmethod
    def forward(ctx: Any, x_full: Tensor, shards: Shards, dim: int) -> Tensor:
        ctx.args, ctx.call = (shards, dim), call_of(shards.comm.ledger, "unshard")
        return shards.sum_home(x_full.movedim(dim, 0)).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with ctx.call.backward():
            return _Unshard.apply(grads[0], *ctx.args), None, None  # type: ignore[no-untyped-call]


class _Walk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, way: TokenRoute, dim: int, fill: float) -> Tensor:
        ctx.way, ctx.dim, ctx.call = way, dim, call_of(way.comm.ledger, "reshard")
        return way.move(x_local.movedim(dim, 0), fill).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        # Where no rank sends anything, some have nothing to do at all: only exchanges are recorded.
        with ctx.call.backward() if ctx.way.path.communicates else nullcontext():
            return _Walk.apply(grads[0], ctx.way.back, ctx.dim, 0), None, None, None  # type: ignore[no-untyped-call]


def _take(x: Tensor, runs: Ints, index: Tensor) -> Tensor:
    return x[runs[0, 0] : runs[0, 1]] if len(runs) == 1 else x.index_select(0, index)


def _put(out: Tensor, runs: Ints, index: Tensor, values: Tensor) -> None:
    if len(runs) == 1:
        out[runs[0, 0] : runs[0, 1]] = values
    else:
        out.index_copy_(0, index, values)


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


# -- checks --------------------------------------------------------------------------------------------


def comm_for(layout: Layout, group: Group) -> Comm:
    comm = resolve(group)
    check_size(layout, comm)
    return comm


def check_size(layout: Layout, comm: Comm) -> None:
    if not isinstance(layout, Layout):
        raise InputError(f"layout is a {type(layout).__name__}; make one, such as lw.Layout.zigzag(cu_seqlens, world)")
    if comm.size != layout.world_size:
        raise GroupError(
            f"the group has {comm.size} ranks but the layout is for {layout.world_size}; "
            "make the layout with world_size = the size of the group"
        )


def check_tokens(x: Tensor, expected: int, dim: int, what: str) -> int:
    """The dimension, counted from the front, if the tensor has the expected number of tokens there."""
    check_tensor("the tensor", x)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise InputError(f"dim is {shown(dim)} but the tensor has shape {tuple(x.shape)}; give the dimension of tokens")
    if x.shape[dim] != expected:
        raise InputError(
            f"the tensor has {x.shape[dim]} tokens in dimension {dim} (shape {tuple(x.shape)}) but {what} is "
            f"{expected}; pass the tensor that belongs to this layout, or another dim"
        )
    return dim % x.ndim


def describe(name: str, x: Tensor, dim: int) -> str:
    """A call on one tensor as the other ranks must make it too: everything but its number of tokens."""
    if not isinstance(x, Tensor) or why_unusual(x) or not isinstance(dim, int):
        return f"{name} of {kind_of(x)} along dim {shown(dim)}"
    trailing = [size for place, size in enumerate(x.shape) if place != dim % max(x.ndim, 1)]
    return f"{name} of {x.dtype} {trailing} along dim {dim}"


def _compared(comm: Comm, layouts: list[Layout], x: Tensor, dim: int, name: str) -> RecordedCall:
    """The call, once this rank's tensor fits the first layout, and all ranks hold these layouts and make this call."""
    problem, fingerprints = None, ""
    try:
        for layout in layouts:
            check_size(layout, comm)
        fingerprints = " ".join(layout.fingerprint for layout in layouts)
        check_tokens(x, layouts[0].counts[comm.rank], dim, f"the count of rank {comm.rank}")
    except Exception as error:
        problem = error
    same_layout = Fact(
        fingerprints, "holds", "another layout than the rest", "give every rank of the group the same layout"
    )
    call = describe(name, x, dim)
    compare(comm, [same_layout, same_calls(call)], problem)
    return RecordedCall(comm.ledger, call)
