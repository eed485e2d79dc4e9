"""Where pooled documents run: with the ranks that brought them, or levelled over all of them.

    home       ├────── documents of rank 0 ──────┤├── of rank 1 ──┤├ of 2 ┤     as the ranks bring them
    levelled    0 0 0 0 0 0 0 0 0 0 1 1 1 1 2 2 2   1 1 1 1 1 1 2   2 2 2 2     equal work, most tokens stay at home

Ranks of a layout are interchangeable: a levelled layout is the dispatch solver's, with its ranks named so that few
tokens move. It is taken where the slowest rank saves more than the way there and home costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longweave.plan.cost import Floats, Machine, Shape, areas
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, overlaps

WORTH = 0.02  # of the time at home that levelling must save


@dataclass(frozen=True)
class DecoderWork:
    """What a decoder costs per token and per query-key pair, forward."""

    flops_per_token: float
    flops_per_pair: float
    bytes_home: float  # of a token's hidden state


def home_layout(counts: Sequence[int]) -> Layout:
    """The tokens of rank 0, then those of rank 1, …: `counts` of each."""
    stops = np.cumsum(np.asarray(counts, dtype=np.int64))
    total = int(stops[-1])
    return Layout(total, len(counts), stops - np.asarray(counts), stops, np.arange(len(counts)))


def levelled(mask: Mask, home: Layout, work: DecoderWork, shape: Shape, machine: Machine) -> Layout:
    """The faster of `home` and a balanced layout, by the slowest rank's modelled time.

    Ranks that are nearly level at home have nothing to gain, and spare themselves the search.
    """
    compute = _compute(mask, home, work, machine)
    worth = float(compute.max()) * (1 - WORTH)
    if float(compute.mean()) >= worth:
        return home
    other = near(Layout.balanced(mask, home.world_size, shape=shape, machine=machine), home)
    return other if _seconds(mask, other, home, work, machine) < worth else home


def near(layout: Layout, home: Layout) -> Layout:
    """The same division of the tokens, with the ranks named so that many tokens lie where they lie in `home`.

    The largest meeting of a share and a rank first, and so on.
    """
    shared = _shared(layout, home)
    names = np.full(layout.world_size, -1)
    taken = np.zeros(layout.world_size, dtype=bool)
    rows, columns = np.nonzero(shared)
    for i in np.argsort(-shared[rows, columns], kind="stable"):
        share, rank = rows[i], columns[i]
        if names[share] < 0 and not taken[rank]:
            names[share], taken[rank] = rank, True
    names[names < 0] = np.flatnonzero(~taken)
    ranks = names[layout.ranks]
    order = np.argsort(ranks, kind="stable")
    return Layout(layout.total, layout.world_size, layout.starts[order], layout.stops[order], ranks[order])


def _shared(layout: Layout, home: Layout) -> Ints:
    """(P, P): how many tokens of each rank of `layout` lie on each rank of `home`."""
    starts, stops, ranks = layout.sorted
    home_starts, home_stops, home_ranks = home.sorted
    span, at = overlaps(starts, stops, home_starts, home_stops)
    tokens = np.minimum(stops[span], home_stops[at]) - np.maximum(starts[span], home_starts[at])
    world = layout.world_size
    flat = np.bincount(ranks[span] * world + home_ranks[at], weights=tokens, minlength=world * world)
    return flat.astype(np.int64).reshape(world, world)


def _compute(mask: Mask, layout: Layout, work: DecoderWork, machine: Machine) -> Floats:
    """Seconds of each rank's work in a forward pass."""
    flops = np.array(layout.counts) * work.flops_per_token + areas(mask, layout) * work.flops_per_pair
    seconds: Floats = flops / machine.flops
    return seconds


def _seconds(mask: Mask, layout: Layout, home: Layout, work: DecoderWork, machine: Machine) -> float:
    """Of a forward pass: the slowest rank's work, and the busiest one's way there and home."""
    stays = np.diagonal(_shared(layout, home))
    moved = np.maximum(np.array(layout.counts) - stays, np.array(home.counts) - stays)
    way = moved.max() * work.bytes_home / machine.bytes_per_second
    return float(_compute(mask, layout, work, machine).max() + way)
