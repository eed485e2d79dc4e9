"""From one place of every token to another: what one rank sends, receives and keeps in one all-to-all-v.

                 my local tokens before                      my local tokens after
                 ├── run ──┤├─ run ─┤├ run ┤                 ├─ run ─┤├── run ──┤├ run ┤
                      │         │       └────── keep ────────────┘        ▲        ▲
                      ▼         ▼                                         │        │
    send buffer  [to rank 0 | to rank 2]  ── all-to-all-v ──▶  [from rank 1 | from rank 3]

`route` goes from one layout to another. `shift_route` stays in one layout and moves every entry to a neighbouring token
of the same document. In both buffers peers stand in rank order and the tokens of a peer in token order, so both sides
agree without talking. A run is a (start, stop) pair of local indices: contiguous tokens are copied together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longweave.errors import InputError, shown
from longweave.plan.layout import Layout
from longweave.plan.ranges import Ints, as_cu_seqlens, expand, frozen, join_touching, overlaps


@dataclass(frozen=True, eq=False)
class Route:
    """One rank's part. Runs are (n, 2) arrays of local (start, stop); splits are tokens per peer.

    Slots that neither `recv_runs` nor `keep_dst_runs` cover get nothing. Every token is sent or kept at most once.
    """

    tokens_in: int
    tokens_out: int
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    send_runs: Ints  # in local tokens before, filling the send buffer front to back
    recv_runs: Ints  # in local tokens after, emptying the receive buffer front to back
    keep_src_runs: Ints  # tokens that stay on this rank: from here …
    keep_dst_runs: Ints  # … to here, token by token
    communicates: bool  # does any rank send anything to another: the same answer on every rank

    @property
    def is_complete(self) -> bool:
        """Does every slot get something?"""
        kept = int((self.keep_dst_runs[:, 1] - self.keep_dst_runs[:, 0]).sum())
        return kept + sum(self.recv_splits) == self.tokens_out

    @property
    def is_identity(self) -> bool:
        """Nothing moves, neither between ranks nor inside this one, and nothing is left out."""
        stays = np.array_equal(self.keep_src_runs, self.keep_dst_runs)
        return not self.communicates and self.tokens_in == self.tokens_out and self.is_complete and stays

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
    """What `rank` sends, receives and keeps to go from `src` to `dst`."""
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, Layout):
            raise InputError(f"{name} is {shown(layout)}; give a Layout, such as Layout.zigzag(cu_seqlens, world_size)")
    if src.total != dst.total:
        raise InputError(f"the layouts hold {src.total} and {dst.total} tokens; both must divide the same pack")
    if src.world_size != dst.world_size:
        raise InputError(f"the layouts are for {src.world_size} and {dst.world_size} ranks; use one world size")
    src.rows_of(rank)  # raises if there is no such rank
    send_splits, send_runs, keep_src = _by_peer(_local_runs(src, rank), 0, dst, rank)
    recv_splits, recv_runs, keep_dst = _by_peer(_local_runs(dst, rank), 0, src, rank)
    return Route(
        src.counts[rank],
        dst.counts[rank],
        send_splits,
        recv_splits,
        send_runs,
        recv_runs,
        keep_src,
        keep_dst,
        any(send_splits) or any(recv_splits) or _moves(src.sorted, 0, dst),
    )


def shift_route(layout: Layout, cu_seqlens: object, rank: int, by: int) -> Route:
    """What `rank` sends, receives and keeps so that each token gets the entry of the token `by` later in its document.

    `by` may be negative (earlier tokens) or 0. A token without such a neighbour gets nothing.
    """
    cu = as_cu_seqlens(cu_seqlens)
    if int(cu[-1]) != layout.total:
        raise InputError(f"cu_seqlens ends at {cu[-1]} but the layout has {layout.total} tokens; use the same pack")
    if not 0 <= rank < layout.world_size:
        raise InputError(f"rank {rank} does not exist; the layout has ranks 0 to {layout.world_size - 1}")
    if isinstance(by, bool) or not isinstance(by, int | np.integer):
        raise InputError(f"by is {by!r}; give a number of tokens, negative for earlier ones")
    by = int(min(max(by, -layout.total), layout.total))  # farther is outside of every document as well
    mine = _local_runs(layout, rank)
    send_splits, send_runs, keep_src = _by_peer(_with_neighbour(mine, cu, -by), -by, layout, rank)
    recv_splits, recv_runs, keep_dst = _by_peer(_with_neighbour(mine, cu, by), by, layout, rank)
    tokens = layout.counts[rank]
    return Route(
        tokens,
        tokens,
        send_splits,
        recv_splits,
        send_runs,
        recv_runs,
        keep_src,
        keep_dst,
        any(send_splits) or any(recv_splits) or _moves(_with_neighbour(layout.sorted, cu, by), by, layout),
    )


def run_index(runs: Ints) -> Ints:
    """Runs as one index, token by token."""
    return expand(runs[:, 0], runs[:, 1])


# Below, runs are (starts, stops, x) of global tokens; x takes each run's tokens to local ones, or is its rank.
_Runs = tuple[Ints, Ints, Ints]


def _local_runs(layout: Layout, rank: int) -> _Runs:
    rows = layout.rows_of(rank)
    return layout.starts[rows], layout.stops[rows], layout.local_starts[rows] - layout.starts[rows]


def _with_neighbour(runs: _Runs, cu: Ints, by: int) -> _Runs:
    """The parts of runs whose tokens have a token `by` later in the same document."""
    starts, stops, x = runs
    first, last = np.maximum(cu[:-1], cu[:-1] - by), np.minimum(cu[1:], cu[1:] - by)
    full = np.flatnonzero(last > first)
    first, last = first[full], last[full]
    run, document = overlaps(starts, stops, first, last)
    return np.maximum(starts[run], first[document]), np.minimum(stops[run], last[document]), x[run]


def _by_peer(runs: _Runs, by: int, other: Layout, rank: int) -> tuple[tuple[int, ...], Ints, Ints]:
    """My tokens by who has the token `by` later in `other`: tokens per peer, the runs for peers, the runs that stay."""
    starts, stops, to_local = runs
    other_starts, other_stops, other_ranks = other.sorted
    run, span = overlaps(starts + by, stops + by, other_starts, other_stops)
    begin = np.maximum(starts[run], other_starts[span] - by)
    end = np.minimum(stops[run], other_stops[span] - by)
    peer = other_ranks[span]
    order = np.lexsort((begin, peer))
    local = (np.stack([begin, end], axis=1) + to_local[run][:, None])[order]
    stays = peer[order] == rank
    splits = np.bincount(peer, weights=end - begin, minlength=other.world_size).astype(np.int64)
    splits[rank] = 0
    return tuple(splits.tolist()), _as_few(local[~stays]), _as_few(local[stays])


def _as_few(runs: Ints) -> Ints:
    """The same local tokens in the same order, as few runs as possible."""
    starts, stops, _ = join_touching(runs[:, 0], runs[:, 1], np.zeros(len(runs), dtype=np.int64))
    return frozen(np.stack([starts, stops], axis=1))


def _moves(runs: _Runs, by: int, other: Layout) -> bool:
    """Of tokens and their ranks: does any lie on another rank than the token `by` later in `other`?"""
    starts, stops, ranks = runs
    run, span = overlaps(starts + by, stops + by, *other.sorted[:2])
    return bool((ranks[run] != other.sorted[2][span]).any())
