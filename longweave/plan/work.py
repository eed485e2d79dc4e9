"""The work of a rank: mask ∩ (my spans × the spans of another), in local coordinates, in as few rows as possible.

global                          local: my tokens × the tokens of a source
      k  0   1   2   3             src 0 holds 0, 3
q  0     ◣   ·   ·   ·              0   3
   1     ■   ◣   ·   ·          0   ◣   ·         fuse     ◣ ·
   2     ■   ■   ◣   ·          3   ■   ◣       ───────▶   ■ ◣    one causal task
   3     ■   ■   ■   ◣
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from longweave.plan import slices as sl
from longweave.plan.layout import SpanTable
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, frozen
from longweave.plan.slices import HI, K0, K1, LO, Q0, Q1


@lru_cache(maxsize=256)
def work_by_source(mask: Mask, table: SpanTable, rank: int) -> tuple[Ints, ...]:
    """For each source rank the rows of `rank`'s queries on that source's keys, both in local coordinates; fused."""
    rows, q_shift = own_rows(mask, table, rank)
    starts, stops, ranks = table.sorted
    k_shift = table.local_starts[table.token_order] - starts
    rows, k_span, origin = sl.cut_k(rows, starts, stops)
    rows = sl.move(rows, q_shift[origin], k_shift[k_span])
    return tuple(frozen(fuse(rows[ranks[k_span] == source])) for source in range(table.world_size))


@lru_cache(maxsize=256)
def work_on_all(mask: Mask, table: SpanTable, rank: int) -> Ints:
    """The rows of `rank`'s queries, in local coordinates, on all keys, in token order; fused."""
    rows, q_shift = own_rows(mask, table, rank)
    return frozen(fuse(sl.move(rows, q_shift, 0)))


def own_rows(mask: Mask, table: SpanTable, rank: int) -> tuple[Ints, Ints]:
    """The rows of `rank`'s queries in global coordinates, and for each what takes its queries to local ones."""
    starts, stops, to_local = table.local_spans(rank)
    rows, span = sl.cut_q(mask.rows, starts, stops)
    return rows, to_local[span]


def fuse(rows: Ints) -> Ints:
    """The same pairs in fewer rows: neighbours become one where the joined row allows exactly their pairs."""
    while True:
        count = len(rows)
        rows = _join_neighbours(rows, (K0, Q1, Q0), side_by_side=True)
        rows = _join_neighbours(rows, (K0, Q0), side_by_side=False)
        if len(rows) == count:
            return rows


def _join_neighbours(rows: Ints, keys: tuple[int, ...], side_by_side: bool) -> Ints:
    """One pass over rows sorted so that what can be joined stands together."""
    if len(rows) < 2:
        return rows
    rows = rows[np.lexsort([rows[:, key] for key in keys])]
    first, second = rows[:-1], rows[1:]
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
    if side_by_side:
        touching = (first[:, Q0] == second[:, Q0]) & (first[:, Q1] == second[:, Q1]) & (first[:, K1] == second[:, K0])
        axis = (K0, K1)
    else:
        touching = first[:, Q1] == second[:, Q0]
        axis = (Q0, Q1)
    same = touching & _same_pairs(joined, first, axis) & _same_pairs(joined, second, axis)
    keep = np.ones(len(rows), dtype=bool)
    last = -1
    for i in np.flatnonzero(same).tolist():
        if i > last:  # a row joins one neighbour a pass
            rows[i], keep[i + 1], last = sl.tighten(joined[i : i + 1])[0][0], False, i + 1
    return rows[keep]


def _same_pairs(joined: Ints, part: Ints, axis: tuple[int, int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Does the joined row, inside the strip of the part, allow just the pairs of the part?"""
    strip = joined.copy()
    strip[:, axis] = part[:, axis]
    both = strip.copy()
    for column in (Q0, K0, LO):
        both[:, column] = np.maximum(strip[:, column], part[:, column])
    for column in (Q1, K1, HI):
        both[:, column] = np.minimum(strip[:, column], part[:, column])
    wanted = sl.area(part)
    result: np.ndarray[tuple[int], np.dtype[np.bool_]] = (sl.area(strip) == wanted) & (sl.area(both) == wanted)
    return result
