"""Level an assignment with small steps: tokens first, then area, with as little new traffic as can be.

Tokens: a rank that holds too many gives a short document, or a chunk of a document that it shares, to one with room.
Area: two ranks that share a document trade a late chunk for an early one of the same length, so token counts stay:

    chunk      0 1 2 3 4 5 6 7 8 9                      0 1 2 3 4 5 6 7 8 9
    rank       a b b b a a b b a a     ── trade 8, 2 ─▶  a b a b a a b b b a      work goes from a to b

Under a causal mask a rank needs the keys up to its furthest query, so b receives more only where the late chunk lies
past its own last one, and a sends more only because more ranks read the early chunk. Neither may make a rank the
slowest one. For other masks this is an estimate, and the exact cost decides afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longweave.plan.cost import Cost, CostModel
from longweave.plan.grid import Grid
from longweave.plan.ranges import Ints

ENOUGH = 1.004  # of the mean area: below this, leave the spans whole
PARTNERS = 4  # trades are sought with this many ranks, those with least area
SHORT = 1 / 8  # of a rank's tokens: documents up to this length may move


class Leveler:
    """The state of one search: who owns each chunk, and what each rank holds, computes and moves."""

    def __init__(self, grid: Grid, owner: Ints, cost: Cost, model: CostModel) -> None:
        self.grid, self.owner = grid, owner.copy()
        self.area = cost.area.copy()
        self.traffic = np.maximum(cost.sent, cost.received)
        self.pairs_per_token = model.seconds_per_token / model.seconds_per_pair
        self.chunk_tokens, self.chunk_area = np.diff(grid.cuts), np.diff(grid.area_before)
        self.tokens = np.bincount(owner, weights=self.chunk_tokens, minlength=grid.world_size).astype(np.int64)
        self.document = grid.document_of_chunk

    # -- tokens ------------------------------------------------------------------------------------

    def level_tokens(self, limit: int) -> None:
        """Bring every rank to at most `limit` tokens, as far as there is something to give."""
        for _ in range(4 * self.grid.world_size):
            full = int(self.tokens.argmax())
            if self.tokens[full] <= limit:
                return
            given = self._short_document(full, limit) or self._shared_chunk(full, limit)
            if given is None:
                return
            begin, end, rank = given
            tokens, area = int(self.chunk_tokens[begin:end].sum()), int(self.chunk_area[begin:end].sum())
            self.owner[begin:end] = rank
            self.tokens[[full, rank]] += (-tokens, tokens)
            self.area[[full, rank]] += (-area, area)

    def _short_document(self, full: int, limit: int) -> tuple[int, int, int] | None:
        """A document of rank `full` alone and the emptiest rank: the smallest that is enough, or else the largest."""
        first = self.grid.first
        lengths = self.grid.tokens
        found = np.unique(self.document[self.owner == full])
        found = found[lengths[found] <= SHORT * self.grid.tokens_mean]
        # A short document lies on one rank or was peeled: whole if both ends are here and nothing between is not.
        found = found[[bool((self.owner[first[d] : first[d + 1]] == full).all()) for d in found.tolist()]]
        rank = int(self.tokens.argmin())
        found = found[lengths[found] <= limit - self.tokens[rank]]
        if not len(found):
            return None
        excess = self.tokens[full] - limit
        enough = found[lengths[found] >= excess]
        best = int(enough[lengths[enough].argmin()] if len(enough) else found[lengths[found].argmax()])
        return int(first[best]), int(first[best + 1]), rank

    def _shared_chunk(self, full: int, limit: int) -> tuple[int, int, int] | None:
        """The lightest chunk of a document that a rank with room holds a later chunk of."""
        mine = np.flatnonzero(self.owner == full)
        for chunk in mine[np.argsort(self.chunk_area[mine], kind="stable")].tolist():
            later = self.owner[chunk : self.grid.first[self.document[chunk] + 1]]
            later = later[self.tokens[later] + self.chunk_tokens[chunk] <= limit]
            if len(later):
                return chunk, chunk + 1, int(later[self.tokens[later].argmin()])
        return None

    # -- area --------------------------------------------------------------------------------------

    def level_area(self) -> None:
        """Lower the largest area while a trade can be found."""
        for _ in range(2 * self.grid.world_size):
            heavy = int(self.area.argmax())
            trade = self._best_trade(heavy) if self.area[heavy] > ENOUGH * self.grid.area_mean else None
            if trade is None:
                return
            other = int(self.owner[trade.earlier])
            self.owner[[trade.later, trade.earlier]] = other, heavy
            self.area[[heavy, other]] += (-trade.moved, trade.moved)
            self.traffic[[heavy, other]] += (trade.sent, trade.received)

    def _best_trade(self, heavy: int) -> _Trade | None:
        """The trade after which the larger of the two areas is smallest, or None if none helps noticeably."""
        grid = self.grid
        mine = np.flatnonzero(self.owner == heavy)
        touched = np.unique(self.document[mine])
        near = np.concatenate([np.arange(grid.first[d], grid.first[d + 1]) for d in touched.tolist()])
        rank, row = self.owner[near], np.searchsorted(touched, self.document[near])
        last = np.full((len(touched), grid.world_size), -1)  # chunk of each document on each rank
        last[row, rank] = near  # ascending, so the last one written stays
        partners = np.unique(rank)
        partners = partners[np.argsort(self.area[partners], kind="stable")][:PARTNERS]
        theirs = near[np.isin(rank, partners[partners != heavy])]
        if not len(theirs):
            return None
        my_row, their_row = (np.searchsorted(touched, self.document[chunks]) for chunks in (mine, theirs))
        other = self.owner[theirs]
        room = self.area[heavy] / self.pairs_per_token - self.traffic
        received = np.maximum(0, mine[:, None] - last[their_row, other][None]) * grid.chunk_size
        readers = [(last[at] > chunks[:, None]).sum(1) for at, chunks in ((my_row, mine), (their_row, theirs))]
        sent = np.maximum(0, readers[1][None] - readers[0][:, None]) * grid.chunk_size
        moved = self.chunk_area[mine][:, None] - self.chunk_area[theirs][None]
        fits = (my_row[:, None] == their_row[None]) & (moved > 0)
        fits &= self.chunk_tokens[mine][:, None] == self.chunk_tokens[theirs][None]
        fits &= (received <= np.maximum(room[other], 0)[None]) & (sent <= max(room[heavy], 0))
        # The larger area falls by the smaller of `moved` and what would then be left of the gap.
        gain = np.where(fits, np.minimum(moved, (self.area[heavy] - self.area[other])[None] - moved), -1)
        i, j = divmod(int(gain.argmax()), len(theirs))
        if gain[i, j] < 0.0005 * grid.area_mean:
            return None
        return _Trade(int(mine[i]), int(theirs[j]), int(moved[i, j]), int(sent[i, j]), int(received[i, j]))


class _Trade(NamedTuple):
    later: int  # chunk given away by the rank with most area
    earlier: int  # chunk taken for it
    moved: int  # area
    sent: int  # tokens more, by the rank with most area
    received: int  # tokens more, by the other


def level(grid: Grid, owner: Ints, cost: Cost, model: CostModel, token_limit: int) -> Ints:
    """A new owner of every chunk: fewer tokens where there were too many, and a smaller largest area."""
    leveler = Leveler(grid, owner, cost, model)
    leveler.level_tokens(token_limit)
    leveler.level_area()
    return leveler.owner
