"""Document-first dispatch: whole short documents, and long ones peeled over the ranks that have room for them.

A rank should hold an equal share of the tokens and an equal share of the area. A long document has more area per token
than the pack has on average, a short one less, so a rank gets a little of one long document and fills up with short
ones. Peeling a long document gives each of its ranks some chunks from the front and some from the back:

    chunk      0 1 2 3 4 5 6 7 8 9 …
    rank       0 0 1 2 2 2 2 1 1 0        front chunks see few keys, back chunks many

How many chunks in all sets the rank's tokens, how many of them from the back sets its area: both are met at once,
whatever the short documents have left open. Three steps:

1. reserve: each long document gets about k ranks, those with least traffic, and a share of it is set aside on each.
   A rank of it receives and sends nearly its length, however large k is, so k follows the balance:
   with r the area per token of a document, R of the pack and s of the short documents, a rank that mixes x tokens of
   the document with T - x short ones has the mean area if x = T (R - s) / (r - s); then k = length / x.
2. pack: every other document goes whole where most is left. What fits nowhere is peeled over several ranks.
3. peel: the long documents level what is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from longweave.plan.cost import Floats
from longweave.plan.dispatch.grid import Grid
from longweave.plan.ranges import Ints


@dataclass(frozen=True)
class PeelVariant:
    """One variant of the heuristic."""

    spread: float = 1.0  # ranks of a long document, relative to the balanced number k
    denser: float = 1.0  # a long document has this many times the area per token of the pack
    area_slack: float = 0.03
    token_slack: int = 0
    node_size: int | None = None


def peel(grid: Grid, variant: PeelVariant) -> Ints:
    """The owner of every chunk."""
    return _Peeling(grid, variant).solve()


@dataclass(eq=False)
class _Reserve:
    """A long document and the ranks that will share it."""

    document: int
    ranks: Ints
    tokens: Floats  # set aside on each of these ranks
    area: Floats


@dataclass(eq=False)
class _Peeling:
    grid: Grid
    variant: PeelVariant
    owner: Ints = field(init=False)
    tokens_left: Floats = field(init=False)  # per rank, until it holds its share
    area_left: Floats = field(init=False)
    load: Floats = field(init=False)  # tokens received so far, nearly those sent too

    def __post_init__(self) -> None:
        world = self.grid.world_size
        self.owner = np.full(len(self.grid.cuts) - 1, -1, dtype=np.int64)
        self.tokens_left = np.full(world, self.grid.tokens_mean)
        self.area_left = np.full(world, self.grid.area_mean)
        self.load = np.zeros(world)
        self.tokens_unit = max(1.0, self.grid.tokens_mean)  # a share of 0 must not divide
        self.area_unit = max(1.0, self.grid.area_mean)

    def solve(self) -> Ints:
        long = self._long_documents()
        reserves = self._reserve(long)
        short = np.ones(len(self.grid.tokens), dtype=bool)
        short[long] = False
        for document in self._pack(short):
            self._peel_over_room(document)
        self._peel_reserves(reserves)
        return self.owner

    # -- 1. reserve --------------------------------------------------------------------------------

    def _long_documents(self) -> Ints:
        """Documents that no single rank can take and that are denser than the pack, longest first.

        One that is longer than a rank but no denser than the pack is as good a filler as the short ones.
        """
        grid, variant = self.grid, self.variant
        long = grid.tokens > grid.tokens_mean + variant.token_slack
        long |= grid.area > grid.area_mean
        long &= grid.area * grid.tokens_mean > grid.area_mean * grid.tokens * variant.denser
        long[grid.shared] = True
        if grid.world_size == 1:
            long[:] = False
        found = np.flatnonzero(long)
        return found[np.argsort(-grid.tokens[found], kind="stable")]

    def _reserve(self, long: Ints) -> list[_Reserve]:
        """Set a share of each long document aside on its ranks. A rank can take one unit: x of some document."""
        grid = self.grid
        short_tokens = grid.total - int(grid.tokens[long].sum())
        short_density = (int(grid.area_before[-1]) - int(grid.area[long].sum())) / max(1, short_tokens)
        room = grid.area_mean - grid.tokens_mean * short_density
        units = np.ones(grid.world_size)
        reserves = []
        for document in long.tolist():
            tokens, area = int(grid.tokens[document]), int(grid.area[document])
            need = (area - tokens * short_density) / room * self.variant.spread if room > 0 else 0.0
            if document in grid.shared:
                ranks, part = np.arange(grid.world_size), np.full(grid.world_size, 1 / grid.world_size)
                units -= max(0.0, need) * part
            else:
                ranks, part = self._take_units(units, need)
            reserves.append(_Reserve(document, ranks, tokens * part, area * part))
            self.tokens_left[ranks] -= tokens * part
            self.area_left[ranks] -= area * part
            self.load[ranks] += tokens * (1 - part)
        return reserves

    def _take_units(self, units: Floats, need: float) -> tuple[Ints, Floats]:
        """The least loaded ranks with `need` units between them, and which part of it falls to each."""
        ranks: list[int] = []
        taken: list[float] = []
        left = need
        for rank in self._least_loaded(int(np.ceil(need))).tolist():
            # A last small rest costs another rank all the traffic of the document: rather overfill the others a little.
            if left <= min(0.04 * len(ranks), 0.4):
                break
            if units[rank] > 0.03:
                ranks.append(rank)
                taken.append(min(left, float(units[rank])))
                units[rank] -= taken[-1]
                left -= taken[-1]
        if not ranks:
            ranks, taken = self._least_loaded(1)[:1].tolist(), [1.0]
        part = np.array(taken) / sum(taken)
        return np.array(ranks), part

    def _least_loaded(self, count: int) -> Ints:
        """All ranks, those with least traffic first, then those with most area left.

        With nodes, all ranks of a node stand together, first the node that has `count` ranks (or all of its ranks) with
        least traffic: whoever takes ranks from the front then stays inside as few nodes as possible.
        """
        by_load = np.lexsort((-self.area_left, self.load))
        size = self.variant.node_size
        if size is None:
            return by_load
        members = [np.flatnonzero(by_load // size == node) for node in range(-(-self.grid.world_size // size))]
        wanted = min(max(count, 1), size)  # a document that is less dense than the short ones asks for none

        def standing(places: Ints) -> int:
            return int(places[wanted - 1]) if len(places) >= wanted else len(by_load)

        together: Ints = by_load[np.concatenate(sorted(members, key=standing))]
        return together

    # -- 2. pack -----------------------------------------------------------------------------------

    def _pack(self, short: npt.NDArray[np.bool_]) -> list[int]:
        """Place short documents whole, largest first; returns those that fit on no rank.

        Small neighbours travel together, which makes long spans and fewer things to place; a bundle that fits nowhere
        is halved.
        """
        grid, variant = self.grid, self.variant
        tokens_before, area_before = grid.cuts[grid.first], grid.area_before[grid.first]
        token_slack, area_slack = variant.token_slack, variant.area_slack * grid.area_mean
        unplaced: list[int] = []

        def entry(begin: int, end: int) -> tuple[float, int, int]:
            tokens = int(tokens_before[end] - tokens_before[begin]) / self.tokens_unit
            return -(tokens + int(area_before[end] - area_before[begin]) / self.area_unit), begin, end

        queue = [entry(begin, end) for begin, end in _bundles(grid, short)]
        heapify(queue)
        tokens_left, area_left = self.tokens_left, self.area_left
        while queue:
            weight, begin, end = heappop(queue)
            tokens, area = tokens_before[end] - tokens_before[begin], area_before[end] - area_before[begin]
            lean = area / self.area_unit / max(-weight, 1e-9)  # which of the two is scarcer for this one
            room = area_left * (lean / self.area_unit) + tokens_left * ((1 - lean) / self.tokens_unit)
            room[(tokens_left < tokens - token_slack) | (area_left < area - area_slack)] = -np.inf
            rank = int(room.argmax())
            if room[rank] > -np.inf:
                self._give(int(grid.first[begin]), int(grid.first[end]), rank)
            elif end - begin == 1:
                unplaced.append(begin)
            else:
                middle = (begin + end) // 2
                heappush(queue, entry(begin, middle))
                heappush(queue, entry(middle, end))
        return unplaced

    # -- 3. peel -----------------------------------------------------------------------------------

    def _peel_over_room(self, document: int) -> None:
        """Over the ranks with most room, as few as can take it."""
        tokens = int(self.grid.tokens[document])
        ranks = self._roomiest()
        room = np.maximum(self.tokens_left[ranks], 0)
        count = int(np.searchsorted(np.cumsum(room), tokens - self.variant.token_slack)) + 1
        ranks = ranks[:count]
        share = np.maximum(self.tokens_left[ranks], 0)
        area = np.maximum(self.area_left[ranks], 0)
        if share.sum() > tokens:  # the last one keeps some room
            left = share.sum() - tokens
            part = max(0.0, 1 - left / share[-1]) if share[-1] else 1.0
            share[-1] *= part
            area[-1] *= part
        self._peel(document, ranks, share, area)

    def _roomiest(self) -> Ints:
        """All ranks, those with most tokens left first; with nodes, the node with most tokens left first."""
        if self.variant.node_size is None:
            return np.argsort(-self.tokens_left, kind="stable")
        node = np.arange(self.grid.world_size) // self.variant.node_size
        room = np.bincount(node, weights=np.maximum(self.tokens_left, 0))
        return np.lexsort((-self.tokens_left, -room[node]))

    def _peel_reserves(self, reserves: list[_Reserve]) -> None:
        """Give back what was set aside, then let each document level its ranks. The longest comes last: it can most."""
        pending = np.zeros(self.grid.world_size)
        for reserve in reserves:
            pending[reserve.ranks] += 1
        for reserve in reversed(reserves):
            ranks = reserve.ranks
            tokens = np.maximum(0, reserve.tokens + self.tokens_left[ranks] / pending[ranks])
            area = np.maximum(0, reserve.area + self.area_left[ranks] / pending[ranks])
            self.tokens_left[ranks] += reserve.tokens
            self.area_left[ranks] += reserve.area
            pending[ranks] -= 1
            # The first ranks get the outermost chunks, whose holders receive most.
            order = np.argsort(self.load[ranks], kind="stable")
            self._peel(reserve.document, ranks[order], tokens[order], area[order])

    def _peel(self, document: int, ranks: Ints, tokens: Floats, area: Floats) -> None:
        """Give each rank about its tokens and area of the document, from both ends; the last takes what is left."""
        grid = self.grid
        begin, end = int(grid.first[document]), int(grid.first[document + 1])
        for i, rank in enumerate(ranks[:-1].tolist()):
            # What earlier ranks took too much or too little is shared by those that follow.
            tokens_over = int(grid.cuts[end] - grid.cuts[begin]) - tokens[i:].sum()
            area_over = int(grid.area_before[end] - grid.area_before[begin]) - area[i:].sum()
            later = len(ranks) - i
            front, back = self._ends(begin, end, tokens[i] + tokens_over / later, area[i] + area_over / later)
            self._give(begin, begin + front, rank)
            self._give(end - back, end, rank)
            begin, end = begin + front, end - back
        self._give(begin, end, int(ranks[-1]))

    def _ends(self, begin: int, end: int, tokens: float, area: float) -> tuple[int, int]:
        """How many chunks from the front and from the back of `begin … end` come closest."""
        grid = self.grid
        count = min(end - begin, max(0, round(tokens / grid.chunk_size)))
        if not count:
            return 0, 0
        front = np.arange(count, -1, -1)
        back = count - front

        def both(before: Ints) -> Ints:
            ends: Ints = before[begin + front] - before[begin] + before[end] - before[end - back]
            return ends

        miss = np.abs(both(grid.area_before) - area) / self.area_unit
        miss += np.abs(both(grid.cuts) - tokens) / self.tokens_unit
        # A single run needs fewer keys than two; where it serves as well, as under a sliding window, take it.
        best = 0 if miss[0] <= miss.min() + 0.002 else int(miss.argmin())
        return int(front[best]), int(back[best])

    def _give(self, begin: int, end: int, rank: int) -> None:
        grid = self.grid
        self.owner[begin:end] = rank
        self.tokens_left[rank] -= grid.cuts[end] - grid.cuts[begin]
        self.area_left[rank] -= grid.area_before[end] - grid.area_before[begin]


def _bundles(grid: Grid, short: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Short documents as (begin, end) runs, neighbours together up to an 8th of a rank's tokens."""
    limit = max(grid.chunk_size, grid.tokens_mean / 8)
    bundles: list[tuple[int, int]] = []
    tokens_before = grid.cuts[grid.first].tolist()
    room = 0.0
    for document, fits in enumerate(short.tolist()):
        if not fits:
            room = 0.0
            continue
        tokens = tokens_before[document + 1] - tokens_before[document]
        if tokens <= room:
            bundles[-1] = (bundles[-1][0], document + 1)
        else:
            bundles.append((document, document + 1))
            room = limit
        room -= tokens
    return bundles
