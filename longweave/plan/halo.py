"""The tokens right before each fragment, from whoever holds them: what a causal convolution of some width sees.

    width 4, halo 3        rank 0: a a a a a      rank 1: b      rank 2: c      rank 0: d d d d
    halo of d                              a             b              c       one document, three owners
    halo of c                            a a             b
    halo of b                          a a a

Only tokens of the same document count; slots without one stay zero. Sender and receiver list the wanted tokens by the
fragment that wants them (in token order), then by slot, so they agree without talking.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longweave.plan.fragments import Fragments
from longweave.plan.layout import Layout
from longweave.plan.ranges import Ints, frozen, ramp


@dataclass(frozen=True, eq=False)
class HaloRoute:
    """One rank's part. Slots count through (fragments in local order) × (width − 1), the last one nearest."""

    fragments: int
    width: int
    send_splits: tuple[int, ...]  # tokens per peer
    recv_splits: tuple[int, ...]
    send_tokens: Ints  # local tokens, peer after peer
    recv_slots: Ints  # where what arrives goes
    keep_tokens: Ints  # own tokens that own fragments want …
    keep_slots: Ints  # … and where they go
    home_tokens: Ints  # every local token that anybody wants, once …
    home_readers: Ints  # … and the rows [send_tokens; keep_tokens] that are copies of it, padded with their count
    needed: bool  # does any fragment of any rank have a token before it
    communicates: bool  # does any rank send anything to another


@lru_cache(maxsize=128)
def halo_route(f: Fragments, rank: int, width: int) -> HaloRoute:
    """What `rank` sends, receives and keeps so that its fragments see `width` − 1 tokens back. Cached."""
    reach = width - 1
    first_rows = np.searchsorted(f.documents, f.documents, side="left")
    counts = np.minimum(f.starts - f.starts[first_rows], reach)
    fragment = np.repeat(np.arange(len(f.starts)), counts)
    back = np.repeat(counts, counts) - ramp(counts)  # how far before the fragment, the farthest first
    token = f.starts[fragment] - back
    layout = Layout(f.table)
    owner = np.asarray(layout.owner(token), dtype=np.int64)
    wants = f.ranks[fragment]

    mine = f.rows_of(rank)
    place = np.full(len(f.starts), -1, dtype=np.int64)
    place[mine] = np.arange(len(mine))
    slot = place[fragment] * reach + reach - back
    sent, received, kept = (
        np.flatnonzero((owner == rank) & (wants != rank)),
        np.flatnonzero((owner != rank) & (wants == rank)),
        np.flatnonzero((owner == rank) & (wants == rank)),
    )
    sent = sent[np.argsort(wants[sent], kind="stable")]
    received = received[np.argsort(owner[received], kind="stable")]
    send_tokens, keep_tokens = (_local(f, rank, token[rows]) for rows in (sent, kept))
    home_tokens, home_readers = _readers(np.append(send_tokens, keep_tokens))
    return HaloRoute(
        len(mine),
        width,
        tuple(np.bincount(wants[sent], minlength=f.world_size).tolist()),
        tuple(np.bincount(owner[received], minlength=f.world_size).tolist()),
        frozen(send_tokens),
        frozen(slot[received]),
        frozen(keep_tokens),
        frozen(slot[kept]),
        home_tokens,
        home_readers,
        bool(len(token)),
        bool((owner != wants).any()),
    )


def _local(f: Fragments, rank: int, tokens: Ints) -> Ints:
    """Local index of global tokens that `rank` holds."""
    row = np.searchsorted(f.starts, tokens, side="right") - 1
    return f.local_starts[row] + tokens - f.starts[row]


def _readers(copies: Ints) -> tuple[Ints, Ints]:
    """Distinct tokens, and for each the places in `copies` where it stands."""
    tokens, inverse, counts = np.unique(copies, return_inverse=True, return_counts=True)
    readers = np.full((len(tokens), int(counts.max(initial=0))), len(copies), dtype=np.int64)
    order = np.argsort(inverse, kind="stable")
    readers[inverse[order], ramp(counts)] = order
    return frozen(tokens), frozen(readers)
