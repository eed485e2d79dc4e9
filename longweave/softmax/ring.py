"""Ring: K/V go round, queries stay.

    forward    step 0         step 1         step 2                 K/V move to the next rank while this
    rank 0     q0 × kv0       q0 × kv3       q0 × kv2   …           step computes; W − 1 hops
    rank 1     q1 × kv1       q1 × kv0       q1 × kv3   …

    backward   step 0         step 1         step 2                 K/V move to the previous rank, and the gradient
    rank 0     q0 × kv0       q0 × kv1 ─┐    q0 × kv2 ─┐            of a block follows it, one step behind: the rank
    rank 3     q3 × kv3       q3 × kv0  └▶   q3 × kv1  └▶ …         that computes it adds its part; W − 1 hops home

Gradients travel and add up in float32. A step without allowed pairs makes no kernel call. The two receive buffers take
turns; blocks may differ in size and may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longweave.comm.exchange import Pending, shift
from longweave.comm.groups import Comm
from longweave.kernels.attention import Kernel, zeros_like_sum
from longweave.kernels.merge import Partial
from longweave.kernels.tasks import Tasks


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
        return shift(x, into, self.peers[to], self.peers[source], self.comm)


def ring_forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tasks: Sequence[Tasks], ring: Ring) -> Partial:
    """q (H, T, D) on the K/V of all peers; tasks[source] are those on the tokens of that peer."""
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
    kernel: Kernel,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tasks: Sequence[Tasks],
    ring: Ring,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in float32 from the merged out and lse."""
    dq = zeros_like_sum(q)
    blocks = _Blocks(k, v, ring.counts)
    buffers = blocks.buffers(k.dtype) if ring.size > 1 else []
    block = blocks.pack(k, v)
    own = zeros_like_sum(block)
    grad, returning = own, None
    for step in range(ring.size):
        source = (ring.index + step) % ring.size
        arriving = None
        if step + 1 < ring.size:
            arriving = ring.pass_on(block, blocks.fit(buffers[step % 2], source + 1), -1)
        if step > 0:
            grad = zeros_like_sum(block)
        kernel.backward(
            (dq, *blocks.unpack(grad, source)), grad_out, q, *blocks.unpack(block, source), out, lse, tasks[source]
        )
        if step > 0:
            if returning:
                grad += returning.wait()
            returning = ring.pass_on(
                grad, torch.empty(blocks.size(source + 1), dtype=grad.dtype, device=grad.device), -1
            )
        if arriving:
            block = arriving.wait()
    if returning:
        own += returning.wait()
    return dq, *blocks.unpack(own, ring.index)


class _Blocks:
    """K and V of one peer in one flat buffer."""

    def __init__(self, k: Tensor, v: Tensor, counts: tuple[int, ...]) -> None:
        self.heads, _, self.k_dim = k.shape
        self.v_dim, self.counts, self.device = v.shape[-1], counts, k.device

    def size(self, source: int) -> int:
        return self.heads * self.counts[source % len(self.counts)] * (self.k_dim + self.v_dim)

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def unpack(self, block: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """k (Hk, T, D) and v (Hk, T, Dv) as views."""
        tokens = self.counts[source]
        k_part, v_part = torch.split(block, [self.heads * tokens * d for d in (self.k_dim, self.v_dim)])
        return k_part.view(self.heads, tokens, self.k_dim), v_part.view(self.heads, tokens, self.v_dim)

    def buffers(self, dtype: torch.dtype) -> list[Tensor]:
        largest = max(self.size(source) for source in range(len(self.counts)))
        return [torch.empty(largest, dtype=dtype, device=self.device) for _ in range(2)]

    def fit(self, buffer: Tensor, source: int) -> Tensor:
        return buffer[: self.size(source)]
