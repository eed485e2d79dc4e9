"""How long planning a batch takes, on the host. Nothing is kept from one batch to the next, so every batch pays it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from longweave.plan import Layout, Mask, make_plan, route
from longweave.plan.chains import rank_chains
from longweave.plan.fragments import fragments, halo_route
from longweave.plan.tasks import GroupCast

RANK = 5  # whose part is planned where it is the part of one rank


@dataclass(frozen=True)
class PlanningTime:
    what: str
    ms: float
    target_ms: float


def run() -> list[PlanningTime]:
    many, few = (1 << 20, 1000), (1 << 18, 94)
    return [
        _measure("zigzag layout + route of one rank", many, 64, _route, 50),
        _measure("balanced layout", many, 128, _balanced, 500),
        _measure("balanced layout", few, 32, _balanced, 100),
        _measure("group-cast schedule of one rank, zigzag", few, 32, _schedule, 100),
        _measure("all of one rank of a hybrid model", few, 32, _hybrid, 200),
    ]


def _route(cu: list[int], world: int) -> object:
    return route(Layout.zigzag(cu, world), Layout.contiguous(cu[-1], world), RANK)


def _balanced(cu: list[int], world: int) -> object:
    return Layout.balanced(Mask.causal(cu), world)


def _schedule(cu: list[int], world: int) -> object:
    mask, layout = Mask.causal(cu), Layout.zigzag(cu, world)
    return GroupCast(mask, layout, make_plan(mask, layout, "groupcast").stages).of(RANK)


def _hybrid(cu: list[int], world: int) -> object:
    """What a pack derives on one rank: layout, plan, schedule, fragments, chains, and the halo of a convolution."""
    mask = Mask.causal(cu)
    layout = Layout.balanced(mask, world)
    plan = make_plan(mask, layout, "groupcast")
    schedule = GroupCast(mask, layout, plan.stages).of(RANK)
    cut = fragments(layout, cu)
    return plan.fingerprint, schedule, rank_chains(cut, RANK), halo_route(cut, RANK, 4)


def _measure(
    what: str,
    size: tuple[int, int],
    world: int,
    make: Callable[[list[int], int], object],
    target_ms: float,
) -> PlanningTime:
    """Best of three batches of that many tokens and documents."""
    tokens, documents = size
    took = []
    for seed in (1, 2, 3):
        rng = np.random.default_rng(seed)
        weights = rng.lognormal(0, 1.3, documents)
        cu = [0, *np.cumsum(rng.multinomial(tokens, weights / weights.sum())).tolist()]
        begin = time.perf_counter()
        make(cu, world)
        took.append(time.perf_counter() - begin)
    title = f"{what}: {tokens >> 10} Ki tokens, {documents} documents, {world} ranks"
    return PlanningTime(title, 1e3 * min(took), target_ms)
