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
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from longweave.errors import InputError
from longweave.plan.layout import Layout, SpanTable
from longweave.plan.ranges import CuKey, Ints, Span, as_cu_seqlens, cu_key, from_key, frozen, overlaps, ramp


class Role(IntEnum):
    WHOLE = 0
    HEAD = 1
    MID = 2
    LAST = 3


class Fragment(NamedTuple):
    """One fragment on its rank: its local tokens, its document, and its place in the document's chain."""

    start: int
    stop: int
    document: int
    position: int
    role: Role


@dataclass(frozen=True, eq=False)
class Fragments:
    """Every fragment of every rank, one row each, in token order: the rows of a chain are neighbours."""

    table: SpanTable
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
        return self.table.world_size

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

    def of(self, rank: int) -> tuple[Fragment, ...]:
        """The fragments of a rank, in the order of its local tokens, which they fill without gaps."""
        return tuple(
            Fragment(*span, int(self.documents[row]), int(self.positions[row]), Role(int(self.roles[row])))
            for span, row in zip(self.local_spans(rank), self.rows_of(rank), strict=True)
        )

    def local_spans(self, rank: int) -> tuple[Span, ...]:
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


class Pack:
    """The fragments of one layout *object* and its documents, and the groups that were seen to agree on them."""

    def __init__(self, fragments: Fragments, fingerprint: str) -> None:
        self.fragments = fragments
        self.fingerprint = fingerprint
        self.agreed_on: WeakSet[Any] = WeakSet()


def pack_of(layout: Layout, cu_seqlens: object) -> Pack:
    """The pack of this layout and these documents: made once for each layout object."""
    key = ("pack", cu_key(cu_seqlens))
    if key not in layout.derived:
        cu = as_cu_seqlens(cu_seqlens)
        same = ("pack", cu.tobytes())  # however the borders are given, the pack is one object
        if int(cu[-1]) != layout.total:
            raise InputError(f"cu_seqlens ends at {cu[-1]} but the layout has {layout.total} tokens; use the same pack")
        said = blake2b(cu.tobytes(), digest_size=16).hexdigest()
        new = Pack(_fragments(layout.table, CuKey(cu.tobytes())), f"{layout.fingerprint} {said}")
        layout.derived[key] = layout.derived.setdefault(same, new)
    pack: Pack = layout.derived[key]
    return pack


def fragments(layout: Layout, cu_seqlens: object) -> Fragments:
    """The fragments of a layout. Cached.

    >>> [fragment[:4] for fragment in fragments(Layout.zigzag([0, 12, 18], 2), [0, 12, 18]).of(0)]
    [(0, 3, 0, 0), (3, 6, 0, 2), (6, 7, 1, 0), (7, 9, 1, 2)]
    """
    return pack_of(layout, cu_seqlens).fragments


@lru_cache(maxsize=64)
def _fragments(table: SpanTable, key: CuKey) -> Fragments:
    cu = from_key(key)
    full = np.flatnonzero(cu[1:] > cu[:-1])
    starts, stops, ranks = table.sorted
    span, document = overlaps(starts, stops, cu[:-1][full], cu[1:][full])
    begin = np.maximum(starts[span], cu[:-1][full][document])
    end = np.minimum(stops[span], cu[1:][full][document])
    counts = np.bincount(document, minlength=len(full))
    return Fragments(
        table,
        cu,
        frozen(begin),
        frozen(end),
        frozen(table.local_starts[table.token_order][span] + begin - starts[span]),
        frozen(ranks[span]),
        frozen(full[document]),
        frozen(ramp(counts)),
        frozen(np.repeat(counts, counts)),
    )
