"""The cost model: work, traffic and modelled time of every rank, from integers and a few figures of a machine.

A rank must hold K/V of every token that one of its queries may see. What it does not own it receives, once:

    keys of one document     ├────────── needed by rank 2 ──────────┤
    owner                    0 0 0 0 1 1 1 1 2 2 2 2 2 1 1 1 1 0 0 0 0
                             received from 0, 1   own   received from 1, and two tokens from 0

Cut by a run of queries, a slice needs a run of keys, so the needs of a rank are a few sorted runs. Nothing is compared
rank by rank: the needs of all ranks lie end to end on one long axis (`Needs`), where one binary search per span gives
what a rank owns of its own needs, and a running sum over all ranks gives how often each token is read.

Pairs and tokens are exact. A `Shape` and a `Machine` turn them into seconds of one layer's forward pass on the slowest
rank: to choose a layout (the dispatch solver) and to choose a strategy (`estimates`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longweave.errors import InputError, shown
from longweave.plan import slices as sl
from longweave.plan.heads import split_heads
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, check_int, check_number

MOST_SIZE = 1 << 20  # of heads and of their dims

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """The attention layer that costs are counted for; results never depend on it."""

    heads: int = 64
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
    """One rank's device and its link to the others. The figures are those of a present-day training node; what
    matters is their ratio.
    """

    flops: float = 500e12
    bytes_per_second: float = 45e9
    latency: float = 20e-6  # of one message
    within_node: float = 0.125  # cost of a token that stays inside a node, in tokens that do not

    def seconds_per_pair(self, shape: Shape) -> float:
        """Of computing one query-key pair, forward."""
        return shape.flops_per_pair / self.flops

    def seconds_per_token(self, shape: Shape) -> float:
        """Of receiving, or sending, K and V of one token. At the defaults as long as computing 1389 pairs."""
        return shape.kv_bytes / self.bytes_per_second


def check_shape(shape: object) -> Shape:
    if not isinstance(shape, Shape):
        raise InputError(f"shape is {shown(shape)}; give a longweave.plan.Shape, such as Shape(heads=32)")
    given = {name: value for name, value in vars(shape).items() if name != "v_dim" or value is not None}
    remedy = f"give a positive int, at most {MOST_SIZE}"
    shape = replace(shape, **{name: check_int(name, value, remedy, 1, MOST_SIZE) for name, value in given.items()})
    if shape.heads % shape.kv_heads:
        raise InputError(
            f"heads is {shape.heads} and kv_heads {shape.kv_heads}; query heads must be a multiple of K/V heads"
        )
    return shape


def check_machine(machine: object) -> Machine:
    if not isinstance(machine, Machine):
        raise InputError(f"machine is {shown(machine)}; give a longweave.plan.Machine, such as longweave.plan.CPU")
    for name, value in vars(machine).items():
        least = 1.0 if name in ("flops", "bytes_per_second") else 0.0
        check_number(f"machine.{name}", value, f"give a number from {least:g} to 1e30", least, 1e30)
    return machine


#: Ranks that are processes on one CPU host, a core each: slow arithmetic, so one stage of traffic hides easily.
CPU = Machine(flops=60e9, bytes_per_second=2e9, latency=100e-6)


class Cost(NamedTuple):
    """Per rank, in pairs and tokens; `*_across` counts only tokens from or to another node."""

    area: Ints
    sent: Ints
    received: Ints
    sent_across: Ints
    received_across: Ints

    def seconds(self, shape: Shape, machine: Machine) -> float:
        """The modelled time: attention overlaps with traffic, and the slowest rank holds up the others."""
        compute = int(self.area.max()) * machine.seconds_per_pair(shape)
        return max(compute, self.traffic_seconds(shape, machine))

    def traffic_seconds(self, shape: Shape, machine: Machine) -> float:
        """The same with nothing to compute. Without nodes every token goes across."""
        inside, across = machine.within_node, 1 - machine.within_node
        sent = inside * self.sent + across * self.sent_across
        received = inside * self.received + across * self.received_across
        return float(max(sent.max(), received.max())) * machine.seconds_per_token(shape)

    @property
    def imbalance(self) -> float:
        """The largest area over the mean area; 1 for a mask without pairs."""
        total = int(self.area.sum())
        return int(self.area.max()) * len(self.area) / total if total else 1.0


def cost(mask: Mask, layout: Layout, node_size: int | None = None) -> Cost:
    """Area, tokens sent and tokens received of every rank. `node_size` ranks in a row form a node; None is one each."""
    tasks, rank = _shares(mask, layout)
    starts, stops, ranks = layout.sorted
    world = layout.world_size
    area = _by_rank(sl.area(tasks), rank, world)
    needs = Needs(tasks[:, sl.K0], tasks[:, sl.K1], rank, layout.total, world)
    read = needs.read_before(stops) - needs.read_before(starts)  # by any rank, by the owner itself too
    own = needs.of_rank(ranks, starts, stops)
    sent, received = _by_rank(read - own, ranks, world), needs.tokens - _by_rank(own, ranks, world)
    node_size = 1 if node_size is None else min(node_size, world)
    if node_size == 1:
        return Cost(area, sent, received, sent, received)
    sent_across, received_across = sent.copy(), received.copy()
    for step in range(1, node_size):
        peers = ranks // node_size * node_size + (ranks + step) % node_size
        real = np.flatnonzero(peers < world)  # the last node may be smaller
        tokens = needs.of_rank(peers[real], starts[real], stops[real])
        sent_across -= _by_rank(tokens, ranks[real], world)
        received_across -= _by_rank(tokens, peers[real], world)
    return Cost(area, sent, received, sent_across, received_across)


def areas(mask: Mask, layout: Layout) -> Ints:
    """The query-key pairs that each rank computes: the pairs whose query it holds."""
    tasks, rank = _shares(mask, layout)
    return _by_rank(sl.area(tasks), rank, layout.world_size)


def traffic(mask: Mask, layout: Layout) -> tuple[Ints, Ints]:
    """K/V tokens that each rank sends and receives if every rank receives exactly what its queries may see, once."""
    result = cost(mask, layout)
    return result.sent, result.received


def _shares(mask: Mask, layout: Layout) -> tuple[Ints, Ints]:
    """The mask cut into what each rank computes: tasks, and the rank of each."""
    if mask.total != layout.total:
        raise InputError(f"the mask has {mask.total} tokens and the layout {layout.total}; use the same pack for both")
    starts, stops, ranks = layout.sorted
    tasks, span = sl.cut_q(mask.rows, starts, stops)
    return tasks, ranks[span]


def _by_rank(counts: Ints, ranks: Ints, world: int) -> Ints:
    if int(counts.sum()) < 1 << 53:  # the sums are made in float64, which is exact up to there
        return np.bincount(ranks, weights=counts, minlength=world).astype(np.int64)
    sums = np.zeros(world, dtype=np.int64)
    np.add.at(sums, ranks, counts)
    return sums


class Needs:
    """The keys that each rank needs, as sorted runs that neither overlap nor touch, rank after rank on one axis."""

    def __init__(self, starts: Ints, stops: Ints, ranks: Ints, total: int, world: int) -> None:
        self.stride = total + 1  # one more than the tokens, so that the needs of two ranks never touch
        left, right = starts + ranks * self.stride, stops + ranks * self.stride
        order = np.argsort(left, kind="stable")
        left, right = left[order], np.maximum.accumulate(right[order])
        begins = np.ones(len(left), dtype=bool)
        begins[1:] = left[1:] > right[:-1]
        firsts = np.flatnonzero(begins)
        self.starts = left[firsts]
        self.stops = right[np.append(firsts[1:], len(left)) - 1] if len(left) else right
        self.before = np.append(0, np.cumsum(self.stops - self.starts))
        owner = self.starts // self.stride
        self.tokens = _by_rank(self.stops - self.starts, owner, world)
        edges = (self.starts - owner * self.stride, self.stops - owner * self.stride)
        self._edges = tuple((np.sort(edge), np.append(0, np.cumsum(np.sort(edge)))) for edge in edges)

    def of_rank(self, ranks: Ints, starts: Ints, stops: Ints) -> Ints:
        """How many tokens of span i does `ranks[i]` need?"""
        shift = ranks * self.stride
        return self._up_to(stops + shift) - self._up_to(starts + shift)

    def _up_to(self, place: Ints) -> Ints:
        run = np.searchsorted(self.starts, place, side="right") - 1
        if not len(self.starts):
            return np.zeros_like(place)
        inside = np.minimum(place, self.stops[run]) - self.starts[run]
        return np.where(run < 0, 0, self.before[run] + inside)

    def read_before(self, token: Ints) -> Ints:
        """The number of (token, rank that needs it) pairs with a smaller token."""
        (starts, start_sums), (stops, stop_sums) = self._edges
        begun, ended = np.searchsorted(starts, token), np.searchsorted(stops, token)
        result: Ints = token * (begun - ended) - start_sums[begun] + stop_sums[ended]
        return result


# -- what no layout can beat ----------------------------------------------------------------------------


def load_bound(mask: Mask, world_size: int) -> int:
    """Some rank computes at least this many pairs."""
    return -(-mask.area // world_size)


def receive_bound(mask: Mask, world_size: int, tokens_per_rank: int | None = None) -> tuple[int, int]:
    """Tokens that some rank, and that all ranks together, must receive under a causal mask.

    Of at most T tokens a rank holds (`tokens_per_rank`, an equal share by default). Whoever holds the last token of a
    document needs the rest of it. A document over k = ceil(l / T) ranks is received least in total when it is dealt
    from its end in runs of T, since then the furthest query of each rank is as early as it can be.
    """
    lengths = np.diff(mask.cu_seqlens)
    share = tokens_per_rank or max(1, -(-mask.total // world_size))
    if not len(lengths):
        return 0, 0
    shared = lengths[lengths > share]
    pieces = -(-shared // share)
    # The ranks see l, l - T, l - 2T, … tokens of the document and hold l of them between them.
    seen = pieces * shared - share * (pieces * (pieces - 1) // 2)
    return max(0, int(lengths.max()) - share), int((seen - shared).sum())


# -- strategies ----------------------------------------------------------------------------------------


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


def estimates(found: Cost, layout: Layout, shape: Shape, machine: Machine) -> list[Estimate]:
    """Strategies for a layout that costs what was `found`, fastest first; equal ones in the order of `STRATEGIES`.

    Group-cast is left out where nearly every key is needed everywhere: a ring then brings the same in two buffers.
    """
    ranks, counts = layout.world_size, layout.counts
    work = found.area * float(shape.flops_per_pair) / machine.flops
    slowest, total = float(work.max()), float(work.sum())
    received = max(layout.total - count for count in counts) * shape.kv_bytes
    gather = received / machine.bytes_per_second
    steps = ranks - 1
    # Group-cast: only what is needed; the first stage hides behind the rank's own keys.
    needed = int(max(found.sent.max(), found.received.max())) * shape.kv_bytes
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
    moved = max(counts) * (shape.qo_bytes + shape.kv_bytes * copies) * steps / ranks
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
