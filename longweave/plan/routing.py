"""From one layout to another: what one rank sends, receives and keeps in one all-to-all-v.

                 src: my local tokens                        dst: my new local tokens
                 ├── run ──┤├─ run ─┤├ run ┤                 ├─ run ─┤├── run ──┤├ run ┤
                      │         │       └────── keep ────────────┘        ▲        ▲
                      ▼         ▼                                         │        │
    send buffer  [to rank 0 | to rank 2]  ── all-to-all-v ──▶  [from rank 1 | from rank 3]

In both buffers peers stand in rank order and the tokens of a peer in token order, so both sides agree without talking.
A run is a (start, stop) pair of local indices: contiguous tokens are copied together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longweave.errors import InputError
from longweave.plan.layout import Layout, SpanTable
from longweave.plan.ranges import Ints, expand, frozen, join_touching, overlaps


@dataclass(frozen=True, eq=False)
class Route:
    """One rank's part. Runs are (n, 2) arrays of local (start, stop); splits are tokens per peer."""

    tokens_in: int
    tokens_out: int
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    send_runs: Ints  # in src order of this rank, filling the send buffer front to back
    recv_runs: Ints  # in dst order of this rank, emptying the receive buffer front to back
    keep_src_runs: Ints  # tokens that stay on this rank: from here …
    keep_dst_runs: Ints  # … to here, token by token
    communicates: bool  # does any rank send anything to another: the same answer on every rank

    @property
    def is_identity(self) -> bool:
        """Nothing moves, neither between ranks nor inside this one."""
        return not self.communicates and np.array_equal(self.keep_src_runs, self.keep_dst_runs)

    def reversed(self) -> Route:
        """The way back: what was received is sent, what was sent is received."""
        return Route(
            self.tokens_out,
            self.tokens_in,
            self.recv_splits,
            self.send_splits,
            self.recv_runs,
            self.send_runs,
            self.keep_dst_runs,
            self.keep_src_runs,
            self.communicates,
        )


def route(src: Layout, dst: Layout, rank: int) -> Route:
    """What `rank` sends, receives and keeps to go from `src` to `dst`. Cached."""
    if src.total != dst.total:
        raise InputError(f"the layouts hold {src.total} and {dst.total} tokens; both must divide the same pack")
    if src.world_size != dst.world_size:
        raise InputError(f"the layouts are for {src.world_size} and {dst.world_size} ranks; use one world size")
    if not 0 <= rank < src.world_size:
        raise InputError(f"rank {rank} does not exist; the layouts have ranks 0 to {src.world_size - 1}")
    return _route(src.table, dst.table, rank)


@lru_cache(maxsize=256)
def _route(src: SpanTable, dst: SpanTable, rank: int) -> Route:
    send_splits, send_runs, keep_src = _pieces(src, dst, rank)
    recv_splits, recv_runs, keep_dst = _pieces(dst, src, rank)
    return Route(
        src.counts[rank],
        dst.counts[rank],
        send_splits,
        recv_splits,
        send_runs,
        recv_runs,
        keep_src,
        keep_dst,
        communicates(src, dst),
    )


@lru_cache(maxsize=256)
def communicates(src: SpanTable, dst: SpanTable) -> bool:
    """Is any token on another rank in `dst` than in `src`?"""
    starts, stops, ranks = src.sorted
    left, right = overlaps(starts, stops, *dst.sorted[:2])
    return bool((ranks[left] != dst.sorted[2][right]).any())


def _pieces(mine: SpanTable, other: SpanTable, rank: int) -> tuple[tuple[int, ...], Ints, Ints]:
    """My tokens by their rank in `other`: tokens per peer, the runs for peers, the runs that stay."""
    rows = mine.rows_of(rank)
    starts, stops, local = mine.starts[rows], mine.stops[rows], mine.local_starts[rows]
    other_starts, other_stops, other_ranks = other.sorted
    span, piece = overlaps(starts, stops, other_starts, other_stops)
    begin = np.maximum(starts[span], other_starts[piece])
    length = np.minimum(stops[span], other_stops[piece]) - begin
    peer = other_ranks[piece]
    run_start = local[span] + begin - starts[span]
    order = np.lexsort((begin, peer))
    runs = np.stack([run_start, run_start + length], axis=1)[order]
    stays = peer[order] == rank
    splits = np.bincount(peer, weights=length, minlength=mine.world_size).astype(np.int64)
    splits[rank] = 0
    return tuple(splits.tolist()), _joined(runs[~stays]), _joined(runs[stays])


def _joined(runs: Ints) -> Ints:
    """The same local tokens in the same order, as few runs as possible."""
    starts, stops, _ = join_touching(runs[:, 0], runs[:, 1], np.zeros(len(runs), dtype=np.int64))
    return frozen(np.stack([starts, stops], axis=1))


def run_index(runs: Ints) -> Ints:
    """Runs as one index, token by token."""
    return expand(runs[:, 0], runs[:, 1])
