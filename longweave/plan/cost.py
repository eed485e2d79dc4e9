"""What a layout costs: work, traffic and modelled time of every rank, exact and in bulk, and what no layout can beat.

A rank must hold K/V of every token that one of its queries may see. What it does not own it receives, once:

    keys of one document     ├────────── needed by rank 2 ──────────┤
    owner                    0 0 0 0 1 1 1 1 2 2 2 2 2 1 1 1 1 0 0 0 0
                             received from 0, 1   own   received from 1, and two tokens from 0

Cut by a run of queries, a slice needs a run of keys, so the needs of a rank are a few sorted runs. Nothing is compared
rank by rank: the needs of all ranks lie end to end on one long axis (`Needs`), where one binary search per span gives
what a rank owns of its own needs, and a running sum over all ranks gives how often each token is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longweave.errors import InputError
from longweave.plan import slices as sl
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """Seconds of a forward pass: 64 query heads, 8 K/V heads of 128, bf16, at 500 TFLOP/s and 45 GB/s a rank.

    Only the ratio of the first two numbers matters to the solver: at 1389 pairs a token, receiving a token takes as
    long as 1389 query-key pairs. `within_node` is the cost of a token that stays inside a node, in tokens that do not.
    """

    seconds_per_pair: float = 4 * 64 * 128 / 500e12
    seconds_per_token: float = 2 * 8 * 128 * 2 / 45e9
    within_node: float = 0.125


class Cost(NamedTuple):
    """Per rank, in pairs and tokens; `*_across` counts only tokens from or to another node."""

    area: Ints
    sent: Ints
    received: Ints
    sent_across: Ints
    received_across: Ints

    def seconds(self, model: CostModel) -> float:
        """The modelled time: attention overlaps with traffic, and the slowest rank holds up the others."""
        return max(int(self.area.max()) * model.seconds_per_pair, self.traffic_seconds(model))

    def traffic_seconds(self, model: CostModel) -> float:
        """The same with nothing to compute. Without nodes every token goes across."""
        inside, across = model.within_node, 1 - model.within_node
        sent = inside * self.sent + across * self.sent_across
        received = inside * self.received + across * self.received_across
        return float(max(sent.max(), received.max())) * model.seconds_per_token

    @property
    def imbalance(self) -> float:
        """The largest area over the mean area; 1 for a mask without pairs."""
        total = int(self.area.sum())
        return float(self.area.max() * len(self.area) / total) if total else 1.0


def cost(mask: Mask, layout: Layout, node_size: int | None = None) -> Cost:
    """Area, tokens sent and tokens received of every rank. `node_size` ranks in a row form a node; None is one each."""
    rows, rank = _shares(mask, layout)
    starts, stops, ranks = layout.table.sorted
    world = layout.world_size
    area = _by_rank(sl.area(rows), rank, world)
    needs = Needs(rows[:, sl.K0], rows[:, sl.K1], rank, layout.total, world)
    read = needs.read_before(stops) - needs.read_before(starts)  # by any rank, by the owner itself too
    own = needs.of_rank(ranks, starts, stops)
    sent, received = _by_rank(read - own, ranks, world), needs.tokens - _by_rank(own, ranks, world)
    if node_size is None or node_size == 1:
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
    rows, rank = _shares(mask, layout)
    return _by_rank(sl.area(rows), rank, layout.world_size)


def traffic(mask: Mask, layout: Layout) -> tuple[Ints, Ints]:
    """K/V tokens that each rank sends and receives if every rank receives exactly what its queries may see, once."""
    result = cost(mask, layout)
    return result.sent, result.received


def _shares(mask: Mask, layout: Layout) -> tuple[Ints, Ints]:
    """The mask cut into what each rank computes: rows, and the rank of each."""
    if mask.total != layout.total:
        raise InputError(f"the mask has {mask.total} tokens and the layout {layout.total}; use the same pack for both")
    starts, stops, ranks = layout.table.sorted
    rows, span = sl.cut_q(mask.rows, starts, stops)
    return rows, ranks[span]


def _by_rank(counts: Ints, ranks: Ints, world: int) -> Ints:
    # The sums are made in float64, which is exact up to 2^53.
    return np.bincount(ranks, weights=counts, minlength=world).astype(np.int64)


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
