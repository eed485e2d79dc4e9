"""Tasks as calls of a flash kernel with `cu_seqlens`: each wave is one call over q, k, v as they lie in memory.

A call takes segments that follow each other, in the queries as in the keys. What lies between two tasks of a wave
becomes a segment that computes nothing (without keys: out 0, lse ±∞, dq 0; without queries: dk and dv 0):

    queries   ├─ task 1 ─┤   gap   ├─ task 2 ─┤                   cu_q   0      5      8      8      12
    keys      ├─ task 1 ─┤        gap         ├─ task 2 ─┤        cu_k   0      5      5      9      13
                                                                         task 1 q gap  k gap  task 2

So nothing is gathered. Tasks of a wave rise in both, and share one window (left, right): row i of n sees column j of m
if i + (m − n) − left <= j <= i + (m − n) + right; −1 is no limit.

Which limits a kernel keeps depends on its version. FlashAttention-2 drops one that is >= max_seqlen_k of the call, the
right one too, and takes max_seqlen_k for the side that is free; FlashAttention-3 drops left >= max_seqlen_k − 1 and
right >= max_seqlen_q − 1; FlashAttention-4 keeps all. Tasks are therefore cut by rows until the upper limit binds on
every row of a piece or on none, and, where it does not, the lower one as well. Then the right limit is 0 or none, a
limited piece has no more rows than keys, no row is blind, and a left limit that a version drops cuts no piece: all
versions see the pairs of the tasks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longweave.kernels.attention.partial import TaskRows
from longweave.tensors import Indices

Ints = npt.NDArray[np.int64]

# Backward pads every segment by 128 rows of float32, so gaps are not cut finer than this; nor are they left longer than
# the longest task, which sets how many blocks are launched for every segment.
GAP = 1024
# Those rows are 2 MiB for 32 heads of 128, and a task brings up to two gaps with it: backward stays below some 3 GiB.
TASKS_PER_WAVE = 512


class Wave(NamedTuple):
    """One call: on the queries `q` and keys `k`, (start, stop) each."""

    q: tuple[int, int]
    k: tuple[int, int]
    window: tuple[int, int]
    max_q: int
    max_k: int
    borders: Indices  # cu_q, cu_k
    first: bool  # every query of `q` sees something here, and no earlier wave had any of them
    area: int  # allowed pairs


def compile_waves(rows: TaskRows) -> tuple[Wave, ...]:
    """As few waves as greedy dealing gives."""
    tasks, windows = split(rows)
    waves: list[Wave] = []
    for window, members in _deal(tasks, windows):
        waves.append(_wave(members, window, waves))
    return tuple(waves)


# -- splitting -----------------------------------------------------------------------------------------


def split(rows: TaskRows) -> tuple[Ints, Ints]:
    """The same pairs in pieces (pieces, 4) of queries and keys, and the window (pieces, 2) of each."""
    q0, q1, k0, k1, lo, hi = rows.T
    # hi cuts or touches the keys of the rows before `above`; of the rest, lo those of the rows from `below` on.
    above = np.where(hi < k1 - 1 - q0, np.clip(k1 - hi, q0, q1), q0)
    below = np.maximum(above, np.where(lo > k0 - (q1 - 1), np.clip(k0 - lo, q0, q1), q1))
    edges = np.stack([q0, above, below, q1], axis=1)
    starts, stops = edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1)
    full = np.flatnonzero(starts < stops)
    starts, stops, row = starts[full], stops[full], full // 3
    by_hi = full % 3 == 0
    keys = np.maximum(k0[row], starts + lo[row])
    key_stops = np.where(by_hi, stops + hi[row], k1[row])
    by_lo = stops - 1 + lo[row] > keys
    left = np.where(by_lo, key_stops - stops - lo[row], -1)
    right = np.where(by_hi & (stops - starts > 1), 0, -1)  # a single row sees all of its keys
    pieces, windows = _corners(np.stack([starts, stops, keys, key_stops], axis=1), np.stack([left, right], axis=1))
    return pieces, _join_windows(pieces, windows)


def _corners(pieces: Ints, windows: Ints) -> tuple[Ints, Ints]:
    """Pieces with only a lower limit have windows of all sizes; as a rectangle and a corner they have one."""
    corner = np.flatnonzero((windows[:, 0] >= 0) & (windows[:, 1] < 0))
    if len(np.unique(windows[corner, 0])) < 2:
        return pieces, windows
    corner = corner[windows[corner, 0] > 0]
    rectangle = pieces[corner]
    cut = rectangle[:, 3] - windows[corner, 0]  # every row sees the keys from here on
    rectangle[:, 2] = cut
    pieces, windows = pieces.copy(), windows.copy()
    pieces[corner, 3], windows[corner, 0] = cut, 0
    return np.concatenate([pieces, rectangle]), np.concatenate([windows, np.full((len(corner), 2), -1)])


def _join_windows(pieces: Ints, windows: Ints) -> Ints:
    """Windows that mean the same for all their pieces become one: fewer calls.

    A document of one token is full, but causal as well; one shorter than a sliding window is causal, but sliding, too.
    """
    kinds = np.unique(windows, axis=0)
    if not 1 < len(kinds) <= 8:
        return windows
    windows = windows.copy()
    for left, right in kinds.tolist():
        mine = np.flatnonzero((windows == (left, right)).all(1))
        queries, keys = pieces[mine, 1] - pieces[mine, 0], pieces[mine, 3] - pieces[mine, 2]
        for other, limit in kinds.tolist():
            if (other, limit) == (left, right) or limit < 0 or not (windows == (other, limit)).all(1).any():
                continue
            same_right = right == limit or bool((queries == 1).all())
            same_left = left == other or (left < 0 and (other < 0 or bool((keys - 1 <= other).all())))
            if same_right and same_left:
                windows[mine] = other, limit
                break
    return windows


# -- dealing -------------------------------------------------------------------------------------------


def _deal(tasks: Ints, windows: Ints) -> list[tuple[tuple[int, int], Ints]]:
    """(window, tasks) of each wave; in a wave both the queries and the keys rise."""
    order = np.lexsort([tasks[:, 2], tasks[:, 0], windows[:, 1], windows[:, 0]])
    tasks, windows = tasks[order], windows[order]
    borders = np.flatnonzero((windows[1:] != windows[:-1]).any(1)) + 1
    waves = []
    for group, alike in zip(np.split(tasks, borders), np.split(windows, borders), strict=True):
        if not len(group):
            continue
        window = (int(alike[0, 0]), int(alike[0, 1]))
        for chain in _chains(group):
            waves += [(window, chain[i : i + TASKS_PER_WAVE]) for i in range(0, len(chain), TASKS_PER_WAVE)]
    return waves


def _chains(tasks: Ints) -> list[Ints]:
    """Each task goes to the first chain that has room behind its last one."""
    if ((tasks[1:, 0] >= tasks[:-1, 1]) & (tasks[1:, 2] >= tasks[:-1, 3])).all():
        return [tasks]
    number = np.empty(len(tasks), dtype=np.int64)
    ends: list[tuple[int, int]] = []
    for i, (q0, q1, k0, k1) in enumerate(tasks.tolist()):
        chain = next((n for n, (q, k) in enumerate(ends) if q <= q0 and k <= k0), len(ends))
        if chain == len(ends):
            ends.append((q1, k1))
        else:
            ends[chain] = q1, k1
        number[i] = chain
    order = np.argsort(number, kind="stable")
    return np.split(tasks[order], np.searchsorted(number[order], np.arange(1, len(ends))))


# -- one call ------------------------------------------------------------------------------------------


def _wave(tasks: Ints, window: tuple[int, int], earlier: list[Wave]) -> Wave:
    q0, q1, k0, k1 = tasks.T
    q, k = (int(q0[0]), int(q1[-1])), (int(k0[0]), int(k1[-1]))
    queries, keys = q1 - q0, k1 - k0
    q_gaps, k_gaps = q0[1:] - q1[:-1], k0[1:] - k1[:-1]
    # Two, not one: with a single query everywhere and grouped heads, FA2 takes a shortcut that knows no gaps.
    max_q, max_k = max(2, int(queries.max())), int(keys.max())
    before_q, q_fill = _fill(q_gaps, max(max_q, GAP))
    before_k, k_fill = _fill(k_gaps, max(max_k, GAP))
    before = np.concatenate([before_q, before_k])
    q_lengths = np.insert(queries, before, np.concatenate([q_fill, np.zeros_like(k_fill)]))
    k_lengths = np.insert(keys, before, np.concatenate([np.zeros_like(q_fill), k_fill]))
    borders = Indices(_borders(q_lengths), _borders(k_lengths))
    first = not len(q_fill) and all(q[1] <= wave.q[0] or wave.q[1] <= q[0] for wave in earlier)
    max_q, max_k = max(max_q, int(q_lengths.max())), int(k_lengths.max())
    return Wave(q, k, window, max_q, max_k, borders, first, int(_area(queries, keys, window)))


def _fill(gaps: Ints, longest: int) -> tuple[Ints, Ints]:
    """For each segment that fills gaps: the number of the task behind it, and its length."""
    counts = -(-gaps // longest)
    behind = np.repeat(np.arange(1, len(gaps) + 1), counts)
    lengths = np.full(len(behind), longest)
    last = (np.cumsum(counts) - 1)[counts > 0]
    lengths[last] = (gaps - (counts - 1) * longest)[counts > 0]
    return behind, lengths


def _borders(lengths: Ints) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _area(queries: Ints, keys: Ints, window: tuple[int, int]) -> int:
    """Allowed pairs of pieces: of each side's limit, a triangle is missing."""
    left, right = window
    pairs = queries * keys
    if right == 0:
        pairs = pairs - queries * (queries - 1) // 2
    if left >= 0:
        missing = np.maximum(keys - 1 - left, 0)  # keys that the last row does not see
        pairs = pairs - missing * (missing + 1) // 2
    return int(pairs.sum())
