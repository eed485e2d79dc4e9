"""Where pooled documents run: with the ranks that brought them, or levelled over all of them.

    home       ├────── documents of rank 0 ──────┤├── of rank 1 ──┤├ of 2 ┤     as the ranks bring them
    levelled    0 0 0 0 0 0 1 1 1 2 2 2 2 2 0 0 0   1 1 1 1 1 1 1   2 2 2 2     equal work, few cuts

Documents stay at home or go whole to the rank with the least work, the large ones first. Only what fits nowhere is cut,
into one part for each rank that has room left, its home rank first. In models with linear layers a part can run only
when the parts before it have been summed up: there the order of the parts is the one that waits least (`_in_chain`).

A levelled layout is taken where the slowest rank saves more than the way there and home costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from longweave.plan import slices as sl
from longweave.plan.cost import Floats, Machine, areas
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, overlaps

WORTH = 0.02  # of the time at home that levelling must save; less work than this share of the mean is no part
GRAIN = 64  # tokens to which cuts are rounded, fewer in small batches
BEGINNING = 0.5  # of what the home rank computes of a document that it begins and ends


@dataclass(frozen=True)
class DecoderWork:
    """What a decoder costs per token and per query-key pair, forward."""

    flops_per_token: float
    flops_per_pair: float
    bytes_home: float  # of a token's hidden state
    is_chained: bool = False  # it has linear layers


def home_layout(counts: Sequence[int]) -> Layout:
    """The tokens of rank 0, then those of rank 1, …: `counts` of each."""
    stops = np.cumsum(np.asarray(counts, dtype=np.int64))
    total = int(stops[-1])
    return Layout(total, len(counts), stops - np.asarray(counts), stops, np.arange(len(counts)))


def levelled(mask: Mask, home: Layout, work: DecoderWork, machine: Machine) -> Layout:
    """The faster of `home` and a layout with equal work, by the slowest rank's modelled time. The mask is causal or
    full.
    """
    compute = _compute(mask, home, work, machine)
    worth = float(compute.max()) * (1 - WORTH)
    if float(compute.mean()) >= worth:
        return home
    other = level(mask, home, work)
    return other if _seconds(mask, other, home, work, machine) < worth else home


def level(mask: Mask, home: Layout, work: DecoderWork) -> Layout:
    """Equal work for every rank, with as few cuts and as few tokens away from home as a greedy search finds."""
    borders, lengths = mask.cu_seqlens, np.diff(mask.cu_seqlens)
    is_causal = _is_causal(mask)
    curves = [_Curve(length, work, is_causal) for length in lengths.tolist()]
    brought_by = np.searchsorted(np.cumsum(home.counts), borders[:-1], side="right").tolist()
    mean = sum(curve.whole for curve in curves) / home.world_size
    least = mean * WORTH
    # The largest power of two in 1/GRAIN of a rank's tokens, from 1 to GRAIN.
    grain = max(1, min(GRAIN, 1 << (home.total // home.world_size // GRAIN).bit_length() >> 1))
    room = [mean] * home.world_size
    uncut = [0] * home.world_size  # tokens
    parts: list[tuple[int, int, int]] = []  # rank, start, stop
    too_large = []
    for document in sorted(np.flatnonzero(lengths).tolist(), key=lambda d: -curves[d].whole):
        amount = curves[document].whole
        rank = brought_by[document]
        if amount > room[rank] + least:
            rank = max(range(home.world_size), key=room.__getitem__)
        if amount > room[rank] + least:
            too_large.append(document)
            continue
        room[rank] -= amount
        uncut[rank] += curves[document].length
        parts.append((rank, int(borders[document]), int(borders[document + 1])))
    for document in too_large:
        shares = _divide(curves[document].whole, room, brought_by[document], least)
        if work.is_chained:
            shares = _in_chain(shares, curves[document], uncut)
        begin = int(borders[document])
        parts += [(rank, begin + a, begin + b) for rank, a, b in _cut(shares, curves[document], grain)]
    rows = np.array(sorted(parts), dtype=np.int64).reshape(-1, 3)
    return Layout(home.total, home.world_size, rows[:, 1], rows[:, 2], rows[:, 0])


Shares = list[tuple[int, float]]  # of a document, in token order: rank and amount of work


def _divide(amount: float, room: list[float], first: int, least: float) -> Shares:
    """Who takes how much of it: `first`, then the ranks with the most room. Takes it off their room."""
    shares: Shares = []
    for rank in sorted(range(len(room)), key=lambda r: (r != first, -room[r])):
        if room[rank] <= least:
            continue
        taken = amount if amount - room[rank] <= least else room[rank]
        shares.append((rank, taken))
        room[rank] -= taken
        amount -= taken
        if amount <= 0:
            break
    else:
        rank = shares[-1][0] if shares else first
        room[rank] -= amount
        shares.append((rank, amount))
    return shares


def _in_chain(shares: Shares, curve: _Curve, uncut: Sequence[int]) -> Shares:
    """The order in which linear layers wait least, counted in tokens that they run forward; backward takes twice that.

    a a a a b b b b     b waits for a in forward, and a for b in backward, while they have whole documents to run
    a a b b b b a a     nobody waits, but b runs its part once more to sum it up
    """
    if len(shares) == 1:
        return shares
    (first, amount), *rest = shares
    around = [(first, amount * BEGINNING), *rest, (first, amount * (1 - BEGINNING))]
    if len(rest) > 1:
        return around

    def wait(order: Shares) -> float:
        (a, of_a), (b, _) = order
        cut = curve.at(of_a)
        return max(0.0, cut - uncut[b]) + 2 * max(0.0, curve.length - cut - uncut[a])

    begin, end = (curve.at(done) for done in (amount * BEGINNING, amount * BEGINNING + rest[0][1]))
    apart = min(shares, shares[::-1], key=wait)
    return apart if wait(apart) <= end - begin else around


def _cut(shares: Shares, curve: _Curve, grain: int) -> Iterator[tuple[int, int, int]]:
    """Rank, start and stop of each share."""
    done, start = 0.0, 0
    for rank, amount in shares[:-1]:
        done += amount
        stop = min(round(curve.at(done) / grain) * grain, curve.length)
        if stop > start:
            yield rank, start, stop
            start = stop
    if curve.length > start:
        yield shares[-1][0], start, curve.length


class _Curve:
    """The work of the first tokens of a document."""

    def __init__(self, length: int, work: DecoderWork, causal: bool) -> None:
        # linear · x + square · x²
        self.length = length
        self.square = work.flops_per_pair / 2 if causal else 0.0
        self.linear = work.flops_per_token + (self.square if causal else work.flops_per_pair * length)
        self.whole = self.linear * length + self.square * length * length

    def at(self, amount: float) -> float:
        """How many tokens have so much work."""
        if not self.square:
            return amount / self.linear
        half = self.linear / (2 * self.square)
        return sqrt(half * half + amount / self.square) - half


def _is_causal(mask: Mask) -> bool:
    return bool((mask.rows[:, sl.HI] == 0).any())


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
