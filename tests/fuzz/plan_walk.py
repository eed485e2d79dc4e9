"""A plan walked by hand, all ranks at once: every rank's tasks in global tokens, and every message of its schedule.

ring, Ulysses   tasks of a block on the keys of every block      K/V hop by hop, then heads there and back
all-gather      tasks on all keys                                every shard to every rank, heads by heads
group-cast      tasks on own keys, then on what a stage brings   stage by stage what its splits say
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from longweave import Plan
from longweave.plan.heads import split_heads
from longweave.plan.tasks import CastSchedule, GroupCast, tasks_by_source, tasks_on_all

TasksOnTokens = tuple[np.ndarray, np.ndarray, np.ndarray]


class PlanWalk:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._tasks: dict[int, list[TasksOnTokens]] = {}

    @cached_property
    def casts(self) -> list[CastSchedule]:
        plan = self.plan
        return [*map(GroupCast(plan.mask, plan.layout, plan.stages).of, range(plan.world_size))]

    def tasks(self, rank: int) -> list[TasksOnTokens]:
        """(tasks, global token of each of their queries, of each of their keys) of a rank, or of its block of ranks."""
        if rank not in self._tasks:
            self._tasks[rank] = self._find_tasks(rank)
        return self._tasks[rank]

    def _find_tasks(self, rank: int) -> list[TasksOnTokens]:
        plan, layout, size = self.plan, self.plan.layout, self.plan.ulysses_size
        own = layout.indices(rank)
        if plan.strategy == "allgather":
            return [(tasks_on_all(plan.mask, layout, rank), own, np.arange(layout.total))]
        if plan.strategy == "groupcast":
            cast = self.casts[rank]
            staged = [(stage.tasks, own, self._arriving(rank, number)) for number, stage in enumerate(cast.stages)]
            return [(cast.own, own, own), *staged]
        blocks = layout if size == 1 else layout.joined(size)
        by_source = enumerate(tasks_by_source(plan.mask, blocks, rank // size))
        return [(tasks, blocks.indices(rank // size), blocks.indices(source)) for source, tasks in by_source]

    def _arriving(self, rank: int, number: int) -> np.ndarray:
        """The tokens that a stage of a group-cast brings to a rank, in the order in which its tasks count them."""
        mail = []
        for peer, cast in enumerate(self.casts):
            stage = cast.stages[number]
            begin = sum(stage.send_splits[:rank])
            to_rank = stage.send_index[begin : begin + stage.send_splits[rank]]
            mail.append(self.plan.layout.indices(peer)[to_rank])
        return np.concatenate(mail)[self.casts[rank].stages[number].order]

    def bytes_received_and_sent(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every rank in one forward pass, message by message."""
        plan, shape, world = self.plan, self.plan.shape, self.plan.world_size
        value = shape.head_dim if shape.v_dim is None else shape.v_dim
        of_key = (shape.head_dim + value) * shape.itemsize
        moved = np.zeros((world, world), dtype=np.int64)  # from, to
        if plan.strategy == "groupcast":
            for rank, cast in enumerate(self.casts):
                for stage in cast.stages:
                    moved[rank] += np.array(stage.send_splits) * shape.kv_heads * of_key
        elif plan.strategy == "allgather":
            for first, last in plan.head_groups(backward=False):
                moved += np.array(plan.layout.counts)[:, None] * (last - first) * of_key
        else:
            self._pass_blocks(moved, of_key)
            self._exchange_heads(moved, of_key, shape.head_dim * shape.itemsize, value * shape.itemsize)
        np.fill_diagonal(moved, 0)
        return moved.sum(0), moved.sum(1)

    def _pass_blocks(self, moved: np.ndarray, of_key: int) -> None:
        """In each step a rank hands the K/V that it has on to the rank of the next block that has the same heads."""
        size, world, counts = self.plan.ulysses_size, self.plan.world_size, self.plan.layout.counts
        heads = split_heads(self.plan.shape.heads, self.plan.shape.kv_heads, size).k
        blocks = [sum(counts[first : first + size]) for first in range(0, world, size)]
        for rank in range(world):
            block, inner = divmod(rank, size)
            first, last = heads[inner]
            for step in range(len(blocks) - 1):
                moved[rank, (rank + size) % world] += blocks[block - step] * (last - first) * of_key

    def _exchange_heads(self, moved: np.ndarray, of_key: int, of_query: int, of_out: int) -> None:
        """Inside a block: q, k, v of my tokens for their heads, and then the output of my heads for their tokens."""
        size, counts = self.plan.ulysses_size, self.plan.layout.counts
        heads = split_heads(self.plan.shape.heads, self.plan.shape.kv_heads, size)
        for rank in range(self.plan.world_size):
            block, inner = divmod(rank, size)
            mine = heads.q[inner][1] - heads.q[inner][0]
            for peer in range(size):
                (q0, q1), (k0, k1) = heads.q[peer], heads.k[peer]
                to = block * size + peer
                moved[rank, to] += (
                    counts[rank] * ((q1 - q0) * of_query + (k1 - k0) * of_key) + counts[to] * mine * of_out
                )
