"""The dispatch solver behind `Layout.balanced`: which rank gets which chunk of which document.

No single way of dealing out documents is best for every pack, so a few are tried and the best by the cost model wins:

    contiguous   one run of tokens a rank       wins for short windows; causal work is badly balanced
    zigzag       every document over all ranks  wins for one long document; everybody needs all keys
    lpt          heaviest chunk to the rank     balances anything; scatters documents
                 with least work, then swaps
    mix          whole short documents, long    wins for packs; a few variants
                 ones peeled over few ranks

A candidate that keeps the caps on tokens and area goes before one that does not; then the modelled time decides, then
the tokens sent in total. Everything is a function of integers: all ranks find the same layout without talking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longweave.errors import InputError
from longweave.plan.cost import Cost, CostModel, cost
from longweave.plan.grid import Grid, auto_chunk_size, make_grid
from longweave.plan.layout import Layout, SpanTable
from longweave.plan.level import level
from longweave.plan.lpt import lpt, swap
from longweave.plan.mask import Mask
from longweave.plan.mixing import Mix, mix
from longweave.plan.ranges import Ints, check_world_size

MODEL = CostModel()
LPT_CHUNKS_PER_RANK = 8
# (ranks of a long document relative to the balanced number, how much denser than the pack a document must be to count
# as long). In order of promise: the search ends when a candidate comes close to what no layout can beat.
MIXES = ((1.0, 1.0), (1.0, 0.5), (0.95, 1.0), (1.0, 1.3), (0.9, 1.0))
CLOSE_ENOUGH = 1.02  # of the time that perfect balance and no traffic would take
LEVELED = 2  # mixes that are leveled, besides the first
OVER_CAP = 5.0  # each percent of area over the cap must buy this many percent of time


@dataclass(frozen=True)
class Limits:
    """What a layout must keep if it can."""

    area: float  # pairs on any rank
    tokens: int  # tokens on any rank
    node_size: int | None = None


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout with what it costs. Smaller keys are better."""

    name: str
    layout: Layout
    cost: Cost
    limits: Limits

    @property
    def seconds(self) -> float:
        return self.cost.seconds(MODEL)

    @property
    def price(self) -> float:
        """The modelled time, more if some rank has too much area: a little over the cap may buy a lot of time."""
        over = int(self.cost.area.max()) / self.limits.area - 1 if self.limits.area else 0.0
        return self.seconds * (1 + OVER_CAP * max(0.0, over))

    @property
    def key(self) -> tuple[bool, float, int]:
        return max(self.layout.counts) > self.limits.tokens, self.price, int(self.cost.sent.sum())


def solve(
    mask: Mask,
    world_size: int,
    chunk_size: object = "auto",
    imbalance: object = 0.03,
    token_slack: object = None,
    node_size: object = None,
) -> SpanTable:
    """Check the arguments of `Layout.balanced` and solve, or find the same problem solved before."""
    if not isinstance(mask, Mask):
        raise InputError(f"mask is a {type(mask).__name__}; give a Mask such as Mask.causal(cu_seqlens)")
    world = check_world_size(world_size)
    chunk = auto_chunk_size(mask.total, world) if chunk_size == "auto" else _whole("chunk_size", chunk_size, 1, '"auto"')
    slack = chunk if token_slack is None else _whole("token_slack", token_slack, 0, "None for one chunk")
    node = None if node_size is None else _whole("node_size", node_size, 1, "None if all ranks are alike")
    if isinstance(imbalance, bool) or not isinstance(imbalance, int | float) or not imbalance >= 0:
        raise InputError(f"imbalance is {imbalance!r}; give how far a rank may exceed the mean area, such as 0.03")
    return _solved(_Key(mask), world, chunk, float(imbalance), slack, node)


def _whole(name: str, value: object, least: int, other: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{name} is {value!r}; give an int of at least {least}, or {other}")
    return int(value)


class _Key:
    """A mask as a cache key: masks may be equal and still name other documents."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self._key = (mask.fingerprint, mask.cu_seqlens.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=64)
def _solved(key: _Key, world: int, chunk: int, imbalance: float, slack: int, node: int | None) -> SpanTable:
    best: Candidate | None = None
    for candidate in candidates(key.mask, world, chunk, imbalance, slack, node):
        if best is None or candidate.key < best.key:
            best = candidate
    assert best is not None
    return best.layout.table


def candidates(
    mask: Mask, world: int, chunk: int, imbalance: float, slack: int, node: int | None
) -> Iterator[Candidate]:
    """The portfolio. A member that provably loses against an earlier one is left out."""
    limits = Limits((1 + imbalance) * mask.area / world, -(-mask.total // world) + slack, node)
    best: Candidate | None = None

    def scored(name: str, layout: Layout) -> Candidate:
        nonlocal best
        found = Candidate(name, layout, cost(mask, layout, node), limits)
        if best is None or found.key < best.key:
            best = found
        return found

    def closed() -> bool:
        return best is not None and best.key < (False, CLOSE_ENOUGH * ideal)

    def leveled(found: Candidate, owner: Ints) -> Candidate:
        owner = level(grid, owner, found.cost, MODEL, limits.tokens, limits.area)
        return scored(f"{found.name}, leveled", grid.layout(owner))

    yield scored("contiguous", Layout.contiguous(mask.total, world))
    if world == 1 or not mask.area:
        return
    grid = make_grid(mask, world, chunk)
    ideal = mask.area / world * MODEL.seconds_per_pair
    mixed: list[tuple[float, int, Candidate, Ints]] = []
    for spread, denser in MIXES:
        owner = mix(grid, Mix(spread, denser, imbalance, slack, node))
        if any(np.array_equal(owner, other) for *_, other in mixed):
            continue
        found = scored(f"mix {spread} {denser}", grid.layout(owner))
        yield found
        # Leveling mends area, not traffic: those with least traffic deserve it most.
        mixed.append((found.cost.traffic_seconds(MODEL), len(mixed), found, owner))
        if len(mixed) == 1:
            yield leveled(found, owner)
        if closed():
            break
    else:
        for _, _, found, owner in sorted(mixed[1:])[:LEVELED]:
            yield leveled(found, owner)
    coarse = make_grid(mask, world, max(chunk, mask.total // (LPT_CHUNKS_PER_RANK * world) // chunk * chunk))
    owner = lpt(coarse, limits.tokens)
    yield scored("lpt", coarse.layout(owner))
    if not closed():
        yield scored("lpt, swapped", coarse.layout(swap(coarse, owner, limits.area)))
    if best.key >= (False, _zigzag_bound(grid)):
        yield scored("zigzag", Layout.zigzag(mask.cu_seqlens, world))


def _zigzag_bound(grid: Grid) -> float:
    """Seconds that zigzag takes at least: with thousands of documents it is slow to make, and sure to lose.

    A rank holds at most 2 · ceil(l / 2P) tokens of a document and needs at least as many keys as any of its queries
    sees, so the needs of all ranks add up to the document's area over that number; l of them are at home.
    """
    if len(grid.shared):
        return 0.0
    held = 2 * -(-grid.tokens // (2 * grid.world_size))
    received = np.maximum(0, grid.area / held - grid.tokens).sum() / grid.world_size
    return float(received) * MODEL.seconds_per_token
