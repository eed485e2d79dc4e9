"""Level an assignment with small steps: tokens first, then area, with as little new traffic as can be.

Tokens: a rank that holds too many gives a short document, or a chunk that sees few keys, to the emptiest one.
Area: two ranks that share a document trade a late chunk for an early one of the same length, so token counts stay:

    chunk      0 1 2 3 4 5 6 7 8 9                      0 1 2 3 4 5 6 7 8 9
    rank       a b b b a a b b a a     ── trade 8, 2 ─▶  a b a b a a b b b a      work goes from a to b

Under a causal mask a rank needs the keys up to its furthest query, so b receives more only where the late chunk lies
past its own last one, and a sends more only because more ranks read the early chunk. Neither may make a rank the
slowest one. For other masks this is an estimate, and the exact cost decides afterwards.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from longweave.plan.cost import Cost
from longweave.plan.dispatch.grid import Grid
from longweave.plan.ranges import Ints

ENOUGH = 1.005  # of the mean area: below this, leave the spans whole
PARTNERS = 4  # trades are sought with this many ranks, those with least area
TRIED = 1000  # trades of each search whose traffic is looked at, those that gain most
SHORT = 1 / 8  # of a rank's tokens: documents up to this length may move


class Leveler:
    """The state of one search: who owns each chunk, and what each rank holds, computes and moves."""

    def __init__(self, grid: Grid, owner: Ints, cost: Cost, pairs_per_token: float) -> None:
        self.grid, self.owner = grid, owner.copy()
        self.area = cost.area.copy()
        self.traffic = np.maximum(cost.sent, cost.received)
        self.pairs_per_token = pairs_per_token  # that take as long to compute as a token to receive
        self.slowest = int(self.traffic.max())  # no rank needs less traffic than this to be as fast as the slowest
        self.chunk_tokens, self.chunk_area = np.diff(grid.cuts), np.diff(grid.area_before)
        self.tokens = np.bincount(owner, weights=self.chunk_tokens, minlength=grid.world_size).astype(np.int64)
        self.document = grid.document_of_chunk

    # -- tokens ------------------------------------------------------------------------------------

    def level_tokens(self, least: int, most: int) -> None:
        """Bring every rank to `least … most` tokens, from the fullest to the emptiest, one small step at a time."""
        for _ in range(4 * self.grid.world_size):
            full, empty = int(self.tokens.argmax()), int(self.tokens.argmin())
            over, under = int(self.tokens[full]) - most, least - int(self.tokens[empty])
            if over <= 0 and under <= 0:
                return
            spare = min(most - int(self.tokens[empty]), int(self.tokens[full]) - least)
            found = self._short_document(full, max(over, under), spare)
            if found is None and over <= 0:
                return  # too few tokens cost nobody time: not worth cutting a document
            begin, end = found or self._lightest_chunk(full)
            tokens, area = int(self.chunk_tokens[begin:end].sum()), int(self.chunk_area[begin:end].sum())
            self.owner[begin:end] = empty
            self.tokens[[full, empty]] += (-tokens, tokens)
            self.area[[full, empty]] += (-area, area)

    def _short_document(self, full: int, wanted: int, most: int) -> tuple[int, int] | None:
        """A document that lies on rank `full` alone, of at most `most` tokens: the smallest that has the `wanted`
        tokens, or else the largest.
        """
        first, lengths = self.grid.first, self.grid.tokens
        found = np.unique(self.document[self.owner == full])
        found = found[lengths[found] <= min(most, SHORT * self.grid.tokens_mean)]
        found = found[[bool((self.owner[first[d] : first[d + 1]] == full).all()) for d in found.tolist()]]
        if not len(found):
            return None
        enough = found[lengths[found] >= wanted]
        best = int(enough[lengths[enough].argmin()] if len(enough) else found[lengths[found].argmax()])
        return int(first[best]), int(first[best + 1])

    def _lightest_chunk(self, full: int) -> tuple[int, int]:
        """The chunk with least area, so one that sees few keys."""
        mine = np.flatnonzero(self.owner == full)
        chunk = int(mine[self.chunk_area[mine].argmin()])
        return chunk, chunk + 1

    # -- area --------------------------------------------------------------------------------------

    def level_area(self, limit: float) -> None:
        """Lower the largest area while a rank that shares a document can trade; above `limit`, with any rank."""
        for _ in range(2 * self.grid.world_size):
            heavy = int(self.area.argmax())
            if self.area[heavy] <= ENOUGH * self.grid.area_mean:
                return
            lightest = np.argsort(self.area, kind="stable")
            sharing = np.isin(lightest, self._sharing(heavy))
            trade = self._best_trade(heavy, lightest[sharing][:PARTNERS])
            if trade is None and self.area[heavy] > limit:
                trade = self._best_trade(heavy, lightest[~sharing][:PARTNERS])
                trade = trade or self._best_trade(heavy, lightest[~sharing][PARTNERS : 3 * PARTNERS])
            if trade is None:
                return
            other = int(self.owner[trade.earlier])
            self.owner[[trade.later, trade.earlier]] = other, heavy
            self.area[[heavy, other]] += (-trade.moved, trade.moved)
            self.traffic[[heavy, other]] += (trade.heavy_traffic, trade.other_traffic)

    def _sharing(self, heavy: int) -> Ints:
        """The ranks that hold a part of some document of rank `heavy`."""
        touched = np.zeros(len(self.grid.first) - 1, dtype=bool)
        touched[self.document[self.owner == heavy]] = True
        return np.unique(self.owner[touched[self.document]])

    def _best_trade(self, heavy: int, partners: Ints) -> _Trade | None:
        """The trade after which the larger of the two areas is smallest, or None if none helps noticeably."""
        mine = np.flatnonzero(self.owner == heavy)
        theirs = np.flatnonzero(np.isin(self.owner, partners[partners != heavy]))
        if not len(theirs):
            return None
        moved = self.chunk_area[mine][:, None] - self.chunk_area[theirs][None]
        # The larger area falls by the smaller of `moved` and what would then be left of the gap.
        gain = np.minimum(moved, (self.area[heavy] - self.area[self.owner[theirs]])[None] - moved)
        gain[self.chunk_tokens[mine][:, None] != self.chunk_tokens[theirs][None]] = 0
        pairs = _largest(gain.ravel(), TRIED, 0.001 * self.grid.area_mean)
        if not len(pairs):
            return None
        mine, theirs = mine[pairs // len(theirs)], theirs[pairs % len(theirs)]
        moved, gain = moved.ravel()[pairs], gain.ravel()[pairs]
        heavy_traffic, other_traffic = self._added_traffic(heavy, mine, theirs)
        room = max(self.slowest, self.area[heavy] / self.pairs_per_token) - self.traffic
        fits = heavy_traffic <= max(room[heavy], 0)
        fits &= other_traffic <= np.maximum(room[self.owner[theirs]], 0)
        # Of two trades that gain alike, the one with less traffic.
        value = np.where(fits, gain - 0.05 * self.pairs_per_token * (heavy_traffic + other_traffic), 0)
        i = int(value.argmax())
        if value[i] <= 0:
            return None
        return _Trade(int(mine[i]), int(theirs[i]), int(moved[i]), int(heavy_traffic[i]), int(other_traffic[i]))

    def _added_traffic(self, heavy: int, mine: Ints, theirs: Ints) -> tuple[Ints, Ints]:
        """At most this many tokens more would each of the two ranks receive or send, for each pair of chunks."""
        grid, other = self.grid, self.owner[theirs]
        touched = np.unique(self.document[np.concatenate([mine, theirs])])
        near = np.concatenate([np.arange(grid.first[d], grid.first[d + 1]) for d in touched.tolist()])
        # The last chunk of each document on each rank; the chunk before the document where there is none.
        last = np.repeat(grid.first[touched][:, None] - 1, grid.world_size, axis=1)
        last[np.searchsorted(touched, self.document[near]), self.owner[near]] = near  # the last one written stays
        my_row, their_row = (np.searchsorted(touched, self.document[chunks]) for chunks in (mine, theirs))
        # A taker needs the keys before its new chunk as far as it does not need them yet. A giver with later queries
        # in the same document needs its chunk back, unless both are of one document.
        apart = my_row != their_row
        other_receives = np.maximum(0, mine - last[my_row, other]) + (apart & (last[their_row, other] > theirs))
        heavy_receives = np.maximum(0, theirs - last[their_row, heavy]) + (apart & (last[my_row, heavy] > mine))
        more_readers = (last[their_row] > theirs[:, None]).sum(1) - (last[my_row] > mine[:, None]).sum(1)
        size = grid.chunk_size
        return size * np.maximum(more_readers, heavy_receives), size * np.maximum(-more_readers, other_receives)


def _largest(values: Ints, count: int, least: float) -> Ints:
    """The places of about `count` largest values, none below `least`; the same on every machine."""
    if len(values) > count:
        least = max(least, float(np.partition(values, -count)[-count]))
    return np.flatnonzero(values >= least)[: 2 * count]


class _Trade(NamedTuple):
    later: int  # chunk given away by the rank with most area
    earlier: int  # chunk taken for it
    moved: int  # area
    heavy_traffic: int  # tokens more, at most
    other_traffic: int


def level(grid: Grid, owner: Ints, cost: Cost, pairs_per_token: float, token_limit: int, area_limit: float) -> Ints:
    """A new owner of every chunk: token counts nearer to equal, and a smaller largest area."""
    leveler = Leveler(grid, owner, cost, pairs_per_token)
    leveler.level_tokens(math.ceil(2 * grid.tokens_mean) - token_limit, token_limit)
    leveler.level_area(area_limit)
    return leveler.owner
