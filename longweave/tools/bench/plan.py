"""How long planning takes, on the host, in milliseconds: the first time and when it is asked for again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np

from longweave.plan import Layout, Mask, make_plan, route


@dataclass(frozen=True)
class Row:
    what: str
    first_ms: float
    again_us: float
    target_ms: float


def run() -> list[Row]:
    return [
        _measure("zigzag layout + route, 1 Mi tokens, 1000 documents, 64 ranks", 1 << 20, 1000, _route, 50),
        _measure("balanced layout, 1 Mi tokens, 1000 documents, 128 ranks", 1 << 20, 1000, _balanced(128), 500),
        _measure("balanced layout, 256 Ki tokens, 94 documents, 32 ranks", 1 << 18, 94, _balanced(32), 100),
        _measure("group-cast plan of one rank, 256 Ki tokens, 94 documents, 32 ranks", 1 << 18, 94, _plan, 100),
    ]


def _route(cu: list[int]) -> object:
    return route(Layout.zigzag(cu, 64), Layout.contiguous(cu[-1], 64), 5)


def _balanced(world: int) -> Callable[[list[int]], object]:
    return lambda cu: Layout.balanced(Mask.causal(cu), world)


def _plan(cu: list[int]) -> object:
    from longweave.plan.cast import cast

    mask = Mask.causal(cu)
    plan = make_plan(mask, Layout.zigzag(cu, 32), "groupcast")
    return cast(mask, plan.layout.table, 5, plan.stages)


def _measure(what: str, total: int, documents: int, make: Callable[[list[int]], object], target_ms: float) -> Row:
    """Best of three packs; then the last one once more, best of five."""
    seeds = count(1)
    first = []
    cu: list[int] = []
    for _ in range(3):
        rng = np.random.default_rng(next(seeds))
        weights = rng.lognormal(0, 1.3, documents)
        cu = [0, *np.cumsum(rng.multinomial(total, weights / weights.sum())).tolist()]
        begin = time.perf_counter()
        make(cu)
        first.append(time.perf_counter() - begin)
    again = []
    for _ in range(5):
        begin = time.perf_counter()
        make(cu)
        again.append(time.perf_counter() - begin)
    return Row(what, 1e3 * min(first), 1e6 * min(again), target_ms)
