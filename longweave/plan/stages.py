"""A plan as stages: what every rank computes in each, and what travels between ranks meanwhile. Forward pass.

    ring          step 0: own K/V │ step 1: the K/V of the rank before │ …          the next K/V travel meanwhile
    all-gather    heads 0, 1 travel │ compute them, 2, 3 travel │ …
    Ulysses       q, k, v to heads │ compute │ outputs back to tokens               with a ring over blocks in between
    group-cast    own keys, stage 0 travels │ keys of stage 0, stage 1 travels │ …
    affine chain  sum up what others wait for │ states travel, whole documents │ run the rest from its true state

Everything is read from the schedules that the strategies walk; over all stages it adds up to what `plan.report()` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longweave.plan import slices as sl
from longweave.plan.chains import rank_chains
from longweave.plan.cost import areas
from longweave.plan.fragments import Fragments, Role
from longweave.plan.heads import split_heads
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints
from longweave.plan.schedule import Plan, computed_areas, head_messages
from longweave.plan.tasks import GroupCast, own_tasks


@dataclass(frozen=True, eq=False)
class PlanStage:
    """One stage on all ranks. Messages arrive until the end of it: what they bring is computed in a later one."""

    name: str
    work: Ints  # of each rank: query-key pairs, in units of all heads, or tokens of a linear mixer
    messages: Ints  # (ranks, ranks): bytes from the rank of the row to the rank of the column

    @property
    def received(self) -> Ints:
        return np.asarray(self.messages.sum(axis=0), dtype=np.int64)

    @property
    def sent(self) -> Ints:
        return np.asarray(self.messages.sum(axis=1), dtype=np.int64)


def plan_stages(plan: Plan) -> tuple[PlanStage, ...]:
    """The stages of an attention layer."""
    if plan.strategy == "groupcast":
        return _group_cast(plan)
    return _all_gather(plan) if plan.strategy == "allgather" else _ring(plan)


def exchange_matrix(stages: Sequence[PlanStage]) -> Ints:
    """Bytes from every rank (rows) to every rank (columns), over all stages."""
    return np.asarray(sum(stage.messages for stage in stages), dtype=np.int64)


def areas_by_source(mask: Mask, layout: Layout) -> Ints:
    """(ranks, ranks): the pairs of the queries of the rank of the row with the keys of the rank of the column."""
    starts, stops, ranks = layout.sorted
    found = np.zeros((layout.world_size, layout.world_size), dtype=np.int64)
    for rank in range(layout.world_size):  # one by one: all tasks together can be millions
        tasks, span, _ = sl.cut_k(own_tasks(mask, layout, rank)[0], starts, stops)
        np.add.at(found[rank], ranks[span], sl.area(tasks))
    return found


def _ring(plan: Plan) -> tuple[PlanStage, ...]:
    layout, shape, size, world = plan.layout, plan.shape, plan.ulysses_size, plan.world_size
    split = split_heads(shape.heads, shape.kv_heads, size)
    blocks = layout if size == 1 else layout.joined(size)
    count = blocks.world_size
    by_source = areas_by_source(plan.mask, blocks)
    block, inner = np.divmod(np.arange(world), size)
    # The shares of a rank in the steps of its block: rounded so that they add up to what the report says.
    share = np.array(computed_areas(plan), dtype=np.float64) / np.maximum(by_source.sum(axis=1), 1)[block]
    steps = (block[:, None] - np.arange(count)) % count
    upto = np.rint(np.cumsum(by_source[block[:, None], steps], axis=1) * share[:, None]).astype(np.int64)
    work = np.diff(upto, axis=1, prepend=0)
    widths = np.array([stop - start for start, stop in split.k]) * (shape.kv_bytes // shape.kv_heads)
    found = []
    for step in range(count):
        messages = np.zeros((world, world), dtype=np.int64)
        if step + 1 < count:
            held = np.array(blocks.counts)[(block - step) % count]
            messages[np.arange(world), (np.arange(world) + size) % world] = held * widths[inner]
        name = f"step {step}, " + ("own K/V" if step == 0 else f"K/V of the rank {step * size} before")
        name = "compute" if count == 1 else name
        found.append(PlanStage(name, work[:, step], messages))
    if size == 1:
        return tuple(found)
    there, back = head_messages(plan)
    nothing = np.zeros(world, dtype=np.int64)
    return PlanStage("q, k, v to heads", nothing, there), *found, PlanStage("outputs to tokens", nothing, back)


def _all_gather(plan: Plan) -> tuple[PlanStage, ...]:
    shape, counts, work = plan.shape, np.array(plan.layout.counts), areas(plan.mask, plan.layout)
    groups = plan.head_groups(backward=False)
    everywhere = np.repeat(counts[:, None], plan.world_size, axis=1)
    np.fill_diagonal(everywhere, 0)
    found = []
    for arriving, computed in zip([*groups, None], [None, *groups], strict=True):
        width = 0 if arriving is None else arriving[1] - arriving[0]
        start, stop = computed or (0, 0)
        share = work * stop // shape.kv_heads - work * start // shape.kv_heads
        name = "gather" if computed is None else f"K/V heads {start} to {stop - 1}"
        found.append(PlanStage(name, share, everywhere * (width * (shape.kv_bytes // shape.kv_heads))))
    return tuple(found)


def _group_cast(plan: Plan) -> tuple[PlanStage, ...]:
    cast = GroupCast(plan.mask, plan.layout, plan.stages)
    schedules = [cast.of(rank) for rank in range(plan.world_size)]
    count = len(schedules[0].stages)
    found = []
    for stage in range(-1, count):
        tasks = [schedule.own if stage < 0 else schedule.stages[stage].tasks for schedule in schedules]
        work = np.array([int(sl.area(rows).sum()) for rows in tasks], dtype=np.int64)
        messages = np.zeros((plan.world_size, plan.world_size), dtype=np.int64)
        if stage + 1 < count:
            received = [schedule.stages[stage + 1].recv_splits for schedule in schedules]
            messages = np.array(received, dtype=np.int64).T * plan.shape.kv_bytes
        found.append(PlanStage("own keys" if stage < 0 else f"keys of stage {stage}", work, messages))
    return tuple(found)


def chain_stages(fragments: Fragments, state_bytes: int, transition_bytes: int) -> tuple[PlanStage, ...]:
    """The stages of a linear mixer with summaries of so many bytes, in tokens: those between others count twice."""
    world, lengths = fragments.world_size, fragments.stops - fragments.starts

    def tokens(*roles: Role) -> Ints:
        counted = np.where(np.isin(fragments.roles, roles), lengths, 0)
        return np.bincount(fragments.ranks, weights=counted, minlength=world).astype(np.int64)

    messages = np.zeros((world, world), dtype=np.int64)
    for rank in range(world):
        messages[:, rank] = rank_chains(fragments, rank).forward.splits(state_bytes, transition_bytes)[1]
    none = np.zeros_like(messages)
    return (
        PlanStage("sum up what others wait for", tokens(Role.HEAD, Role.MID), none),
        PlanStage("states travel, whole documents run", tokens(Role.WHOLE), messages),
        PlanStage("walk the chains, run the rest", tokens(Role.MID, Role.LAST), none),
    )
