"""The dispatch solver behind `Layout.balanced`: which rank gets which chunk of which document.

No single way of dealing out documents is best for every pack, so a few are tried and the best by the cost model wins:

    contiguous   one run of tokens a rank       wins for short windows; causal work is badly balanced
    zigzag       every document over all ranks  wins for one long document; everybody needs all keys
    lpt          heaviest chunk to the rank     balances anything; scatters documents
                 with least work, then swaps
    peel         whole short documents, long    wins for packs; a few variants
                 ones peeled over few ranks

The modelled time decides, among candidates that keep the cap on tokens if there are any; area over its cap makes a
candidate dearer than its time. Next count the tokens sent in total and the number of spans. Everything is a function of
integers: all ranks find the same layout without talking.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longweave.errors import InputError
from longweave.plan.cost import Cost, Machine, Shape, check_machine, check_shape, cost
from longweave.plan.dispatch.grid import Grid, auto_chunk_size, make_grid
from longweave.plan.dispatch.leveling import level
from longweave.plan.dispatch.peel import PeelVariant, peel
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import MOST_TOKENS, Ints, check_int, check_number, check_world_size

LPT_CHUNKS_PER_RANK = 8
LPT_MOST_CHUNKS = 128  # a rank: with more, documents are so short that whole ones level by themselves
# (ranks of a long document relative to the balanced number, how much denser than the pack a document must be to count
# as long). In order of promise: the search ends when a candidate comes close to what no layout can beat.
PEELS = ((1.0, 1.0), (1.0, 0.5), (0.95, 1.0), (1.0, 1.3), (0.9, 1.0))
# Of the time that perfect balance and no traffic would take: below the first, candidates differ only in what they send;
# below the second, no further variants of a heuristic are tried.
AS_GOOD_AS_PERFECT = 1.005
CLOSE_ENOUGH = 1.02
LEVELED = 1  # peels that are leveled besides the first
OVER_CAP = 5.0  # each percent of area over the cap must buy this many percent of time


@dataclass(frozen=True)
class Limits:
    """What a layout must keep if it can."""

    area: float  # pairs on any rank
    tokens: int  # tokens on any rank
    seconds: float  # candidates that take no longer than this differ only in the tokens they send


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout with what it costs. Smaller keys are better."""

    name: str
    layout: Layout
    cost: Cost
    seconds: float  # the modelled time
    limits: Limits

    @property
    def price(self) -> float:
        """The modelled time, more if some rank has too much area, which may buy a lot of time, or too few tokens."""
        over = int(self.cost.area.max()) / self.limits.area - 1 if self.limits.area else 0.0
        mean = self.layout.total / self.layout.world_size
        under = (2 * mean - self.limits.tokens - min(self.layout.counts)) / mean if mean else 0.0
        return self.seconds * (1 + OVER_CAP * max(0.0, over)) * (1 + max(0.0, under))

    @property
    def key(self) -> tuple[bool, float, int, int]:
        over = max(self.layout.counts) > self.limits.tokens
        sent, spans = int(self.cost.sent_across.sum()), len(self.layout.starts)
        return over, max(self.price, self.limits.seconds), sent, spans


def solve(
    mask: Mask,
    world_size: int,
    chunk_size: object = "auto",
    imbalance: object = 0.03,
    token_slack: object = None,
    node_size: object = None,
    shape: Shape | None = None,
    machine: Machine | None = None,
) -> Layout:
    """Check the arguments of `Layout.balanced` and solve."""
    if not isinstance(mask, Mask):
        raise InputError(f"mask is a {type(mask).__name__}; give a Mask such as Mask.causal(cu_seqlens)")
    world = check_world_size(world_size)
    is_auto = isinstance(chunk_size, str) and chunk_size == "auto"
    chunk = auto_chunk_size(mask.total, world) if is_auto else _whole("chunk_size", chunk_size, 1, '"auto"')
    slack = chunk if token_slack is None else _whole("token_slack", token_slack, 0, "None for one chunk")
    node = None if node_size is None else _whole("node_size", node_size, 1, "None if all ranks are alike")
    excess = check_number("imbalance", imbalance, "give how far a rank may exceed the mean area, such as 0.03", 0)
    shape = None if shape is None else check_shape(shape)
    machine = None if machine is None else check_machine(machine)
    portfolio = Portfolio(mask, world, chunk, excess, slack, node, shape, machine)
    return min(portfolio.candidates(), key=lambda candidate: candidate.key).layout


def _whole(name: str, value: object, least: int, other: str) -> int:
    return check_int(name, value, f"give an int of at least {least}, or {other}", least, MOST_TOKENS)


class Portfolio:
    """The ways to deal out one pack."""

    def __init__(
        self,
        mask: Mask,
        world: int,
        chunk: int,
        imbalance: float = 0.03,
        slack: int = 0,
        node: int | None = None,
        shape: Shape | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.mask, self.world, self.chunk = mask, world, chunk
        self.imbalance, self.slack, self.node = imbalance, slack, node
        self.shape, self.machine = shape or Shape(), machine or Machine()
        self.seconds_per_pair = self.machine.seconds_per_pair(self.shape)
        self.seconds_per_token = self.machine.seconds_per_token(self.shape)
        perfect = mask.area / world * self.seconds_per_pair
        self.close = CLOSE_ENOUGH * perfect
        # With nodes, close enough is good enough, and what is sent between nodes decides.
        self.good = self.close if node else AS_GOOD_AS_PERFECT * perfect
        self.limits = Limits((1 + imbalance) * mask.area / world, -(-mask.total // world) + slack, self.good)
        self.best: Candidate | None = None

    def candidates(self) -> Iterator[Candidate]:
        """All members that may win. One that provably loses against an earlier one is left out."""
        yield self.scored("contiguous", Layout.contiguous(self.mask.total, self.world))
        if self.world == 1 or not self.mask.area:
            return
        grid = make_grid(self.mask, self.world, self.chunk)
        yield from self._peels(grid)
        if self.beats(self.good):
            return
        yield from self._lpt()
        if not self.beats(_zigzag_tokens(grid) * self.seconds_per_token):
            yield self.scored("zigzag", Layout.zigzag(self.mask.cu_seqlens, self.world))

    def scored(self, name: str, layout: Layout) -> Candidate:
        found = cost(self.mask, layout, self.node)
        candidate = Candidate(name, layout, found, found.seconds(self.shape, self.machine), self.limits)
        if self.best is None or candidate.key < self.best.key:
            self.best = candidate
        return candidate

    def beats(self, seconds: float) -> bool:
        """Does some candidate so far keep the caps and take no more time?"""
        return self.best is not None and self.best.key[:2] <= (False, seconds)

    def _peels(self, grid: Grid) -> Iterator[Candidate]:
        tried: list[tuple[Candidate, Ints]] = []
        # Keeping to nodes is worth a try, but a document that does not care may lie better without.
        for node, (spread, denser) in itertools.product(dict.fromkeys((self.node, None)), PEELS):
            owner = peel(grid, PeelVariant(spread, denser, self.imbalance, self.slack, node))
            if any(np.array_equal(owner, other) for _, other in tried):
                continue
            tried.append((self.scored(f"peel {spread} {denser}", grid.layout(owner)), owner))
            yield tried[-1][0]
            if len(tried) == 1:
                yield self._leveled(grid, *tried[0])
            if self.node is None and self.beats(self.close):
                return
        # Leveling mends area, not traffic: those with least traffic deserve it most.
        tried[1:] = sorted(tried[1:], key=lambda pair: pair[0].cost.traffic_seconds(self.shape, self.machine))
        for found, owner in tried[1 : 1 + LEVELED]:
            yield self._leveled(grid, found, owner)

    def _leveled(self, grid: Grid, found: Candidate, owner: Ints) -> Candidate:
        pairs_per_token = self.seconds_per_token / self.seconds_per_pair
        owner = level(grid, owner, found.cost, pairs_per_token, self.limits.tokens, self.limits.area)
        return self.scored(f"{found.name}, leveled", grid.layout(owner))

    def _lpt(self) -> Iterator[Candidate]:
        chunks = self.mask.total // (LPT_CHUNKS_PER_RANK * self.world) // self.chunk
        grid = make_grid(self.mask, self.world, self.chunk * max(1, chunks))
        if len(grid.cuts) > LPT_MOST_CHUNKS * self.world:
            return
        owner = lpt(grid, self.limits.tokens)
        yield self.scored("lpt", grid.layout(owner))
        if not self.beats(self.close):
            yield self.scored("lpt, swapped", grid.layout(swap(grid, owner, self.limits.area)))


def _zigzag_tokens(grid: Grid) -> float:
    """Tokens that some rank of a zigzag receives at least: with thousands of documents it is slow to make, and loses.

    A rank holds at most 2 · ceil(l / 2P) tokens of a document and needs at least as many keys as any of its queries
    sees, so the needs of all ranks add up to the document's area over that number; l of them are at home.
    """
    if len(grid.shared):
        return 0.0
    held = 2 * -(-grid.tokens // (2 * grid.world_size))
    return float(np.maximum(0, grid.area / held - grid.tokens).sum() / grid.world_size)


# -- longest processing time first ---------------------------------------------------------------------

# Balances anything and knows nothing of documents, so it scatters them. A swap of two chunks of equal length between
# two ranks then helps where a rank can leave a document, or no longer needs its end. The *reach* of a document on a
# rank is the end of its last chunk there: the keys that the rank needs of it, exactly under causal masks, about so
# under others; the exact cost decides afterwards.


def lpt(grid: Grid, token_limit: int) -> Ints:
    """The owner of every chunk: in order of falling area, the rank with least area that has room for its tokens."""
    tokens, area = np.diff(grid.cuts), np.diff(grid.area_before)
    owner = np.empty(len(tokens), dtype=np.int64)
    load, held = np.zeros(grid.world_size), np.zeros(grid.world_size, dtype=np.int64)
    for chunk in np.lexsort((-tokens, -area)).tolist():
        fits = held + tokens[chunk] <= token_limit
        rank = int(np.where(fits, load, np.inf).argmin()) if fits.any() else int(held.argmin())
        owner[chunk] = rank
        load[rank] += area[chunk]
        held[rank] += tokens[chunk]
    return owner


def swap(grid: Grid, owner: Ints, area_limit: float) -> Ints:
    """A new owner of every chunk: the rank that needs most keys swaps, as long as some swap lowers what is needed."""
    owner = owner.copy()
    tokens, area = np.diff(grid.cuts), np.diff(grid.area_before)
    document = grid.document_of_chunk
    end = grid.cuts[1:] - grid.cuts[grid.first[document]]  # keys that a chunk needs of its document
    load = np.bincount(owner, weights=area, minlength=grid.world_size)
    limit = max(area_limit, float(load.max()))
    open_ranks = np.ones(grid.world_size, dtype=bool)
    for _ in range(grid.world_size):
        reach, released = _reach(grid, owner, document, end)
        needed = np.where(open_ranks, reach.sum(0), -1)
        rank = int(needed.argmax())
        mine, theirs = np.flatnonzero(owner == rank), np.flatnonzero(owner != rank)
        if needed[rank] <= 0 or not len(theirs):
            break
        other = owner[theirs]
        taken = np.maximum(0, end[theirs] - reach[document[theirs], rank])
        given = np.maximum(0, end[mine][:, None] - reach[document[mine]][:, other])
        change = given - released[mine][:, None] + (taken - released[theirs])[None]
        moved = area[mine][:, None] - area[theirs][None]
        change[tokens[mine][:, None] != tokens[theirs][None]] = 0
        change[(load[rank] - moved > limit) | (load[other][None] + moved > limit)] = 0
        i, j = divmod(int(change.argmin()), len(theirs))
        if change[i, j] >= 0:
            open_ranks[rank] = False
            continue
        owner[[mine[i], theirs[j]]] = other[j], rank
        load[[rank, other[j]]] += (-moved[i, j], moved[i, j])
    return owner


def _reach(grid: Grid, owner: Ints, document: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The reach of every document on every rank, and by how much it would fall without each chunk."""
    reach = np.zeros((len(grid.first) - 1, grid.world_size), dtype=np.int64)
    reach[document, owner] = end  # chunks ascend, so the last one written stays
    order = np.lexsort((owner, document))  # stable: chunks of a document on a rank stand together, ascending
    same = np.zeros(len(order), dtype=bool)
    same[1:] = (document[order][1:] == document[order][:-1]) & (owner[order][1:] == owner[order][:-1])
    before = np.where(same, np.append(0, end[order][:-1]), 0)
    released = np.empty_like(end)
    released[order] = end[order] - before
    released[end < reach[document, owner]] = 0
    return reach, released
