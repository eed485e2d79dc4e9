"""What a program of the Triton kernels has to walk over, for every block of queries (or of keys) that tasks touch.

One task cut by a block of queries; steps of keys start at the first key that the block sees:

            keys ▶    start                    stop
    block   ┌────     ▪ ▪ ▪│■ ■ ■ ■ ■ ■│▪ · ·          ▪ edge segments: rows see intervals of their own
      of    │         · ▪ ▪│■ ■ ■ ■ ■ ■│▪ ▪ ·          ■ a full segment: whole steps that every row sees
    queries └────     · · ▪│■ ■ ■ ■ ■ ■│▪ ▪ ▪

Tasks that share a block, as short documents do, become pieces of *one* edge segment if no row has two of them and their
keys follow each other: then a step serves several documents.

All lists are one array of int32, so one upload; positions in it are absolute:

    programs  (block start, full from, full to, edges from, edges to)       heavy blocks first, so that none comes last
    full      (start, stop)
    edges     (start, stop, pieces from, pieces to)
    pieces    (own start, own stop, start, stop, lo, hi)      own row r sees max(start, r + lo) … min(stop − 1, r + hi)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longweave.kernels.attention.partial import TaskRows
from longweave.tensors import Indices

FAR = 1 << 30  # farther than any two tokens of a rank; with a token's number added it still fits int32

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpanLists:
    """`programs` of them are at the start of the one array."""

    programs: int
    array: Indices


@dataclass(frozen=True)
class ListsFor:
    """Makes the lists of some tasks; a compiler for `Tasks.compiled`. Own blocks are of queries, or of keys."""

    keys_own: bool
    block: int
    step: int

    def __call__(self, rows: TaskRows) -> SpanLists:
        if self.keys_own:  # lo <= k − q <= hi says the same as −hi <= q − k <= −lo
            rows = rows[:, [2, 3, 0, 1, 5, 4]] * np.array([1, 1, 1, 1, -1, -1])
        array, programs = make_lists(np.clip(rows, -FAR, FAR), self.block, self.step)
        return SpanLists(programs, Indices(array))


def make_lists(rows: TaskRows, block: int, step: int) -> tuple[npt.NDArray[np.int32], int]:
    """The array, and how many programs it has."""
    number, own0, own1, start, stop, lo, hi = _cut(rows, block)
    first, last = _full_steps(own1 - own0 == block, own0, own1, start, stop, lo, hi, step)
    inner0, inner1 = start + first * step, start + last * step
    full = np.stack([number, inner0, inner1], 1)[first < last]
    edges, pieces = _edges(
        np.concatenate(
            [
                np.stack([number, own0, own1, start, inner0, lo, hi], 1)[inner0 > start],
                np.stack([number, own0, own1, inner1, stop, lo, hi], 1)[stop > inner1],
            ]
        )
    )
    full = full[np.argsort(full[:, 0], kind="stable")]
    blocks = _heavy_first(full, edges, step)
    full_at = 5 * len(blocks)
    edges_at = full_at + 2 * len(full)
    pieces_at = edges_at + 4 * len(edges)
    programs = [
        blocks * block,
        *(full_at + 2 * np.searchsorted(full[:, 0], blocks, side) for side in ("left", "right")),
        *(edges_at + 4 * np.searchsorted(edges[:, 0], blocks, side) for side in ("left", "right")),
    ]
    edges[:, 3:] = pieces_at + 6 * edges[:, 3:]
    tables = (np.stack(programs, 1), full[:, 1:], edges[:, 1:], pieces)
    return np.concatenate([table.ravel() for table in tables]).astype(np.int32), len(blocks)


def _cut(rows: TaskRows, block: int) -> tuple[Ints, ...]:
    """Tasks cut by blocks of their own side: number of the block, own0, own1, start, stop, lo, hi."""
    begin, end = rows[:, 0] // block, -(-rows[:, 1] // block)
    counts = end - begin
    task = np.repeat(np.arange(len(rows)), counts)
    number = begin[task] + np.arange(len(task)) - np.repeat(np.cumsum(counts) - counts, counts)
    own0, own1, other0, other1, lo, hi = rows[task].T
    own0, own1 = np.maximum(own0, number * block), np.minimum(own1, (number + 1) * block)
    start, stop = np.maximum(other0, own0 + lo), np.minimum(other1, own1 + hi)
    some = start < stop  # keys that no query of a task sees may make up a block
    return tuple(x[some] for x in (number, own0, own1, start, stop, lo, hi))


def _full_steps(
    whole: npt.NDArray[np.bool_], own0: Ints, own1: Ints, start: Ints, stop: Ints, lo: Ints, hi: Ints, step: int
) -> tuple[Ints, Ints]:
    """The steps from … to that all rows of a whole block see; 0, 0 where there are none."""
    first = -(-np.maximum(own1 - 1 + lo - start, 0) // step)
    last = (np.minimum(stop, own0 + hi + 1) - start) // step
    some = whole & (first < last)
    return np.where(some, first, 0), np.where(some, last, 0)


def _edges(pieces: Ints) -> tuple[Ints, Ints]:
    """(block, start, stop, first piece, behind the last) of the edge segments, and the pieces in their order."""
    if not len(pieces):
        return np.zeros((0, 5), dtype=np.int64), pieces[:, 1:]
    pieces = pieces[np.lexsort((pieces[:, 3], pieces[:, 1], pieces[:, 0]))]
    before, after = pieces[:-1], pieces[1:]
    follows = (
        (after[:, 0] == before[:, 0])
        & (after[:, 1] >= before[:, 2])  # other rows
        & (after[:, 3] >= before[:, 3])
        & (after[:, 3] <= before[:, 4])  # keys that overlap or touch
    )
    heads = np.flatnonzero(np.append(True, ~follows))
    stops = np.maximum.reduceat(pieces[:, 4], heads)
    edges = np.stack([pieces[heads, 0], pieces[heads, 3], stops, heads, np.append(heads[1:], len(pieces))], 1)
    return edges, pieces[:, 1:]


def _heavy_first(full: Ints, edges: Ints, step: int) -> Ints:
    """The blocks that have anything to do, those with the most steps first."""
    number = np.concatenate([full[:, 0], edges[:, 0]])
    spans = np.concatenate([full[:, 2] - full[:, 1], edges[:, 2] - edges[:, 1]])
    work = np.bincount(number, -(-spans // step))
    order = np.argsort(-work, kind="stable")
    return order[: np.count_nonzero(work)]
