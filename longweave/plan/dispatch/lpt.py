"""Longest processing time first: the heaviest chunk to the rank with least work, then swaps that lower traffic.

This balances anything and knows nothing of documents, so it scatters them. A swap of two chunks of equal length
between two ranks then helps where a rank can leave a document, or no longer needs its end:

    reach of a document on a rank = the end of its last chunk there = the keys that the rank needs of it
    swap c (on a) and c' (on b):  a's reach of c's document falls,  a's reach of the other may rise;  b likewise

Reach is exact for causal masks and an estimate for others; the exact cost decides afterwards.
"""

from __future__ import annotations

import numpy as np

from longweave.plan.dispatch.grid import Grid
from longweave.plan.ranges import Ints


def lpt(grid: Grid, token_limit: int) -> Ints:
    """The owner of every chunk: in order of falling area, the rank with least area that has room for its tokens."""
    tokens, area = np.diff(grid.cuts), np.diff(grid.area_before)
    owner = np.empty(len(tokens), dtype=np.int64)
    load, held = np.zeros(grid.world_size), np.zeros(grid.world_size, dtype=np.int64)
    for chunk in np.lexsort((-tokens, -area)).tolist():
        fits = held + tokens[chunk] <= token_limit
        rank = int(np.where(fits, load, np.inf).argmin()) if fits.any() else int(held.argmin())
        owner[chunk] = rank
        load[rank] += area[chunk]
        held[rank] += tokens[chunk]
    return owner


def swap(grid: Grid, owner: Ints, area_limit: float) -> Ints:
    """A new owner of every chunk: the rank that needs most keys swaps, as long as some swap lowers what is needed."""
    owner = owner.copy()
    tokens, area = np.diff(grid.cuts), np.diff(grid.area_before)
    document = grid.document_of_chunk
    end = grid.cuts[1:] - grid.cuts[grid.first[document]]  # keys that a chunk needs of its document
    load = np.bincount(owner, weights=area, minlength=grid.world_size)
    limit = max(area_limit, float(load.max()))
    open_ranks = np.ones(grid.world_size, dtype=bool)
    for _ in range(grid.world_size):
        reach, released = _reach(grid, owner, document, end)
        needed = np.where(open_ranks, reach.sum(0), -1)
        rank = int(needed.argmax())
        mine, theirs = np.flatnonzero(owner == rank), np.flatnonzero(owner != rank)
        if needed[rank] <= 0 or not len(theirs):
            break
        other = owner[theirs]
        taken = np.maximum(0, end[theirs] - reach[document[theirs], rank])
        given = np.maximum(0, end[mine][:, None] - reach[document[mine]][:, other])
        change = given - released[mine][:, None] + (taken - released[theirs])[None]
        moved = area[mine][:, None] - area[theirs][None]
        change[tokens[mine][:, None] != tokens[theirs][None]] = 0
        change[(load[rank] - moved > limit) | (load[other][None] + moved > limit)] = 0
        i, j = divmod(int(change.argmin()), len(theirs))
        if change[i, j] >= 0:
            open_ranks[rank] = False
            continue
        owner[[mine[i], theirs[j]]] = other[j], rank
        load[[rank, other[j]]] += (-moved[i, j], moved[i, j])
    return owner


def _reach(grid: Grid, owner: Ints, document: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The reach of every document on every rank, and by how much it would fall without each chunk."""
    reach = np.zeros((len(grid.first) - 1, grid.world_size), dtype=np.int64)
    reach[document, owner] = end  # chunks ascend, so the last one written stays
    order = np.lexsort((owner, document))  # stable: chunks of a document on a rank stand together, ascending
    same = np.zeros(len(order), dtype=bool)
    same[1:] = (document[order][1:] == document[order][:-1]) & (owner[order][1:] == owner[order][:-1])
    before = np.where(same, np.append(0, end[order][:-1]), 0)
    released = np.empty_like(end)
    released[order] = end[order] - before
    released[end < reach[document, owner]] = 0
    return reach, released
