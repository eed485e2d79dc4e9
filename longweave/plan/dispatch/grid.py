"""The pack as the dispatch solver sees it: documents, cut into chunks, each with its tokens and its mask area.

    document      ├────────── 0 ──────────┤├── 1 ──┤├─ 2 ─┤
    chunk         ├─ 0 ─┼─ 1 ─┼─ 2 ─┼─ 3 ─┤├─ 4 ─┼5┤├─ 6 ─┤     equal inside a document, but for the last
    owner           0     1     1     0      2    2    2        a candidate: one rank per chunk

A document is a stretch of the pack that neither sees nor is seen by its neighbours, or that the mask names as one.
Everything the solver assigns is a run of chunks, so a run's tokens and area are differences of two running sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longweave.plan import slices as sl
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, ramp


@dataclass(frozen=True, eq=False)
class Grid:
    """Chunk c is the tokens `cuts[c] … cuts[c + 1]`; document d is the chunks `first[d] … first[d + 1]`."""

    mask: Mask
    world_size: int
    chunk_size: int
    cuts: Ints
    first: Ints
    area_before: Ints  # of all chunks before chunk c
    shared: Ints  # documents that other documents read, such as the prompt of `Mask.shared_prefix`

    @property
    def total(self) -> int:
        return self.mask.total

    @property
    def tokens_mean(self) -> float:
        return self.total / self.world_size

    @property
    def area_mean(self) -> float:
        return int(self.area_before[-1]) / self.world_size

    @property
    def tokens(self) -> Ints:
        """The length of each document."""
        return np.diff(self.cuts[self.first])

    @property
    def area(self) -> Ints:
        """The mask area of the queries of each document."""
        return np.diff(self.area_before[self.first])

    @property
    def document_of_chunk(self) -> Ints:
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def layout(self, owner: Ints) -> Layout:
        """The layout that gives chunk c to rank `owner[c]`, tokens in ascending order on every rank."""
        order = np.argsort(owner, kind="stable")
        return Layout(self.total, self.world_size, self.cuts[:-1][order], self.cuts[1:][order], owner[order])


def make_grid(mask: Mask, world_size: int, chunk_size: int) -> Grid:
    borders = _borders(mask)
    lengths = np.diff(borders)
    chunks = -(-lengths // chunk_size)
    first = np.append(0, np.cumsum(chunks))
    cuts = np.append(np.repeat(borders[:-1], chunks) + ramp(chunks) * chunk_size, mask.total)
    rows, chunk = sl.cut_q(mask.rows, cuts[:-1], cuts[1:])
    area = np.bincount(chunk, weights=sl.area(rows), minlength=len(cuts) - 1).astype(np.int64)
    area_before = np.append(0, np.cumsum(area))
    return Grid(mask, world_size, chunk_size, cuts, first, area_before, _shared(mask, borders))


def auto_chunk_size(total: int, world_size: int) -> int:
    """A power of two near 1/64 of a rank's tokens: fine enough to level loads, coarse enough to keep spans long."""
    return 1 << max(0, (total // (64 * world_size)).bit_length() - 1)


def _borders(mask: Mask) -> Ints:
    """The borders of documents that are not empty: those the mask names and those that no slice reaches across."""
    left = np.minimum(mask.rows[:, sl.Q0], mask.rows[:, sl.K0])
    right = np.maximum(mask.rows[:, sl.Q1], mask.rows[:, sl.K1])
    order = np.argsort(left, kind="stable")
    reach = np.append(0, np.maximum.accumulate(right[order]))
    free = left[order][left[order] >= reach[:-1]]  # nothing that begins earlier reaches past here
    return np.unique(np.concatenate([mask.cu_seqlens, free, reach[-1:]]))


def _shared(mask: Mask, borders: Ints) -> Ints:
    """Documents with a key that a query of another document sees."""
    if not len(mask.rows):
        return np.empty(0, dtype=np.int64)
    document = np.searchsorted(borders, mask.rows[:, [sl.Q0, sl.K0, sl.K1]] - [0, 0, 1], side="right") - 1
    query, first, last = document.T
    foreign = (first != query) | (last != query)
    counts = np.where(foreign, last - first + 1, 0)
    seen = np.repeat(first, counts) + ramp(counts)
    return np.unique(seen[seen != np.repeat(query, counts)])
