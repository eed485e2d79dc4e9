"""`lw.causal_conv1d`: depthwise causal convolution of packed documents, whose tokens lie on several ranks.

    x of this rank ──┬─────────────────────────────▶ convolution of each fragment ──▶ y
                     └─▶ W − 1 tokens before each fragment, from their owners ─┘
                          one exchange, also for several tensors at once

Backward sends the gradients of those tokens home, where each owner adds them to its own, in float32 with one cast at
the end: a document that is cut gets the gradient of one that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longweave.comm.exchange import Comm, all_to_all_v
from longweave.comm.ledger import call_of
from longweave.core import PackCore
from longweave.errors import InputError
from longweave.kernels.recurrence.conv import check_conv, conv_backward, conv_edges, conv_forward
from longweave.linear.methods import in_place
from longweave.pack import Pack, checked_core
from longweave.plan.fragments import halo_route
from longweave.tensors import Indices, accumulation_dtype, check_device, check_tensor, eager, kind_of, on_one_device


@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, pack: Pack, *, activation: str | None = None
) -> Tensor: ...
@overload
def causal_conv1d(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None,
    pack: Pack,
    *,
    activation: str | None = None,
) -> tuple[Tensor, ...]: ...
@eager
def causal_conv1d(x: Any, weight: Any, bias: Any, pack: Pack, *, activation: str | None = None) -> Any:
    """Causal convolution along each document, from and to this rank's tokens.

    x: (tokens, C), this rank's tokens in the order of `pack.layout`; weight: (C, width), width 2 to 8; bias: (C,) or
        None. activation: None or "silu".
    Lists of x, weight and bias (or None) are convolved one by one, and their halos share one exchange: the way to do
    q, k and v, which may differ in channels but not in width or dtype.

    Returns y (tokens, C) in the dtype of x, or a tuple of them. Gradients of x are whole; those of weight and bias are
    this rank's part (SUM over ranks is the full one). Raises `InputError`, before anything is sent, for shapes and
    widths that do not fit, and on the first pack of a group `GroupError` where the ranks' calls differ.

        y = lw.causal_conv1d(x, weight, None, pack, activation="silu")
        q, k, v = lw.causal_conv1d([q, k, v], [wq, wk, wv], None, pack, activation="silu")
    """
    core = checked_core(pack)
    xs, weights = _listed(x), _listed(weight)
    biases = [None] * len(xs) if bias is None else _listed(bias)
    params = (kind_of(p, per_token=False) for p in (*weights, *biases))
    together = on_one_device(*xs, *weights, *biases)
    kind = ("causal_conv1d of", *map(kind_of, xs), "by", *params, "activation", activation, together)
    recorded = core.enter(kind, lambda: _check(xs, weights, biases, activation, core), xs)
    halo = core.once(Halo, weights[0].shape[1])
    with recorded.forward():
        results: tuple[Tensor, ...] = _HaloConv.apply(halo, activation == "silu", len(xs), *xs, *weights, *biases)  # type: ignore[no-untyped-call]
    return results[0] if isinstance(x, Tensor) else results


def _listed(x: Any) -> list[Any]:
    return list(x) if isinstance(x, list | tuple) else [x]


def _check(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str | None,
    core: PackCore,
) -> None:
    if not xs or not len(xs) == len(weights) == len(biases):
        raise InputError(f"{len(xs)} tensors, {len(weights)} weights and {len(biases)} biases; give one of each")
    for name, tensors in (("x", xs), ("weight", weights), ("bias", [b for b in biases if b is not None])):
        for tensor in tensors:
            check_tensor(name, tensor)
    core.refuse_crossing("causal_conv1d")
    core.check_tokens(*xs)
    for one, taps, offset in zip(xs, weights, biases, strict=True):
        check_conv(one, taps, offset, activation)
    for one in xs[1:]:
        check_device("one x", one, "another", xs[0])
    if len({taps.shape[1] for taps in weights}) > 1 or len({one.dtype for one in xs}) > 1:
        raise InputError(
            f"widths {[w.shape[1] for w in weights]} and dtypes {[y.dtype for y in xs]}: to share an exchange, "
            "give tensors of one width and one dtype, or convolve them in separate calls"
        )


class Halo:
    """The tokens before each fragment of this rank, from whoever holds them, for convolutions of one width."""

    def __init__(self, core: PackCore, width: int) -> None:
        self.comm: Comm = core.comm
        self.route = route = halo_route(core.fragments, core.comm.rank, width)
        self.edges = conv_edges(core.once(in_place).local.spans, width)
        self._indices = Indices(
            route.send_tokens,
            route.recv_slots,
            route.keep_tokens,
            route.keep_slots,
            route.home_tokens,
            route.home_readers,
        )

    def fetch(self, xs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """x (tokens, C) of each tensor -> its halo (fragments, width − 1, C) in float32 (float64 for float64)."""
        route, device = self.route, xs[0].device
        if not route.needed:
            return [None] * len(xs)
        send, recv, keep_from, keep_to, _, _ = self._indices.on(device)
        wide = accumulation_dtype(xs[0].dtype)
        slots = torch.zeros(
            (route.fragments * (route.width - 1), sum(x.shape[1] for x in xs)), dtype=wide, device=device
        )
        if route.communicates:
            rows = torch.cat([x.index_select(0, send) for x in xs], 1)
            arriving = all_to_all_v(rows, route.send_splits, route.recv_splits, self.comm)
        slots.index_copy_(0, keep_to, torch.cat([x.index_select(0, keep_from) for x in xs], 1).to(wide))
        if route.communicates:
            slots.index_copy_(0, recv, arriving.wait().to(wide))
        halos = slots.view(route.fragments, route.width - 1, slots.shape[1])
        return [halo.contiguous() for halo in torch.split(halos, [x.shape[1] for x in xs], -1)]

    def add_home(self, d_halos: Sequence[Tensor], dxs: Sequence[Tensor]) -> None:
        """Send the gradients of halos to the owners of their tokens, who add them to `dxs`, in their dtype."""
        route = self.route
        _, recv, _, keep_to, home, readers = self._indices.on(dxs[0].device)
        d_slots = torch.cat([d.flatten(0, 1) for d in d_halos], 1)
        kept = d_slots.index_select(0, keep_to)
        returned = d_slots[:0]
        if route.communicates:
            back = d_slots.index_select(0, recv)
            returned = all_to_all_v(back, route.recv_splits, route.send_splits, self.comm).wait()
        rows = torch.cat([returned, kept, kept.new_zeros((1, kept.shape[1]))])
        sums = rows[readers].sum(1)
        for dx, part in zip(dxs, torch.split(sums, [dx.shape[1] for dx in dxs], 1), strict=True):
            dx.index_add_(0, home, part)  # tokens are distinct: no order to depend on


class _HaloConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halo: Halo, silu: bool, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.halo, ctx.silu, ctx.count = halo, silu, count
        ctx.call = call_of(halo.comm.ledger, "causal_conv1d")
        halos = halo.fetch(tensors[:count])
        ctx.save_for_backward(*tensors, *halos)
        calls = zip(*_columns(tensors, count), halos, strict=True)
        return tuple(conv_forward(x, taps, bias, before, halo.edges, silu) for x, taps, bias, before in calls)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        # Only exchanges are recorded: where no rank sends anything, ranks without tokens may have nothing to do at all.
        with ctx.call.backward() if ctx.halo.route.communicates else nullcontext():
            return _HaloConv._gradients(ctx, dys)

    @staticmethod
    def _gradients(ctx: Any, dys: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        halo, count = ctx.halo, ctx.count
        calls = list(zip(*_columns(ctx.saved_tensors, count), strict=True))
        grads = [
            conv_backward(dy, x, taps, bias, before, halo.edges, ctx.silu)
            for dy, (x, taps, bias, before) in zip(dys, calls, strict=True)
        ]
        dxs, d_weights, d_biases, d_halos = zip(*grads, strict=True)
        if halo.route.needed:
            halo.add_home(d_halos, dxs)
        dxs = tuple(dx.to(x.dtype) for dx, (x, *_) in zip(dxs, calls, strict=True))
        return None, None, None, *dxs, *d_weights, *d_biases


def _columns(tensors: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """xs, weights, biases, … of `count` each."""
    return [tensors[start : start + count] for start in range(0, len(tensors), count)]
