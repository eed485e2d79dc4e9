"""Ring, Ulysses, and their product: K/V go round, or heads change hands, or both.

    ring       step 0         step 1         step 2                 K/V move to the next rank while this
    rank 0     q0 × kv0       q0 × kv3       q0 × kv2   …           step computes; W − 1 hops
    rank 1     q1 × kv1       q1 × kv0       q1 × kv3   …

    backward   step 0         step 1         step 2                 K/V move to the previous rank, and the gradient
    rank 0     q0 × kv0       q0 × kv1 ─┐    q0 × kv2 ─┐            of a block follows it, one step behind: the rank
    rank 3     q3 × kv3       q3 × kv0  └▶   q3 × kv1  └▶ …         that computes it adds its part; W − 1 hops home

    Ulysses      before: my tokens, all heads              after: the tokens of all inner ranks, my heads
                 h0 h1 h2 h3                                h0 h1                h2 h3
       rank 0    ▒▒ ▒▒ ▓▓ ▓▓                      rank 0    ▒▒ ▒▒     rank 1     ▓▓ ▓▓
       rank 1    ░░ ░░ ██ ██                                ░░ ░░                ██ ██

With `ulysses_size` ranks to a block, the ranks of a block exchange heads and a ring goes over the blocks: blocks of one
rank are a plain ring, a single block is plain Ulysses. Gradients travel and add up in float32. A step without allowed
pairs makes no kernel call. The two receive buffers take turns; blocks may differ in size and may be empty. Head counts
need not divide: K/V heads that several ranks read are sent to each of them, and their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from longweave.comm.exchange import Comm, Pending, all_to_all_v, send_next
from longweave.kernels.attention import Kernel, zeros_like_sum
from longweave.kernels.attention.partial import Partial, QuerySide, Tasks, sinks_gradient
from longweave.plan.heads import HeadSplit, split_heads
from longweave.plan.schedule import Plan
from longweave.plan.tasks import tasks_by_source
from longweave.softmax.strategy import Grads, Result
from longweave.tensors import Order
from longweave.tokens import Shards

HeadSpans = Sequence[tuple[int, int]]


class RingStrategy:
    """A ring over blocks of ranks that exchange heads among themselves."""

    def __init__(self, plan: Plan, shards: Shards) -> None:
        self.plan, self.comm, self.block_size = plan, shards.comm, plan.ulysses_size
        comm = shards.comm
        self.needs_inputs = self.block_size == 1
        self.block, self.inner = divmod(comm.rank, self.block_size)
        layout = plan.layout if self.block_size == 1 else plan.layout.joined(self.block_size)
        peers = tuple(range(self.inner, comm.size, self.block_size))
        self.ring = Ring(comm, peers, self.block, layout.counts)
        self.tasks = [Tasks(rows) for rows in tasks_by_source(plan.mask, layout, self.block)]

    @cached_property
    def exchange(self) -> HeadExchange:
        first = self.block * self.block_size
        ranks = tuple(range(first, first + self.block_size))
        split = split_heads(self.plan.shape.heads, self.plan.shape.kv_heads, self.block_size)
        order = np.argsort(np.concatenate([self.plan.layout.indices(rank) for rank in ranks]))
        counts = tuple(self.plan.layout.counts[rank] for rank in ranks)
        return HeadExchange(self.comm, ranks, self.inner, counts, split, Order(order))

    def forward(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, want_lse: bool) -> Result:
        if self.block_size == 1:
            result = ring_forward(kernel, q, k, v, self.tasks, self.ring)
            return Result(result.finish(sinks, q.dtype), result.lse, result.lse)
        exchange, split = self.exchange, self.exchange.split
        q, k, v = exchange.to_heads([q, k, v], [split.q, split.k, split.k])
        result = ring_forward(self._kernel(kernel), q, k, v, self.tasks, self.ring)
        out = result.finish(None if sinks is None else self._mine(sinks), q.dtype)
        (parts,) = exchange.to_tokens([out], [split.q], q.dtype)
        lse = None
        if want_lse:
            (lses,) = exchange.to_tokens([result.lse.t()[..., None]], [split.q], result.lse.dtype)
            lse = torch.cat(lses, 1)[..., 0].t()
        kept = torch.cat([x.reshape(-1) for x in (q, k, v, out)])
        return Result(torch.cat(parts, 1), lse, result.lse, kept)

    def backward(
        self, kernel: Kernel, grad_out: Tensor, inputs: Sequence[Tensor], kept: Tensor, lse: Tensor,
        sinks: Tensor | None,
    ) -> Grads:  # fmt: skip
        if self.block_size == 1:
            q, k, v, out = inputs
            queries = QuerySide(grad_out, q, out, lse.view(q.shape[1], len(q)))
            dsinks = None if sinks is None else sinks_gradient(sinks, queries)
            return *ring_backward(kernel, queries, k, v, self.tasks, self.ring), dsinks
        exchange, split = self.exchange, self.exchange.split
        (grad_out,) = exchange.to_heads([grad_out], [split.q])
        q, k, v, out = self._unpack(kept)
        queries = QuerySide(grad_out, q, out, lse.view(q.shape[1], len(q)))
        grads = ring_backward(self._kernel(kernel), queries, k, v, self.tasks, self.ring)
        dsinks = None
        if sinks is not None:
            dsinks = torch.zeros(len(sinks), dtype=lse.dtype, device=lse.device)
            self._mine(dsinks).copy_(sinks_gradient(self._mine(sinks), queries))
        # Heads that only one rank computed are complete: they travel in the dtype they will have in the end.
        dtype = grads[1].dtype if split.replicated else q.dtype
        dq, dk, dv = exchange.to_tokens(grads, [split.q, split.k, split.k], dtype)
        tokens, kv_heads = self.plan.layout.counts[self.comm.rank], self.plan.shape.kv_heads
        kv = [grads[i].new_zeros(tokens, kv_heads, grads[i].shape[-1]) for i in (1, 2)]
        return torch.cat(dq, 1), sum_heads(dk, split.k, kv[0]), sum_heads(dv, split.k, kv[1]), dsinks

    def _unpack(self, kept: Tensor) -> tuple[Tensor, ...]:
        """q, k, v and out of my heads and all tokens of the block."""
        (q0, q1), (k0, k1) = self.exchange.split.q[self.inner], self.exchange.split.k[self.inner]
        dim, v_dim = self.plan.shape.head_dim, self.plan.shape.value_dim
        tokens = self.ring.counts[self.block]
        shapes = [
            (tokens, heads, d) for heads, d in ((q1 - q0, dim), (k1 - k0, dim), (k1 - k0, v_dim), (q1 - q0, v_dim))
        ]
        parts = torch.split(kept, [prod(shape) for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))

    def _kernel(self, kernel: Kernel) -> Kernel:
        return replace(kernel, runs=self.exchange.split.runs[self.inner])

    def _mine(self, per_head: Tensor) -> Tensor:
        start, stop = self.exchange.split.q[self.inner]
        return per_head[start:stop]


# -- the ring ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Some ranks of a group in a circle, seen from one of them."""

    comm: Comm
    peers: tuple[int, ...]  # group ranks
    index: int  # mine among them
    counts: tuple[int, ...]  # tokens of each

    @property
    def size(self) -> int:
        return len(self.peers)

    def pass_on(self, x: Tensor, into: Tensor, step: int) -> Pending[Tensor]:
        """To the peer `step` places on, from the peer `step` places back."""
        to, source = (self.index + step) % self.size, (self.index - step) % self.size
        return send_next(x, into, self.peers[to], self.peers[source], self.comm)


def ring_forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tasks: Sequence[Tasks], ring: Ring) -> Partial:
    """q (T, H, D) on the K/V of all peers; tasks[source] are those on the tokens of that peer."""
    result = Partial.empty(q, v.shape[-1])
    blocks = _Blocks(k, v, ring.counts)
    buffers = blocks.buffers(k.dtype) if ring.size > 1 else []
    block = blocks.pack(k, v)
    for step in range(ring.size):
        source = (ring.index - step) % ring.size
        arriving = None
        if step + 1 < ring.size:
            arriving = ring.pass_on(block, blocks.fit(buffers[step % 2], source - 1), 1)
        kernel.forward(result, q, *blocks.unpack(block, source), tasks[source], fresh=step == 0)
        if arriving:
            block = arriving.wait()
    return result


def ring_backward(
    kernel: Kernel, queries: QuerySide, k: Tensor, v: Tensor, tasks: Sequence[Tasks], ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in float32 from the merged out and lse."""
    dq = zeros_like_sum(queries.q)
    blocks = _Blocks(k, v, ring.counts)
    buffers = blocks.buffers(k.dtype) if ring.size > 1 else []

    def computed(block: Tensor, source: int) -> Tensor:
        """What this rank adds to the gradient of a block."""
        grad = zeros_like_sum(block)
        kernel.backward((dq, *blocks.unpack(grad, source)), queries, *blocks.unpack(block, source), tasks[source])
        return grad

    block = blocks.pack(k, v)
    own, returning = block, None
    for step in range(ring.size):
        source = (ring.index + step) % ring.size
        arriving = None
        if step + 1 < ring.size:
            arriving = ring.pass_on(block, blocks.fit(buffers[step % 2], source + 1), -1)
        if step == 0:
            own = computed(block, source)
        else:
            if returning is None:
                grad = computed(block, source)
            elif len(tasks[source]):
                grad = computed(block, source).add_(returning.wait())
            else:  # nothing of mine: it goes on as it came
                grad = returning.wait()
            room = torch.empty(blocks.size(source + 1), dtype=grad.dtype, device=grad.device)
            returning = ring.pass_on(grad, room, -1)
        if arriving:
            block = arriving.wait()
    if returning:
        own += returning.wait()
    return dq, *blocks.unpack(own, ring.index)


class _Blocks:
    """K and V of one peer in one flat buffer."""

    def __init__(self, k: Tensor, v: Tensor, counts: tuple[int, ...]) -> None:
        _, self.heads, self.k_dim = k.shape
        self.v_dim, self.counts, self.device = v.shape[-1], counts, k.device

    def size(self, source: int) -> int:
        return self.heads * self.counts[source % len(self.counts)] * (self.k_dim + self.v_dim)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def unpack(self, block: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """k (T, Hk, D) and v (T, Hk, Dv) as views."""
        tokens = self.counts[source]
        k_part, v_part = torch.split(block, [self.heads * tokens * d for d in (self.k_dim, self.v_dim)])
        return k_part.view(tokens, self.heads, self.k_dim), v_part.view(tokens, self.heads, self.v_dim)

    def buffers(self, dtype: torch.dtype) -> list[Tensor]:
        largest = max(self.size(source) for source in range(len(self.counts)))
        return [torch.empty(largest, dtype=dtype, device=self.device) for _ in range(2)]

    def fit(self, buffer: Tensor, source: int) -> Tensor:
        return buffer[: self.size(source)]


# -- heads change hands --------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadExchange:
    """The exchange among `inner` ranks of a group, seen from one of them.

    A message is a row for each token, in it the heads of all tensors; there is one message per peer, and the other
    ranks of the group take part with nothing to send.
    """

    comm: Comm
    inner: tuple[int, ...]  # group ranks
    index: int  # mine among them
    counts: tuple[int, ...]  # tokens of each
    split: HeadSplit
    order: Order  # the block's tokens: from inner rank after inner rank to token order

    def to_heads(self, tensors: Sequence[Tensor], spans: Sequence[HeadSpans]) -> list[Tensor]:
        """(my tokens, heads, dim) -> (block tokens, my heads, dim) for each tensor; spans[i][rank] are its heads."""
        widths = [_widths(tensors, of_peer) for of_peer in zip(*spans, strict=True)]
        tokens, mine = self.counts[self.index], widths[self.index]
        sizes = [tokens * sum(of_peer) for of_peer in widths]
        outgoing = tensors[0].new_empty(sum(sizes))
        messages = zip(torch.split(outgoing, sizes), zip(*spans, strict=True), widths, strict=True)
        for message, heads, width in messages:
            parts = [x[:, a:b].flatten(1) for x, (a, b) in zip(tensors, heads, strict=True)]
            torch.cat(parts, 1, out=message.view(tokens, sum(width)))
        arrived = self._exchange(outgoing, sizes, [count * sum(mine) for count in self.counts])
        rows = self.order.apply(arrived.view(sum(self.counts), sum(mine)))
        return [_by_head(part, x.shape[-1]) for part, x in zip(torch.split(rows, mine, 1), tensors, strict=True)]

    def to_tokens(
        self, tensors: Sequence[Tensor], spans: Sequence[HeadSpans], dtype: torch.dtype
    ) -> list[list[Tensor]]:
        """(block tokens, my heads, dim) -> for each tensor and inner rank its (my tokens, heads, dim).

        Travels as `dtype`.
        """
        widths = [_widths(tensors, of_peer) for of_peer in zip(*spans, strict=True)]
        rows = torch.cat([x.to(dtype).flatten(1) for x in tensors], 1)
        sizes = [count * rows.shape[1] for count in self.counts]
        tokens = self.counts[self.index]
        incoming = [tokens * sum(of_peer) for of_peer in widths]
        arrived = self._exchange(self.order.undo(rows).view(-1), sizes, incoming)
        results: list[list[Tensor]] = [[] for _ in tensors]
        for message, of_peer in zip(torch.split(arrived, incoming), widths, strict=True):
            parts = torch.split(message.view(tokens, sum(of_peer)), of_peer, 1)
            for found, part, x in zip(results, parts, tensors, strict=True):
                found.append(_by_head(part, x.shape[-1]))
        return results

    def _exchange(self, outgoing: Tensor, sizes: list[int], incoming: list[int]) -> Tensor:
        """One flat message to and from every inner rank."""
        if len(self.inner) == 1:
            return outgoing
        send, recv = [0] * self.comm.size, [0] * self.comm.size
        for peer, sent, received in zip(self.inner, sizes, incoming, strict=True):
            send[peer], recv[peer] = sent, received
        return all_to_all_v(outgoing, send, recv, self.comm).wait()


def _widths(tensors: Sequence[Tensor], heads: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers per token that one peer has of each tensor."""
    return [(stop - start) * x.shape[-1] for x, (start, stop) in zip(tensors, heads, strict=True)]


def _by_head(rows: Tensor, dim: int) -> Tensor:
    return rows.view(len(rows), rows.shape[1] // dim, dim)


def sum_heads(parts: Sequence[Tensor], spans: HeadSpans, total: Tensor) -> Tensor:
    """Add the heads of all inner ranks to `total`: heads that several ranks had add up, in its dtype."""
    for part, (start, stop) in zip(parts, spans, strict=True):
        total[:, start:stop] += part
    return total
