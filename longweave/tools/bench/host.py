"""What a batch costs the host: planning it, and calling layers on it.

Planning: nothing is kept from one batch to the next, so every batch pays it. Layer calls: tensors so small that the
arithmetic is nothing, so what is left is ours and gloo's: two local ranks with 128 tokens each, float32, one thread a
rank. Softmax layers have 8:2 heads, head dim 64; the gated delta rule has 4 heads with states of 128 × 128. All calls
go to one pack, as the layers of a model do.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import longweave as lw
from longweave.comm.ledger import Ledger, RecordedCall
from longweave.launch import Ranks
from longweave.plan import Layout, Mask, make_plan, route
from longweave.plan.chains import rank_chains
from longweave.plan.fragments import fragments, halo_route
from longweave.plan.tasks import GroupCast
from longweave.tools.bench import attention, linear, median_seconds

# -- planning ------------------------------------------------------------------------------------------

RANK = 5  # whose part is planned where it is the part of one rank


@dataclass(frozen=True)
class PlanningTime:
    what: str
    ms: float
    target_ms: float


def planning() -> list[PlanningTime]:
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


# -- layer calls -----------------------------------------------------------------------------------------

ONE, FEW = [0, 256], [0, 150, 180, 256]  # borders of one document, and of a few with one that two ranks must share

CASES: dict[str, tuple[list[int], str]] = {
    "ring": (ONE, "zigzag"),
    "groupcast": (FEW, "balanced"),
    "affine": (ONE, "zigzag"),
}


@dataclass(frozen=True)
class HostTime:
    """Milliseconds of one call on the slower rank."""

    name: str
    documents: int
    layout: str
    forward: float
    forward_and_backward: float


def layer(name: str) -> tuple[Callable[[], Tensor], list[Tensor], Tensor]:
    """On one of the ranks: a layer call, its leaves, and a gradient of its output."""
    borders, layout = CASES[name]
    lw.Pack(borders, layout=layout)  # on its first pack a group compares calls
    pack = lw.Pack(borders, layout=layout)
    if name == "affine":
        given = [x.requires_grad_() for x in linear.inputs(pack.tokens)]
        q, k, v, g, beta = given
        grad = torch.randn_like(v)
        return lambda: lw.gated_delta_rule(q, k, v, g, beta, pack, method="affine"), given, grad
    q, k, v, grad = attention.inputs(pack.tokens)
    return lambda: lw.attention(q, k, v, pack, strategy=name), [q, k, v], grad


def layer_times(name: str, rounds: int) -> tuple[float, float]:
    """On one of the ranks: seconds of forward, and of forward and backward."""
    call, leaves, grad = layer(name)
    forward = median_seconds(call, rounds)
    return forward, median_seconds(lambda: torch.autograd.grad(call(), leaves, grad), rounds)


def recorder_seconds(calls: int = 100_000) -> float:
    """What the flight recorder takes of one call: noting it, and that it has ended."""
    call = RecordedCall(Ledger(None), "attention of q, k, v")

    def record() -> None:
        with call.forward():
            pass

    return min(timeit.repeat(record, number=calls, repeat=5)) / calls


def layer_calls(rounds: int = 300) -> list[HostTime]:
    rows = []
    with Ranks(2, timeout=600) as ranks:
        for name, (borders, layout) in CASES.items():
            forward, both = (1e3 * max(each) for each in zip(*ranks.run(layer_times, name, rounds), strict=True))
            rows.append(HostTime(name, len(borders) - 1, layout, forward, both))
    return rows
