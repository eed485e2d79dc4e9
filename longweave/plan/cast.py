"""Group-cast: each rank receives exactly the K/V tokens that its queries may see and that it does not hold, each once.

    rank 2 needs     ├──────── of document A ────────┤      ├─ of B ─┤
    holds                        ├────┤                         ├────┤
    receives         ├── stage 0 ┤    ├─ stage 1 ────┤      ├───┤             from whoever holds them

What a rank receives is divided, in token order, into stages of equal size: the next one is on its way while this one is
computed. Sender and receiver work out the same table from the same integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longweave.plan import slices as sl
from longweave.plan.cost import Needs
from longweave.plan.layout import SpanTable
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, expand, frozen, overlaps
from longweave.plan.work import fuse, own_rows


@dataclass(frozen=True, eq=False)
class CastStage:
    """One rank's part of one all-to-all-v, and its work on what arrives.

    Tokens of a message stand in token order, messages in rank order; `order` takes what has arrived to token order, in
    which `rows` count keys.
    """

    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    send_index: Ints  # local tokens, in sending order; a token may go to several ranks
    order: Ints
    rows: Ints


@dataclass(frozen=True, eq=False)
class Cast:
    """One rank's whole schedule: its work on its own keys, then stage by stage on others'.

    A stage in which no rank sends anything is left out, on every rank: packs whose documents each lie on one rank have
    no stages at all.
    """

    own: Ints
    stages: tuple[CastStage, ...]


@dataclass(frozen=True, eq=False)
class _Needed:
    """Runs of tokens that ranks receive, sorted by (receiver, token), none of them across a stage."""

    receivers: Ints
    stages: Ints
    starts: Ints
    stops: Ints

    def pick(self, wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> _Needed:
        return _Needed(self.receivers[wanted], self.stages[wanted], self.starts[wanted], self.stops[wanted])


@lru_cache(maxsize=64)
def cast(mask: Mask, table: SpanTable, rank: int, stages: int) -> Cast:
    """The schedule of one rank."""
    needed = _needed(mask, table, stages)
    rows = own_rows(mask, table, rank)
    used = np.unique(needed.stages).tolist()
    return Cast(_work_on_own(rows, table, rank), tuple(_stage(needed, rows, table, rank, stage) for stage in used))


@lru_cache(maxsize=32)
def _needed(mask: Mask, table: SpanTable, stages: int) -> _Needed:
    starts, stops, ranks = table.sorted
    rows, span = sl.cut_q(mask.rows, starts, stops)
    needs = Needs(rows[:, sl.K0], rows[:, sl.K1], ranks[span], table.total, table.world_size)
    # On the axis on which the needs of all ranks lie end to end, take away what each rank holds itself.
    held = np.sort(starts + ranks * needs.stride)
    held_stops = np.sort(stops + ranks * needs.stride)
    gaps, gap_stops = np.append(0, held_stops), np.append(held, table.world_size * needs.stride)
    full = gap_stops > gaps
    gaps, gap_stops = gaps[full], gap_stops[full]
    need, gap = overlaps(needs.starts, needs.stops, gaps, gap_stops)
    left, right = np.maximum(needs.starts[need], gaps[gap]), np.minimum(needs.stops[need], gap_stops[gap])
    receivers = left // needs.stride
    # Cut where a stage ends: each rank's tokens, counted one after the other, in `stages` equal parts.
    counts = np.bincount(receivers, weights=right - left, minlength=table.world_size).astype(np.int64)
    first = np.cumsum(counts) - counts
    edges = (first[:, None] + counts[:, None] * np.arange(stages) // stages).reshape(-1)
    edge_stops = np.append(edges[1:], counts.sum())
    place = np.cumsum(right - left) - (right - left)
    cells = np.flatnonzero(edge_stops > edges)
    run, cell = overlaps(place, place + right - left, edges[cells], edge_stops[cells])
    begin = np.maximum(place[run], edges[cells][cell])
    end = np.minimum(place[run] + (right - left)[run], edge_stops[cells][cell])
    start = left[run] + begin - place[run] - receivers[run] * needs.stride
    return _Needed(receivers[run], cells[cell] % stages, start, start + end - begin)


def _stage(needed: _Needed, rows: tuple[Ints, Ints], table: SpanTable, rank: int, stage: int) -> CastStage:
    due = needed.pick(needed.stages == stage)
    mine = due.pick(due.receivers == rank)
    recv_splits, order = _receive(mine, table)
    send_splits, send_index = _send(due.pick(due.receivers != rank), table, rank)
    # Keys are counted in the received tokens, in token order.
    lengths = mine.stops - mine.starts
    place = np.cumsum(lengths) - lengths
    on_stage, key_run, origin = sl.cut_k(rows[0], mine.starts, mine.stops)
    moved = sl.move(on_stage, rows[1][origin], (place - mine.starts)[key_run])
    return CastStage(send_splits, recv_splits, frozen(send_index), frozen(order), frozen(fuse(moved)))


def _receive(mine: _Needed, table: SpanTable) -> tuple[tuple[int, ...], Ints]:
    starts, stops, ranks = table.sorted
    run, span = overlaps(mine.starts, mine.stops, starts, stops)
    begin, end = np.maximum(mine.starts[run], starts[span]), np.minimum(mine.stops[run], stops[span])
    owner, length = ranks[span], end - begin
    splits = np.bincount(owner, weights=length, minlength=table.world_size).astype(np.int64)
    arrival = np.argsort(owner, kind="stable")
    place = np.empty_like(length)
    place[arrival] = np.cumsum(length[arrival]) - length[arrival]
    return tuple(splits.tolist()), expand(place, place + length)


def _send(others: _Needed, table: SpanTable, rank: int) -> tuple[tuple[int, ...], Ints]:
    starts, stops, to_local = table.local_spans(rank)
    run, span = overlaps(others.starts, others.stops, starts, stops)
    begin, end = np.maximum(others.starts[run], starts[span]), np.minimum(others.stops[run], stops[span])
    receiver = others.receivers[run]
    splits = np.bincount(receiver, weights=end - begin, minlength=table.world_size).astype(np.int64)
    return tuple(splits.tolist()), expand(begin + to_local[span], end + to_local[span])


def _work_on_own(rows: tuple[Ints, Ints], table: SpanTable, rank: int) -> Ints:
    starts, stops, to_local = table.local_spans(rank)
    cut, span, origin = sl.cut_k(rows[0], starts, stops)
    return frozen(fuse(sl.move(cut, rows[1][origin], to_local[span])))
