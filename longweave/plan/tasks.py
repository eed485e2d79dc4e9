"""What a rank computes, and what it sends and receives for it: mask ∩ (my queries × keys), as *tasks*.

A task is a row of `plan.slices` in local coordinates: a piece of the mask that one kernel call computes. Neighbouring
tasks are fused where one task can say the same:

    global                          local: my tokens × the tokens of a source
          k  0   1   2   3             src 0 holds 0, 3
    q  0     ◣   ·   ·   ·              0   3
       1     ■   ◣   ·   ·          0   ◣   ·         fuse     ◣ ·
       2     ■   ■   ◣   ·          3   ■   ◣       ───────▶   ■ ◣    one causal task
       3     ■   ■   ■   ◣

    ring, Ulysses   `tasks_by_source`: keys counted in the tokens of each other rank
    all-gather      `tasks_on_all`: keys counted in the whole sequence
    group-cast      `GroupCast`: keys counted in what a stage brings

Group-cast: each rank receives exactly the K/V tokens that its queries may see and that it does not hold, each once.

    rank 2 needs     ├──────── of document A ────────┤      ├─ of B ─┤
    holds                        ├────┤                         ├────┤
    receives         ├── stage 0 ┤    ├─ stage 1 ────┤      ├───┤             from whoever holds them

What a rank receives is divided, in token order, into stages of equal size: the next one is on its way while this one is
computed. Sender and receiver work out the same table from the same integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from longweave.plan import slices as sl
from longweave.plan.cost import Needs
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, expand, frozen, overlaps
from longweave.plan.slices import HI, K0, K1, LO, Q0, Q1

Bools = npt.NDArray[np.bool_]


def own_tasks(mask: Mask, layout: Layout, rank: int) -> tuple[Ints, Ints]:
    """The tasks of `rank`'s queries in global coordinates, and for each what takes its queries to local ones."""
    starts, stops, to_local = layout.local_spans(rank)
    tasks, span = sl.cut_q(mask.rows, starts, stops)
    return tasks, to_local[span]


def tasks_by_source(mask: Mask, layout: Layout, rank: int) -> tuple[Ints, ...]:
    """For each source rank the tasks of `rank`'s queries on that source's keys, both in local coordinates; fused."""
    tasks, q_shift = own_tasks(mask, layout, rank)
    starts, stops, ranks = layout.sorted
    tasks, span, origin = sl.cut_k(tasks, starts, stops)
    k_shift = layout.local_starts[layout.token_order[span]] - starts[span]
    tasks, sources = _fuse(sl.move(tasks, q_shift[origin], k_shift), ranks[span])
    return _split(tasks, sources, layout.world_size)


def tasks_on_all(mask: Mask, layout: Layout, rank: int) -> Ints:
    """The tasks of `rank`'s queries, in local coordinates, on all keys, in token order; fused."""
    tasks, q_shift = own_tasks(mask, layout, rank)
    return frozen(fuse(sl.move(tasks, q_shift, 0)))


# -- group-cast ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CastStage:
    """One rank's part of one all-to-all-v, and its tasks on what arrives.

    Tokens of a message stand in token order, messages in rank order; `order` takes what has arrived to token order, in
    which `tasks` count keys.
    """

    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    send_index: Ints  # local tokens, in sending order; a token may go to several ranks
    order: Ints
    tasks: Ints


@dataclass(frozen=True, eq=False)
class CastSchedule:
    """One rank's whole schedule: its tasks on its own keys, then stage by stage on others'.

    A stage in which no rank sends anything is left out, on every rank: packs whose documents each lie on one rank have
    no stages at all.
    """

    own: Ints
    stages: tuple[CastStage, ...]


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of tokens that ranks receive, sorted by (receiver, token), none of them across a stage."""

    receivers: Ints
    stages: Ints
    starts: Ints
    stops: Ints

    @property
    def to_place(self) -> Ints:
        """What takes the tokens of each run to their place among all these tokens."""
        lengths = self.stops - self.starts
        places: Ints = np.cumsum(lengths) - lengths - self.starts
        return places

    def pick(self, wanted: Bools) -> _Runs:
        return _Runs(self.receivers[wanted], self.stages[wanted], self.starts[wanted], self.stops[wanted])


@dataclass(frozen=True, eq=False)
class GroupCast:
    """Who needs which tokens of whom, in `stages` exchanges: worked out once for all ranks, then asked rank by rank."""

    mask: Mask
    layout: Layout
    stages: int

    def of(self, rank: int) -> CastSchedule:
        """The schedule of one rank."""
        tasks, q_shift = own_tasks(self.mask, self.layout, rank)
        arriving = [due.pick(due.receivers == rank) for due in self._due]
        # Keys count in own tokens, then for each stage in the tokens that it brings, in token order.
        keys = [self.layout.local_spans(rank), *((run.starts, run.stops, run.to_place) for run in arriving)]
        parts = []
        for starts, stops, to_place in keys:
            cut, span, origin = sl.cut_k(tasks, starts, stops)
            parts.append(sl.move(cut, q_shift[origin], to_place[span]))
        own, *on_stages = fuse_each(parts)
        stages = zip(self._due, arriving, on_stages, strict=True)
        return CastSchedule(own, tuple(self._stage(due, mine, on_stage, rank) for due, mine, on_stage in stages))

    def stage_starts(self, rank: int) -> tuple[int, ...]:
        """The first token that each stage brings to a rank; where a stage brings none, that of the next one, or -1."""
        starts: list[int] = []
        for due in reversed(self._due):
            mine = due.starts[due.receivers == rank]
            starts.append(int(mine[0]) if len(mine) else starts[-1] if starts else -1)
        return tuple(reversed(starts))

    @cached_property
    def _due(self) -> tuple[_Runs, ...]:
        """What arrives anywhere in each stage that is needed."""
        runs = self._received
        return tuple(runs.pick(runs.stages == stage) for stage in np.unique(runs.stages).tolist())

    @cached_property
    def _received(self) -> _Runs:
        layout, stages = self.layout, self.stages
        starts, stops, ranks = layout.sorted
        tasks, span = sl.cut_q(self.mask.rows, starts, stops)
        needs = Needs(tasks[:, K0], tasks[:, K1], ranks[span], layout.total, layout.world_size)
        # On the axis on which the needs of all ranks lie end to end, take away what each rank holds itself.
        held = np.sort(starts + ranks * needs.stride)
        held_stops = np.sort(stops + ranks * needs.stride)
        gaps, gap_stops = np.append(0, held_stops), np.append(held, layout.world_size * needs.stride)
        full = gap_stops > gaps
        gaps, gap_stops = gaps[full], gap_stops[full]
        need, gap = overlaps(needs.starts, needs.stops, gaps, gap_stops)
        left, right = np.maximum(needs.starts[need], gaps[gap]), np.minimum(needs.stops[need], gap_stops[gap])
        receivers = left // needs.stride
        # Cut where a stage ends: each rank's tokens, counted one after the other, in `stages` equal parts.
        counts = np.bincount(receivers, weights=right - left, minlength=layout.world_size).astype(np.int64)
        first = np.cumsum(counts) - counts
        edges = (first[:, None] + counts[:, None] * np.arange(stages) // stages).reshape(-1)
        edge_stops = np.append(edges[1:], counts.sum())
        place = np.cumsum(right - left) - (right - left)
        cells = np.flatnonzero(edge_stops > edges)
        run, cell = overlaps(place, place + right - left, edges[cells], edge_stops[cells])
        begin = np.maximum(place[run], edges[cells][cell])
        end = np.minimum(place[run] + (right - left)[run], edge_stops[cells][cell])
        start = left[run] + begin - place[run] - receivers[run] * needs.stride
        return _Runs(receivers[run], cells[cell] % stages, start, start + end - begin)

    def _stage(self, due: _Runs, mine: _Runs, tasks: Ints, rank: int) -> CastStage:
        recv_splits, order = self._receive(mine)
        send_splits, send_index = self._send(due, rank)
        return CastStage(send_splits, recv_splits, frozen(send_index), frozen(order), tasks)

    def _receive(self, mine: _Runs) -> tuple[tuple[int, ...], Ints]:
        """Tokens from each rank, and what takes them from the order of arrival to token order."""
        starts, stops, ranks = self.layout.sorted
        run, span = overlaps(mine.starts, mine.stops, starts, stops)
        begin, end = np.maximum(mine.starts[run], starts[span]), np.minimum(mine.stops[run], stops[span])
        owner, length = ranks[span], end - begin
        splits = np.bincount(owner, weights=length, minlength=self.layout.world_size).astype(np.int64)
        arrival = np.argsort(owner, kind="stable")
        place = np.empty_like(length)
        place[arrival] = np.cumsum(length[arrival]) - length[arrival]
        return tuple(splits.tolist()), expand(place, place + length)

    def _send(self, due: _Runs, rank: int) -> tuple[tuple[int, ...], Ints]:
        """Tokens to each rank, and which of the local tokens. Nobody receives what he holds himself."""
        starts, stops, to_local = self.layout.local_spans(rank)
        run, span = overlaps(due.starts, due.stops, starts, stops)
        begin, end = np.maximum(due.starts[run], starts[span]), np.minimum(due.stops[run], stops[span])
        splits = np.bincount(due.receivers[run], weights=end - begin, minlength=self.layout.world_size)
        return tuple(splits.astype(np.int64).tolist()), expand(begin + to_local[span], end + to_local[span])


# -- fusing --------------------------------------------------------------------------------------------


def fuse(tasks: Ints) -> Ints:
    """The same pairs in fewer tasks: neighbours become one where the joined task allows exactly their pairs."""
    return _fuse(tasks, np.zeros(len(tasks), dtype=np.int64))[0]


def fuse_each(parts: Sequence[Ints]) -> tuple[Ints, ...]:
    """Several sets of tasks, each fused by itself, in one go."""
    groups = np.repeat(np.arange(len(parts)), [len(tasks) for tasks in parts])
    return _split(*_fuse(np.concatenate(parts), groups), len(parts))


def _fuse(tasks: Ints, groups: Ints) -> tuple[Ints, Ints]:
    """Only tasks of one group, such as a source, are joined. The result is sorted by group."""
    while True:
        count = len(tasks)
        tasks, groups = _join_neighbours(tasks, groups, (K0, Q1, Q0), side_by_side=True)
        tasks, groups = _join_neighbours(tasks, groups, (K0, Q0), side_by_side=False)
        if len(tasks) == count:
            return tasks, groups


def _join_neighbours(tasks: Ints, groups: Ints, keys: tuple[int, ...], side_by_side: bool) -> tuple[Ints, Ints]:
    """One pass over tasks sorted so that what can be joined stands together."""
    if len(tasks) < 2:
        return tasks, groups
    order = np.lexsort([*(tasks[:, key] for key in keys), groups])
    tasks, groups = tasks[order], groups[order]
    first, second = tasks[:-1], tasks[1:]
    touching = groups[:-1] == groups[1:]
    if side_by_side:
        touching &= (first[:, Q0] == second[:, Q0]) & (first[:, Q1] == second[:, Q1]) & (first[:, K1] == second[:, K0])
    else:
        touching &= first[:, Q1] == second[:, Q0]
    near = np.flatnonzero(touching)
    if not len(near):
        return tasks, groups
    first, second = first[near], second[near]
    joined = np.stack(
        [
            first[:, Q0],
            second[:, Q1],
            np.minimum(first[:, K0], second[:, K0]),
            np.maximum(first[:, K1], second[:, K1]),
            # The lower limit cuts on the left and at the bottom, the upper one on the right and at the top.
            first[:, LO] if side_by_side else second[:, LO],
            second[:, HI] if side_by_side else first[:, HI],
        ],
        axis=1,
    )
    axis = (K0, K1) if side_by_side else (Q0, Q1)
    same = _same_pairs(np.tile(joined, (2, 1)), np.concatenate([first, second]), axis).reshape(2, -1).all(0)
    near, joined = near[same], joined[same]
    # A task joins one neighbour a pass: of several that follow each other, every second.
    begins = np.flatnonzero(np.diff(near, prepend=-2) > 1)
    turn = np.arange(len(near)) - np.repeat(begins, np.diff(begins, append=len(near)))
    near, joined = near[turn % 2 == 0], joined[turn % 2 == 0]
    tasks[near] = sl.tighten(joined)[0]
    keep = np.ones(len(tasks), dtype=bool)
    keep[near + 1] = False
    return tasks[keep], groups[keep]


def _split(tasks: Ints, groups: Ints, count: int) -> tuple[Ints, ...]:
    """Tasks sorted by group, group by group."""
    return tuple(np.split(frozen(tasks), np.searchsorted(groups, np.arange(1, count))))


def _same_pairs(joined: Ints, part: Ints, axis: tuple[int, int]) -> Bools:
    """Does the joined task, inside the strip of the part, allow just the pairs of the part?"""
    strip, both = joined.copy(), np.empty_like(joined)
    strip[:, axis] = part[:, axis]
    for column, narrower in zip((Q0, Q1, K0, K1, LO, HI), (np.maximum, np.minimum) * 3, strict=True):
        both[:, column] = narrower(strip[:, column], part[:, column])
    wanted, of_strip, of_both = sl.area(np.concatenate([part, strip, both])).reshape(3, -1)
    result: Bools = (of_strip == wanted) & (of_both == wanted)
    return result
