"""What a plan costs: bytes, seconds and why, from integers and a few figures of a machine.

The figures are defaults for a present-day training node; what matters is their ratio. Every estimate is the time of
one layer's forward pass on the slowest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from longweave.plan.cost import cost
from longweave.plan.heads import split_heads
from longweave.plan.layout import Layout, SpanTable
from longweave.plan.mask import Mask


@dataclass(frozen=True)
class Shape:
    """The attention layer that a plan is meant for; only costs depend on it."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_dim: int | None = None
    itemsize: int = 2

    @property
    def flops_per_pair(self) -> int:
        return 2 * self.heads * (self.head_dim + self.value_dim)

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def kv_bytes(self) -> int:
        """K and V of one token."""
        return self.kv_heads * (self.head_dim + self.value_dim) * self.itemsize

    @property
    def qo_bytes(self) -> int:
        """Q and the output of one token."""
        return self.heads * (self.head_dim + self.value_dim) * self.itemsize


@dataclass(frozen=True)
class Machine:
    """One rank's device and its link to the others."""

    flops: float = 500e12
    bytes_per_second: float = 45e9
    latency: float = 20e-6  # of one message


#: Ranks that are processes on one CPU host, a core each: slow arithmetic, so one stage of traffic hides easily.
CPU = Machine(flops=60e9, bytes_per_second=2e9, latency=100e-6)


@dataclass(frozen=True)
class Estimate:
    """The modelled forward time of one strategy. `compute` and `traffic` overlap; `alone` does not."""

    strategy: str
    compute: float
    traffic: float
    alone: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.traffic) + self.alone

    def __str__(self) -> str:
        return f"{self.strategy} {1e3 * self.seconds:.3g} ms"


def estimates(mask: Mask, table: SpanTable, shape: Shape, machine: Machine) -> list[Estimate]:
    """Strategies, fastest first; equal ones in the order groupcast, ring, allgather, ulysses.

    Group-cast is left out where nearly every key is needed everywhere: a ring then brings the same in two buffers.
    """
    ranks = table.world_size
    layout_cost = cost(mask, Layout(table))
    work = layout_cost.area * shape.flops_per_pair / machine.flops
    slowest, total = float(work.max(initial=0)), float(work.sum())
    tokens = max(table.counts)
    received = max(table.total - count for count in table.counts) * shape.kv_bytes
    gather = received / machine.bytes_per_second
    steps = ranks - 1
    # Group-cast: only what is needed; the first stage hides behind the rank's own keys.
    needed = int(max(layout_cost.sent.max(initial=0), layout_cost.received.max(initial=0))) * shape.kv_bytes
    cast = needed / machine.bytes_per_second
    groupcast = Estimate("groupcast", slowest, cast, stages_for(slowest, cast) * machine.latency)
    # Ring: the slowest rank holds up the circle, every hop costs a latency; the first transfer hides behind step 0.
    ring = Estimate("ring", slowest, gather, steps * machine.latency)
    # All-gather: one group of heads in four stands alone in front.
    allgather = Estimate("allgather", slowest, gather, gather / min(4, shape.kv_heads) + machine.latency)
    # Ulysses: whole documents, so the heads decide the balance; two exchanges that nothing hides.
    split = split_heads(shape.heads, shape.kv_heads, ranks)
    busiest = max(stop - start for start, stop in split.q)
    copies = sum(stop - start for start, stop in split.k) / shape.kv_heads
    moved = tokens * (shape.qo_bytes + shape.kv_bytes * copies) * steps / ranks
    ulysses = Estimate(
        "ulysses", total * busiest / shape.heads, 0.0, moved / machine.bytes_per_second + 2 * machine.latency
    )
    candidates = [ring, allgather, ulysses]
    if needed < 0.8 * received or not received:
        candidates.insert(0, groupcast)
    return sorted(candidates, key=lambda e: e.seconds)


def stages_for(compute: float, traffic: float) -> int:
    """Stages of a group-cast: traffic that hides behind the work on own keys needs one, more traffic more."""
    return 1 if traffic <= compute / 2 else 2 if traffic <= compute else 4
