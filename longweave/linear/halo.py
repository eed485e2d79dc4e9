"""`lw.causal_conv1d`: depthwise causal convolution of packed documents, whose tokens lie on several ranks.

    x of this rank ──┬─────────────────────────────▶ convolution of each fragment ──▶ y
                     └─▶ W − 1 tokens before each fragment, from their owners ─┘
                          one exchange, also for several tensors at once

Backward sends the gradients of those tokens home, where each owner adds them in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longweave.comm.exchange import all_to_all_v
from longweave.comm.groups import Comm, Group
from longweave.errors import InputError
from longweave.kernels import conv
from longweave.kernels.index import Indices
from longweave.linear.door import eager, open_door
from longweave.plan.fragments import Fragments
from longweave.plan.halo import HaloRoute, halo_route
from longweave.plan.layout import Layout

Many = Tensor | Sequence[Tensor]


@eager
def causal_conv1d(
    x: Many,
    weight: Many,
    bias: Many | None,
    layout: Layout,
    cu_seqlens: object,
    group: Group = None,
    *,
    activation: str | None = None,
) -> Any:
    """Causal convolution along each document, from and to this rank's tokens.

    x: (tokens, C), this rank's tokens in the order of `layout`; weight: (C, width), width 2 to 8; bias: (C,) or None.
    activation: None or "silu".
    Lists of x, weight and bias (or None) are convolved one by one, and their halos share one exchange: the way to do
    q, k and v, which may differ in channels but not in width or dtype.

    Returns y (tokens, C) in the dtype of x, or a tuple of them. Gradients of x are whole; those of weight and bias are
    this rank's part (SUM over ranks is the full one). Raises, before anything is sent, `InputError` for shapes, widths
    and cu_seqlens that do not fit, `GroupError` for a group of another size than the layout or ranks that disagree.

        y = lw.causal_conv1d(x, weight, None, layout, cu_seqlens, group, activation="silu")
        q, k, v = lw.causal_conv1d([q, k, v], [wq, wk, wv], None, layout, cu_seqlens, group, activation="silu")
    """
    single = isinstance(x, Tensor)
    xs, weights, biases = _lists(x, weight, bias)

    def check(tokens: int, rank: int) -> str:
        for one, taps, offset in zip(xs, weights, biases, strict=True):
            conv.check(one, taps, offset, activation)
            if len(one) != tokens:
                raise InputError(f"x has {len(one)} tokens but rank {rank} has {tokens}; shard with the same layout")
        if len({taps.shape[1] for taps in weights}) > 1 or len({one.dtype for one in xs}) > 1:
            raise InputError(
                f"widths {[w.shape[1] for w in weights]} and dtypes {[y.dtype for y in xs]}: to share an exchange, "
                "give tensors of one width and one dtype, or convolve them in separate calls"
            )
        return f"causal_conv1d of {[(tuple(w.shape), y.dtype) for w, y in zip(weights, xs, strict=True)]}"

    door = open_door(layout, cu_seqlens, group, check)
    route = halo_route(door.fragments, door.comm.rank, weights[0].shape[1])
    spans = _borders(door.fragments, door.comm.rank)
    halos: Sequence[Tensor | None] = [None] * len(xs)
    if route.needed:
        halos = _Halo.apply(route, door.comm, *xs)  # type: ignore[no-untyped-call]
    results = tuple(
        conv.causal_conv1d(one, taps, offset, spans, activation=activation, halo=halo)
        for one, taps, offset, halo in zip(xs, weights, biases, halos, strict=True)
    )
    return results[0] if single else results


def _lists(
    x: Many, weight: Many, bias: Many | None
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None]]:
    xs: Sequence[Any] = [x] if isinstance(x, Tensor) else list(x)
    weights: Sequence[Any] = [weight] if isinstance(weight, Tensor) else list(weight)
    if bias is None:
        biases: Sequence[Any] = [None] * len(xs)
    else:
        biases = [bias] if isinstance(bias, Tensor) else list(bias)
    if not xs or not len(xs) == len(weights) == len(biases):
        raise InputError(f"{len(xs)} tensors, {len(weights)} weights and {len(biases)} biases; give one of each")
    if not all(isinstance(t, Tensor) for t in (*xs, *weights)):
        raise InputError("x and weight must be tensors, or lists of tensors")
    return xs, weights, biases


class _Halo(torch.autograd.Function):
    """x (tokens, C) of each tensor -> its halo (fragments, width − 1, C) in float32 (float64 for float64)."""

    @staticmethod
    def forward(ctx: Any, route: HaloRoute, comm: Comm, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.comm = route, comm
        ctx.like = [(x.shape, x.dtype) for x in xs]
        device = xs[0].device
        send, recv, keep_from, keep_to, _, _ = _indices(route).on(device)
        wide = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
        slots = torch.zeros(
            (route.fragments * (route.width - 1), sum(x.shape[1] for x in xs)), dtype=wide, device=device
        )
        if route.communicates:
            rows = torch.cat([x.index_select(0, send) for x in xs], 1)
            arriving = all_to_all_v(rows, route.send_splits, route.recv_splits, comm)
        slots.index_copy_(0, keep_to, torch.cat([x.index_select(0, keep_from) for x in xs], 1).to(wide))
        if route.communicates:
            slots.index_copy_(0, recv, arriving.wait().to(wide))
        halos = slots.view(route.fragments, route.width - 1, slots.shape[1])
        return tuple(halo.contiguous() for halo in torch.split(halos, [x.shape[1] for x in xs], -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_halos: Tensor) -> tuple[Tensor | None, ...]:
        route = ctx.route
        _, recv, _, keep_to, home, readers = _indices(route).on(d_halos[0].device)
        d_slots = torch.cat([d.flatten(0, 1) for d in d_halos], 1)
        kept = d_slots.index_select(0, keep_to)
        returned = d_slots[:0]
        if route.communicates:
            back = d_slots.index_select(0, recv)
            returned = all_to_all_v(back, route.recv_splits, route.send_splits, ctx.comm).wait()
        rows = torch.cat([returned, kept, kept.new_zeros((1, kept.shape[1]))])
        sums = rows[readers].sum(1)
        ends = [0, *accumulate(shape[1] for shape, _ in ctx.like)]
        grads = []
        for (shape, dtype), begin, end in zip(ctx.like, ends[:-1], ends[1:], strict=True):
            dx = torch.zeros(shape, dtype=dtype, device=sums.device)
            grads.append(dx.index_copy_(0, home, sums[:, begin:end].to(dtype)))
        return None, None, *grads


@lru_cache(maxsize=128)
def _indices(route: HaloRoute) -> Indices:
    return Indices(
        route.send_tokens,
        route.recv_slots,
        route.keep_tokens,
        route.keep_slots,
        route.home_tokens,
        route.home_readers,
    )


@lru_cache(maxsize=128)
def _borders(fragments: Fragments, rank: int) -> tuple[int, ...]:
    """The fragments of a rank as cu_seqlens of its local tokens."""
    return (0, *(span.stop for span in fragments.local_spans(rank)))
