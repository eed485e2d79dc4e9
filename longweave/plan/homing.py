"""Where pooled documents run: with the ranks that brought them, or balanced over all of them.

    home       ├────── documents of rank 0 ──────┤├── of rank 1 ──┤├ of 2 ┤     as the ranks bring them
    balanced    0 0 0 0 0 0 1 1 1 2 2 2 2 2 0 0 0   1 1 1 1 1 1 1   2 2 2 2     equal work, few cuts

Documents stay at home or go whole to the rank with the least work, the large ones first. Only what fits nowhere is cut,
over as few ranks as have room for it, its home rank first. But for rounding, no rank gets more than the mean and
`SLACK` of it.

In models with linear layers a part can run only when the parts before it have been summed up: there the order of the
parts is the one that waits least (`_in_turn`, `_around`). Summing up is work, too, and how much is known only when
documents are divided. So a search begins with the mean that includes what the search before it came to, and of
`SEARCHES` the one is taken whose slowest rank has least to do; a rank may then have a few percent more than the mean.

A balanced layout is taken where the slowest rank saves more than moving tokens and K/V costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from longweave.plan.cost import Floats, Machine, cost
from longweave.plan.document_work import (
    Curve,
    DecoderWork,
    attention_masks,
    flops_of_ranks,
    is_causal_mask,
    pairs_of,
)
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, overlaps

LEAST_SAVED = 0.02  # of the time at home: a layout that saves less is not taken
SLACK = 0.02  # of the mean work: what whole documents may take a rank over it
CUT_SLACK = 0.01  # the same for parts of documents: it spares small parts, while more cuts bring balance closer
SEARCHES = 4  # where parts are summed up
GRAIN = 64  # tokens to which cuts are rounded, fewer in small batches
BEGIN_SHARE = 0.5  # of what a rank computes of a document that it begins and ends: the part at the beginning


def home_layout(counts: Sequence[int]) -> Layout:
    """The tokens of rank 0, then those of rank 1, …: `counts` of each."""
    stops = np.cumsum(np.asarray(counts, dtype=np.int64))
    total = int(stops[-1])
    return Layout(total, len(counts), stops - np.asarray(counts), stops, np.arange(len(counts)))


def faster_layout(mask: Mask, home: Layout, work: DecoderWork, machine: Machine) -> Layout:
    """The faster of `home` and a layout with equal work, by the slowest rank's modelled time. The mask is causal or
    full.
    """
    at_home = flops_of_ranks(mask, home, work) / machine.flops
    time_to_beat = float(at_home.max()) * (1 - LEAST_SAVED)
    if float(at_home.mean()) >= time_to_beat:
        return home
    balanced = balanced_layout(mask, home, work)
    return balanced if _seconds(mask, balanced, home, work, machine) < time_to_beat else home


def balanced_layout(mask: Mask, home: Layout, work: DecoderWork) -> Layout:
    """Equal work for every rank, with as few cuts and as few tokens away from home as a greedy search finds."""
    documents = _documents(mask, home, work)
    best = found = _search(documents, home, work, 0.0)
    for _ in range(SEARCHES - 1 if found.summing_up else 0):
        found = _search(documents, home, work, found.summing_up)
        best = min(best, found, key=lambda one: one.most)
    return best.layout


class _Found(NamedTuple):
    layout: Layout
    most: float  # work that a rank has
    summing_up: float  # that all ranks have besides their documents


def _search(documents: _BroughtDocuments, home: Layout, work: DecoderWork, summing_up: float) -> _Found:
    """A layout for ranks of which all together are thought to have `summing_up` besides their documents."""
    mean = (float(documents.amounts.sum()) + summing_up) / home.world_size
    room = np.full(home.world_size, mean)
    whole = _place_whole(documents, room, mean * SLACK)
    # The largest power of two in 1/GRAIN of a rank's tokens, from 1 to GRAIN.
    grain = max(1, min(GRAIN, 1 << (home.total // home.world_size // GRAIN).bit_length() >> 1))
    cut, summing_up = _place_cut(documents, whole, room, mean * CUT_SLACK, work, grain)
    fits = whole >= 0
    rows = np.stack([whole, documents.starts, documents.starts + documents.lengths], axis=1)[fits]
    rows = np.concatenate([rows, np.array(cut, dtype=np.int64).reshape(-1, 3)])
    ranks, starts, stops = rows[np.lexsort((rows[:, 1], rows[:, 0]))].T
    return _Found(Layout(home.total, home.world_size, starts, stops, ranks), mean - float(room.min()), summing_up)


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
    is_causal = is_causal_mask(mask)
    brought_by = np.searchsorted(np.cumsum(home.counts), starts, side="right")
    amounts = lengths * work.flops_per_token
    for window, flops, _ in work.attention:
        amounts = amounts + pairs_of(lengths.astype(np.float64), window, is_causal) * flops
    return _BroughtDocuments(starts, lengths, brought_by, amounts, is_causal)


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
) -> tuple[list[tuple[int, int, int]], float]:
    """Rank, start and stop of each part of the documents that fit nowhere, and the work of summing up parts.

    Takes both off the room.
    """
    fits = whole >= 0
    uncut = np.bincount(whole[fits], weights=documents.lengths[fits], minlength=len(room)).tolist()
    parts, summing_up = [], 0.0
    for document in documents.largest_first(np.flatnonzero(~fits)):
        begin, amount = int(documents.starts[document]), float(documents.amounts[document])
        curve = Curve(int(documents.lengths[document]), work, documents.is_causal)
        first, extra = int(documents.brought_by[document]), 0.0
        shares = _divide(amount, room, first, slack)
        order = _in_turn(shares, curve, uncut) if work.is_chained else shares
        if order is None:
            extra = work.flops_to_sum_up * curve.length / amount
            shares = _divide(amount, room, first, slack, extra)
            order = _around(shares)
        (begins, own), *rest = shares
        room[begins] -= own
        for rank, share in rest:
            room[rank] -= share * (1 + extra)
            summing_up += share * extra
        parts += [(rank, begin + a, begin + b) for rank, a, b in _spans(order, curve, grain)]
    return parts, summing_up


Shares = list[tuple[int, float]]  # of a document, in token order: rank and amount of work


def _divide(amount: float, room: Floats, first: int, slack: float, extra: float = 0.0) -> Shares:
    """Who takes how much of it: `first` if it has room, then the ranks with the most.

    All but the first of them have `extra` of their share to do on top. As few ranks as can take it with `slack` each;
    where all together cannot, as many as go least over their room. What is over it they share equally; where nothing
    is, the last one has room left. Without `extra` no part is less than half the slack.
    """
    order = np.argsort(-room, kind="stable")
    if room[first] > slack:
        order = np.append(first, order[order != first])
    of_work = np.full(len(room), 1 / (1 + extra))  # of what a rank does, the document's own
    of_work[0] = 1.0
    over = (amount - np.cumsum(room[order] * of_work)) / np.cumsum(of_work)
    count = int(np.argmax(over <= slack) if (over <= slack).any() else np.argmin(over)) + 1
    ranks = order[:count]
    shares = (room[ranks] + max(float(over[count - 1]), 0.0)) * of_work[:count]
    shares[-1] = amount - shares[:-1].sum()
    return list(zip(ranks.tolist(), shares.tolist(), strict=True))


# The orders in which linear layers can run the parts of a document:
#
#     a a a a b b b b     in turn: b waits for a in forward, and a for b in backward, while they have
#                         whole documents to run
#     a a b b b b a a     around: nobody waits, but b runs its part once more to sum it up, and so takes less of it


def _in_turn(shares: Shares, curve: Curve, uncut: Sequence[float]) -> Shares | None:
    """The order of one or two parts in turn that waits less, counted in tokens that they run forward; backward takes
    twice that. None if summing up takes less than the wait, or if there are more parts, each of which would wait.
    """
    if len(shares) != 2:
        return shares if len(shares) == 1 else None

    def wait(order: Shares) -> float:
        (a, of_a), (b, _) = order
        cut = curve.tokens_with(of_a)
        return max(0.0, cut - uncut[b]) + 2 * max(0.0, curve.length - cut - uncut[a])

    (_, amount), (_, other) = shares
    begin, end = (curve.tokens_with(done) for done in (amount * BEGIN_SHARE, amount * BEGIN_SHARE + other))
    found = min(shares, shares[::-1], key=wait)
    return found if wait(found) <= end - begin else None


def _around(shares: Shares) -> Shares:
    """The first rank begins and ends the document."""
    (first, amount), *rest = shares
    return [(first, amount * BEGIN_SHARE), *rest, (first, amount * (1 - BEGIN_SHARE))]


def _spans(shares: Shares, curve: Curve, grain: int) -> Iterator[tuple[int, int, int]]:
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


def _summed_up(mask: Mask, layout: Layout) -> Ints:
    """How many tokens of each rank lie in parts that neither begin nor end a document."""
    starts, stops, ranks = layout.sorted
    inside = ~np.isin(starts, mask.cu_seqlens) & ~np.isin(stops, mask.cu_seqlens)
    found = np.bincount(ranks[inside], weights=(stops - starts)[inside], minlength=layout.world_size)
    return found.astype(np.int64)


def _seconds(mask: Mask, layout: Layout, home: Layout, work: DecoderWork, machine: Machine) -> float:
    """Of a forward pass: the slowest rank's work, and the busiest one's way there and home.

    K/V of cut documents travels while pairs are computed. Backward has twice of both: K/V again, and its gradients.
    """
    tokens = np.array(layout.counts) * work.flops_per_token
    if work.flops_to_sum_up:
        tokens = tokens + _summed_up(mask, layout) * work.flops_to_sum_up
    layers = np.zeros(layout.world_size)
    for seen, attention in attention_masks(mask, work):
        found = cost(seen, layout)
        pairs = found.area * attention.flops_per_pair / machine.flops
        kv = np.maximum(found.sent, found.received) * attention.kv_bytes / machine.bytes_per_second
        layers += np.maximum(pairs, kv)
    stays = np.diagonal(_shared(layout, home))
    moved = np.maximum(np.array(layout.counts) - stays, np.array(home.counts) - stays)
    way = moved.max() * work.bytes_home / machine.bytes_per_second
    return float((tokens / machine.flops + layers).max() + way)
