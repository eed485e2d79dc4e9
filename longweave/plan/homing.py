"""Where pooled documents run: with the ranks that brought them, or balanced over all of them.

    home       ├────── documents of rank 0 ──────┤├── of rank 1 ──┤├ of 2 ┤     as the ranks bring them
    balanced    0 0 0 0 0 0 1 1 1 2 2 2 2 2 0 0 0   1 1 1 1 1 1 1   2 2 2 2     equal work, few cuts

Documents stay at home or go whole to the rank with the least work, the large ones first. Only what fits nowhere is cut,
over as few ranks as have room for it, its home rank first. But for rounding, no rank gets more than the mean and
`SLACK` of it. In models with linear layers a part can run only when the parts before it have been summed up: there the
order of the parts is the one that waits least (`_in_chain`), and what summing up costs is shared and comes on top.

A balanced layout is taken where the slowest rank saves more than moving tokens and K/V costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import sqrt

import numpy as np

from longweave.plan import slices as sl
from longweave.plan.cost import Floats, Machine, areas, cost
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, overlaps

GAIN = 0.02  # of the time at home: a layout that saves less is not taken
SLACK = 0.02  # of the mean work: what whole documents may take a rank over it
CUT_SLACK = 0.01  # the same for parts of documents: it spares small parts, while more cuts bring balance closer
GRAIN = 64  # tokens to which cuts are rounded, fewer in small batches
BEGIN_SHARE = 0.5  # of what a rank computes of a document that it begins and ends: the part at the beginning


@dataclass(frozen=True)
class DecoderWork:
    """What a decoder costs per token and per query-key pair, forward."""

    flops_per_token: float
    flops_per_pair: float
    bytes_home: float  # of a token's hidden state
    kv_bytes: float  # of a token's K and V in all attention layers
    is_chained: bool = False  # it has linear layers
    flops_to_sum_up: float = 0.0  # per token of a part that is summed up before it runs, on top


def home_layout(counts: Sequence[int]) -> Layout:
    """The tokens of rank 0, then those of rank 1, …: `counts` of each."""
    stops = np.cumsum(np.asarray(counts, dtype=np.int64))
    total = int(stops[-1])
    return Layout(total, len(counts), stops - np.asarray(counts), stops, np.arange(len(counts)))


def faster_layout(mask: Mask, home: Layout, work: DecoderWork, machine: Machine) -> Layout:
    """The faster of `home` and a layout with equal work, by the slowest rank's modelled time. The mask is causal or
    full.
    """
    tokens, pairs = _compute(home, areas(mask, home), work, machine)
    at_home = tokens + pairs
    time_to_beat = float(at_home.max()) * (1 - GAIN)
    if float(at_home.mean()) >= time_to_beat:
        return home
    balanced = balanced_layout(mask, home, work)
    return balanced if _seconds(mask, balanced, home, work, machine) < time_to_beat else home


def balanced_layout(mask: Mask, home: Layout, work: DecoderWork) -> Layout:
    """Equal work for every rank, with as few cuts and as few tokens away from home as a greedy search finds."""
    documents = _documents(mask, home, work)
    mean = float(documents.amounts.sum()) / home.world_size
    room = np.full(home.world_size, mean)
    whole = _place_whole(documents, room, mean * SLACK)
    # The largest power of two in 1/GRAIN of a rank's tokens, from 1 to GRAIN.
    grain = max(1, min(GRAIN, 1 << (home.total // home.world_size // GRAIN).bit_length() >> 1))
    cut = _place_cut(documents, whole, room, mean * CUT_SLACK, work, grain)
    fits = whole >= 0
    rows = np.stack([whole, documents.starts, documents.starts + documents.lengths], axis=1)[fits]
    rows = np.concatenate([rows, np.array(cut, dtype=np.int64).reshape(-1, 3)])
    ranks, starts, stops = rows[np.lexsort((rows[:, 1], rows[:, 0]))].T
    return Layout(home.total, home.world_size, starts, stops, ranks)


# -- documents and their work ------------------------------------------------------------------------


@dataclass(frozen=True)
class _BroughtDocuments:
    """Documents that have tokens, in token order."""

    starts: Ints
    lengths: Ints
    brought_by: Ints  # ranks
    amounts: Floats  # of work
    is_causal: bool

    def largest_first(self, which: Ints) -> list[int]:
        found: list[int] = which[np.argsort(-self.amounts[which], kind="stable")].tolist()
        return found


def _documents(mask: Mask, home: Layout, work: DecoderWork) -> _BroughtDocuments:
    borders = np.unique(mask.cu_seqlens)
    starts, lengths = borders[:-1], np.diff(borders)
    is_causal = bool((mask.rows[:, sl.HI] == 0).any())
    brought_by = np.searchsorted(np.cumsum(home.counts), starts, side="right")
    tokens = lengths.astype(np.float64)
    pairs = tokens * (tokens + 1) / 2 if is_causal else tokens * tokens
    amounts = tokens * work.flops_per_token + pairs * work.flops_per_pair
    return _BroughtDocuments(starts, lengths, brought_by, amounts, is_causal)


class _Curve:
    """The work of the first tokens of a document: linear · x + square · x²."""

    def __init__(self, length: int, work: DecoderWork, is_causal: bool) -> None:
        self.length = length
        self.square = work.flops_per_pair / 2 if is_causal else 0.0
        self.linear = work.flops_per_token + (self.square if is_causal else work.flops_per_pair * length)

    def tokens_with(self, amount: float) -> float:
        """How many first tokens have so much work."""
        if not self.square:
            return amount / self.linear
        half = self.linear / (2 * self.square)
        return sqrt(half * half + amount / self.square) - half


# -- who computes what -------------------------------------------------------------------------------


def _place_whole(documents: _BroughtDocuments, room: Floats, slack: float) -> Ints:
    """The rank of each document: its home rank, else the one with the most room, or -1 if it fits nowhere with `slack`.
    Takes it off the room.
    """
    left = room.tolist()
    # Room only shrinks: an entry is out of date if it promises more than there is, and is then corrected.
    most = sorted((-amount, rank) for rank, amount in enumerate(left))
    placed = np.full(len(documents.starts), -1)
    amounts, brought_by = documents.amounts.tolist(), documents.brought_by.tolist()
    for document in documents.largest_first(np.arange(len(amounts))):
        amount, rank = amounts[document], brought_by[document]
        if amount > left[rank] + slack:
            while -most[0][0] > left[most[0][1]]:
                heapreplace(most, (-left[most[0][1]], most[0][1]))
            rank = most[0][1]
        if amount <= left[rank] + slack:
            placed[document] = rank
            left[rank] -= amount
    room[:] = left
    return placed


def _place_cut(
    documents: _BroughtDocuments, whole: Ints, room: Floats, slack: float, work: DecoderWork, grain: int
) -> list[tuple[int, int, int]]:
    """Rank, start and stop of each part of the documents that fit nowhere. Takes them off the room."""
    fits = whole >= 0
    uncut = np.bincount(whole[fits], weights=documents.lengths[fits], minlength=len(room)).tolist()
    parts = []
    for document in documents.largest_first(np.flatnonzero(~fits)):
        begin = int(documents.starts[document])
        curve = _Curve(int(documents.lengths[document]), work, documents.is_causal)
        shares = _divide(float(documents.amounts[document]), room, int(documents.brought_by[document]), slack)
        if work.is_chained:
            given, shares = shares, _in_chain(shares, curve, uncut, work.flops_to_sum_up)
            if len(shares) > len(given):  # the first rank begins and ends it, and all have the summing up on top
                room[[rank for rank, _ in given]] -= shares[0][1] + shares[-1][1] - given[0][1]
        parts += [(rank, begin + a, begin + b) for rank, a, b in _spans(shares, curve, grain)]
    return parts


Shares = list[tuple[int, float]]  # of a document, in token order: rank and amount of work


def _divide(amount: float, room: Floats, first: int, slack: float) -> Shares:
    """Who takes how much of it: `first` if it has room, then the ranks with the most. Takes it off their room.

    As few ranks as can take it with `slack` each. What is over their room they share equally; where nothing is, the
    last one has room left. All room together is never less than the amount, so ranks without room are not needed, and
    no part is less than half the slack.
    """
    order = np.argsort(-room, kind="stable")
    if room[first] > slack:
        order = np.append(first, order[order != first])
    over = (amount - np.cumsum(room[order])) / np.arange(1, len(room) + 1)
    count = int(np.argmax(over <= slack)) + 1
    ranks = order[:count]
    shares = room[ranks] + max(float(over[count - 1]), 0.0)
    shares[-1] = amount - shares[:-1].sum()
    room[ranks] -= shares
    return list(zip(ranks.tolist(), shares.tolist(), strict=True))


def _in_chain(shares: Shares, curve: _Curve, uncut: Sequence[float], to_sum_up: float) -> Shares:
    """The order in which linear layers wait least, counted in tokens that they run forward; backward takes twice that.

    a a a a b b b b     b waits for a in forward, and a for b in backward, while they have whole documents to run
    a a b b b b a a     nobody waits, but b runs its part once more to sum it up, and so takes less of it
    """
    if len(shares) == 1:
        return shares
    (first, amount), *rest = _less_in_the_middle(shares, curve, to_sum_up)
    around = [(first, amount * BEGIN_SHARE), *rest, (first, amount * (1 - BEGIN_SHARE))]
    if len(rest) > 1:
        return around

    def wait(order: Shares) -> float:
        (a, of_a), (b, _) = order
        cut = curve.tokens_with(of_a)
        return max(0.0, cut - uncut[b]) + 2 * max(0.0, curve.length - cut - uncut[a])

    begin, end = (curve.tokens_with(done) for done in (amount * BEGIN_SHARE, amount * BEGIN_SHARE + rest[0][1]))
    apart = min(shares, shares[::-1], key=wait)
    return apart if wait(apart) <= end - begin else around


def _less_in_the_middle(shares: Shares, curve: _Curve, to_sum_up: float) -> Shares:
    """All but the first rank have `extra` of their share to do on top: what they all then do more is made equal.

    With x for that, the first takes its share and x, and another one s where s (1 + extra) = its share and x.
    """
    (first, amount), *rest = shares
    extra = to_sum_up * curve.length / sum(share for _, share in shares)
    x = sum(share for _, share in rest) * extra / (1 + extra + len(rest))
    return [(first, amount + x), *((rank, (share + x) / (1 + extra)) for rank, share in rest)]


def _spans(shares: Shares, curve: _Curve, grain: int) -> Iterator[tuple[int, int, int]]:
    """Rank, start and stop of each share."""
    done, start = 0.0, 0
    for rank, amount in shares[:-1]:
        done += amount
        stop = min(round(curve.tokens_with(done) / grain) * grain, curve.length)
        if stop > start:
            yield rank, start, stop
            start = stop
    if curve.length > start:
        yield shares[-1][0], start, curve.length


# -- modelled time -----------------------------------------------------------------------------------


def _shared(layout: Layout, home: Layout) -> Ints:
    """(P, P): how many tokens of each rank of `layout` lie on each rank of `home`."""
    starts, stops, ranks = layout.sorted
    home_starts, home_stops, home_ranks = home.sorted
    span, at = overlaps(starts, stops, home_starts, home_stops)
    tokens = np.minimum(stops[span], home_stops[at]) - np.maximum(starts[span], home_starts[at])
    world = layout.world_size
    flat = np.bincount(ranks[span] * world + home_ranks[at], weights=tokens, minlength=world * world)
    return flat.astype(np.int64).reshape(world, world)


def _compute(layout: Layout, area: Ints, work: DecoderWork, machine: Machine) -> tuple[Floats, Floats]:
    """Seconds of each rank's tokens, and of its query-key pairs, in a forward pass."""
    tokens: Floats = np.array(layout.counts) * work.flops_per_token / machine.flops
    pairs: Floats = area.astype(np.float64) * work.flops_per_pair / machine.flops
    return tokens, pairs


def _seconds(mask: Mask, layout: Layout, home: Layout, work: DecoderWork, machine: Machine) -> float:
    """Of a forward pass: the slowest rank's work, and the busiest one's way there and home.

    K/V of cut documents travels while pairs are computed. Backward has twice of both: K/V again, and its gradients.
    """
    found = cost(mask, layout)
    tokens, pairs = _compute(layout, found.area, work, machine)
    kv = np.maximum(found.sent, found.received) * work.kv_bytes / machine.bytes_per_second
    stays = np.diagonal(_shared(layout, home))
    moved = np.maximum(np.array(layout.counts) - stays, np.array(home.counts) - stays)
    way = moved.max() * work.bytes_home / machine.bytes_per_second
    return float((tokens + np.maximum(pairs, kv)).max() + way)
