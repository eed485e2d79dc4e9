"""Documents cut by a layout: which piece of which document lies where, and in which order the pieces join.

    documents          ├────────── A ──────────┤├─ B ─┤├──── C ────┤
    spans              └─ 0 ─┘└─ 1 ─┘└─ 0 ─┘└──── 1 ────┘└──── 0 ───┘
    fragments          A₀ of 0  A₁ of 1  A₂ of 0  A₃ of 1   B of 1   C₀ of 1   C₁ of 0
    chains             A: A₀ → A₁ → A₂ → A₃          B          C: C₀ → C₁

A fragment is what a span holds of one document. The fragments of a document, in token order, are its chain: state flows
along it, gradients of state flow back. The place in the chain decides what a fragment must do:

    role      place             forward                                    backward
    WHOLE     alone             starts from zero, gives nothing            likewise
    HEAD      first of several  starts from zero                           waits for the gradient of its last state
    MID       between           waits for a state; passes it on changed    the same, the other way
    LAST      last of several   waits for a state                          starts from zero

The halo of a fragment is the tokens right before it, from whoever holds them: what a causal convolution sees.

    width 4, halo 3        rank 0: a a a a a      rank 1: b      rank 2: c      rank 0: d d d d
    halo of d                              a             b              c       one document, three owners
    halo of c                            a a             b
    halo of b                          a a a

Only tokens of the same document count; slots without one stay zero. Sender and receiver list the wanted tokens by the
fragment that wants them (in token order), then by slot, so they agree without talking.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from longweave.errors import InputError
from longweave.plan.layout import Layout
from longweave.plan.ranges import Ints, Span, as_cu_seqlens, frozen, overlaps, ramp


class Role(IntEnum):
    WHOLE = 0
    HEAD = 1
    MID = 2
    LAST = 3


@dataclass(frozen=True, eq=False)
class Fragments:
    """Every fragment of every rank, one row each, in token order: the rows of a chain are neighbours."""

    layout: Layout
    cu_seqlens: Ints
    starts: Ints  # global tokens
    stops: Ints
    local_starts: Ints  # where the fragment begins in the local tensor of its rank
    ranks: Ints
    documents: Ints
    positions: Ints  # in the chain of the document
    chain_lengths: Ints

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @cached_property
    def roles(self) -> Ints:
        first, last = self.positions == 0, self.positions == self.chain_lengths - 1
        return np.select([first & last, first, last], [Role.WHOLE, Role.HEAD, Role.LAST], Role.MID).astype(np.int64)

    @cached_property
    def linked(self) -> bool:
        """Does any document have more than one fragment?"""
        return bool((self.chain_lengths > 1).any())

    @cached_property
    def communicates(self) -> bool:
        """Does any document lie on more than one rank? The same answer on every rank."""
        return bool(((self.ranks[1:] != self.ranks[:-1]) & (self.documents[1:] == self.documents[:-1])).any())

    @cached_property
    def holders(self) -> Holders:
        key = self.documents * self.world_size + self.ranks
        order = np.argsort(key, kind="stable")  # inside a key, in token order
        begins = np.flatnonzero(np.append(True, key[order][1:] != key[order][:-1])) if len(key) else order
        ends = np.append(begins[1:], len(order)) - 1
        firsts, lasts = order[begins], order[ends] if len(order) else order
        return Holders(self.documents[firsts], self.ranks[firsts], self.positions[firsts], self.positions[lasts])

    def rows_of(self, rank: int) -> Ints:
        """The fragments of a rank, in the order of its local tokens."""
        rows = np.flatnonzero(self.ranks == rank)
        return rows[np.argsort(self.local_starts[rows], kind="stable")]

    def local_spans(self, rank: int) -> tuple[Span, ...]:
        """Where they lie in the rank's local tokens, which they fill without gaps."""
        rows = self.rows_of(rank)
        starts = self.local_starts[rows]
        return tuple(map(Span, starts.tolist(), (starts + self.stops[rows] - self.starts[rows]).tolist()))


@dataclass(frozen=True, eq=False)
class Holders:
    """One row for each (document, rank that holds some of it), sorted: its first and last position in the chain."""

    documents: Ints
    ranks: Ints
    first: Ints
    last: Ints

    def of_documents(self, documents: Ints) -> tuple[Ints, Ints]:
        """All pairs (index into `documents`, holder row)."""
        begin = np.searchsorted(self.documents, documents, side="left")
        counts = np.searchsorted(self.documents, documents, side="right") - begin
        return np.repeat(np.arange(len(documents)), counts), np.repeat(begin, counts) + ramp(counts)


def fragments(layout: Layout, cu_seqlens: object) -> Fragments:
    """The fragments of a layout.

    >>> f = fragments(Layout.zigzag([0, 12, 18], 2), [0, 12, 18])
    >>> [(int(f.documents[row]), int(f.positions[row])) for row in f.rows_of(0)]
    [(0, 0), (0, 2), (1, 0), (1, 2)]
    """
    cu = as_cu_seqlens(cu_seqlens)
    if int(cu[-1]) != layout.total:
        raise InputError(f"cu_seqlens ends at {cu[-1]} but the layout has {layout.total} tokens; use the same pack")
    full = np.flatnonzero(cu[1:] > cu[:-1])
    starts, stops, ranks = layout.sorted
    span, document = overlaps(starts, stops, cu[:-1][full], cu[1:][full])
    begin = np.maximum(starts[span], cu[:-1][full][document])
    end = np.minimum(stops[span], cu[1:][full][document])
    counts = np.bincount(document, minlength=len(full))
    return Fragments(
        layout,
        cu,
        frozen(begin),
        frozen(end),
        frozen(layout.local_starts[layout.token_order][span] + begin - starts[span]),
        frozen(ranks[span]),
        frozen(full[document]),
        frozen(ramp(counts)),
        frozen(np.repeat(counts, counts)),
    )


# -- halo ----------------------------------------------------------------------------------------------


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


def halo_route(fragments: Fragments, rank: int, width: int) -> HaloRoute:
    """What `rank` sends, receives and keeps so that its fragments see `width` − 1 tokens back."""
    f, reach = fragments, width - 1
    first_rows = np.searchsorted(f.documents, f.documents, side="left")
    counts = np.minimum(f.starts - f.starts[first_rows], reach)
    fragment = np.repeat(np.arange(len(f.starts)), counts)
    back = np.repeat(counts, counts) - ramp(counts)  # how far before the fragment, the farthest first
    token = f.starts[fragment] - back
    owner = np.asarray(f.layout.owner(token), dtype=np.int64)
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
    send_tokens, keep_tokens = (_local(f, token[rows]) for rows in (sent, kept))
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


def _local(f: Fragments, tokens: Ints) -> Ints:
    """Local index, on the rank that holds it, of each global token."""
    row = np.searchsorted(f.starts, tokens, side="right") - 1
    return f.local_starts[row] + tokens - f.starts[row]


def _readers(copies: Ints) -> tuple[Ints, Ints]:
    """Distinct tokens, and for each the places in `copies` where it stands."""
    tokens, inverse, counts = np.unique(copies, return_inverse=True, return_counts=True)
    readers = np.full((len(tokens), int(counts.max(initial=0))), len(copies), dtype=np.int64)
    order = np.argsort(inverse, kind="stable")
    readers[inverse[order], ramp(counts)] = order
    return frozen(tokens), frozen(readers)
