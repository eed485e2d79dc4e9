"""Attention slices in bulk: bands inside rectangles, the atoms of a mask.

A row `(q0, q1, k0, k1, lo, hi)` allows the pairs with q0 <= q < q1, k0 <= k < k1 and lo <= k - q <= hi:

         k0      k1            k0      k1            k0      k1
      q0 ■ ■ ■ ■            q0 ■ · · ·            q0 ■ · · ·
         ■ ■ ■ ■               ■ ■ · ·               ■ ■ · ·
         ■ ■ ■ ■               ■ ■ ■ ·               · ■ ■ ·
      q1 ■ ■ ■ ■            q1 ■ ■ ■ ■            q1 · · ■ ■
         full                  causal: hi = 0        window of 2: lo = -1, hi = 0

Cutting a row by spans of queries or keys gives rows again, and so does moving it to other coordinates, so one form
serves global masks, the share of one rank and the tasks of a kernel.
"""

from __future__ import annotations

import numpy as np

from longweave.plan.ranges import Ints, overlaps

NO_LIMIT = 1 << 40  # larger than any token index, small enough that sums stay far from overflow
Q0, Q1, K0, K1, LO, HI = range(6)


def tighten(rows: Ints) -> tuple[Ints, Ints]:
    """Shrink every row to the box around its pairs; drop rows without pairs.

    Returns the rows and the index of the input row of each. A limit that no longer cuts its box becomes NO_LIMIT, so
    equal sets of pairs have equal rows.
    """
    q0, q1, k0, k1, lo, hi = rows.T
    # A query takes part if its keys q+lo … q+hi reach the box; then keys take part if some query reaches them.
    new_q0, new_q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    new_k0, new_k1 = np.maximum(k0, new_q0 + lo), np.minimum(k1, new_q1 + hi)
    kept = np.flatnonzero((lo <= hi) & (new_q0 < new_q1) & (new_k0 < new_k1))
    lo = np.where(lo <= new_k0 - (new_q1 - 1), -NO_LIMIT, lo)
    hi = np.where(hi >= new_k1 - 1 - new_q0, NO_LIMIT, hi)
    return np.stack([new_q0, new_q1, new_k0, new_k1, lo, hi], axis=1)[kept], kept


def area(rows: Ints) -> Ints:
    """The number of allowed pairs of each (tightened or not) row; exact."""
    q0, q1, k0, k1, lo, hi = rows.T
    # Limits beyond the box change nothing; without them the sums below cannot overflow.
    hi = np.clip(hi, k0 - q1, k1 - q0)
    lo = np.clip(lo, k0 - q1, k1 - q0 + 1)
    pairs = _pairs_up_to(q0, q1, k0, k1, hi) - _pairs_up_to(q0, q1, k0, k1, lo - 1)
    return np.where((q1 > q0) & (k1 > k0), np.maximum(pairs, 0), 0)


def _pairs_up_to(q0: Ints, q1: Ints, k0: Ints, k1: Ints, limit: Ints) -> Ints:
    """Pairs with k - q <= limit: the sum over q of clip(q + limit + 1 - k0, 0, k1 - k0)."""
    width = np.maximum(k1 - k0, 0)
    shift = limit + 1 - k0
    return _clipped_sum(q1 + shift, width) - _clipped_sum(q0 + shift, width)


def _clipped_sum(n: Ints, width: Ints) -> Ints:
    """The sum of clip(j, 0, width) over all j < n."""
    slope = np.clip(n, 0, width + 1)
    total: Ints = slope * (slope - 1) // 2 + width * np.maximum(n - width - 1, 0)
    return total


def cut_q(rows: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """The rows inside sorted, disjoint query spans, tightened, and the span index of each."""
    row, span = overlaps(rows[:, Q0], rows[:, Q1], starts, stops)
    cut = rows[row]
    cut[:, Q0] = np.maximum(cut[:, Q0], starts[span])
    cut[:, Q1] = np.minimum(cut[:, Q1], stops[span])
    cut, kept = tighten(cut)
    return cut, span[kept]


def cut_k(rows: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints, Ints]:
    """The rows inside sorted, disjoint key spans, tightened; the span index and the input row of each."""
    row, span = overlaps(rows[:, K0], rows[:, K1], starts, stops)
    cut = rows[row]
    cut[:, K0] = np.maximum(cut[:, K0], starts[span])
    cut[:, K1] = np.minimum(cut[:, K1], stops[span])
    cut, kept = tighten(cut)
    return cut, span[kept], row[kept]


def move(rows: Ints, q_shift: Ints | int, k_shift: Ints | int) -> Ints:
    """The same pairs in coordinates where queries and keys are moved by the given amounts."""
    moved = rows.copy()
    moved[:, Q0] += q_shift
    moved[:, Q1] += q_shift
    moved[:, K0] += k_shift
    moved[:, K1] += k_shift
    slide = np.broadcast_to(np.asarray(k_shift) - np.asarray(q_shift), (len(rows),))
    for limit in (LO, HI):
        finite = np.abs(moved[:, limit]) < NO_LIMIT
        moved[finite, limit] += slide[finite]
    return moved


def first_overlap(rows: Ints) -> tuple[int, int] | None:
    """Two rows that allow the same pair, or None. A sweep over queries; only rows alive together are compared."""
    order = np.argsort(rows[:, Q0], kind="stable")
    alive: list[int] = []
    for i in order.tolist():
        alive = [j for j in alive if rows[j, Q1] > rows[i, Q0]]
        if alive:
            mine, others = rows[i], rows[alive]
            both = np.empty_like(others)
            for column in (Q0, K0, LO):
                both[:, column] = np.maximum(others[:, column], mine[column])
            for column in (Q1, K1, HI):
                both[:, column] = np.minimum(others[:, column], mine[column])
            hits = np.flatnonzero(area(both))
            if len(hits):
                return alive[int(hits[0])], i
        alive.append(i)
    return None
