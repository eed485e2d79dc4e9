"""Who holds which token: for each rank an ordered list of spans of the packed sequence.

    documents        ├───────── A ─────────┤├─── B ───┤├ C ┤

    contiguous, 2    0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 1 1 1 1
    zigzag, 2        0 0 0 1 1 1 1 1 1 0 0 0  0 0 1 1 1 1 0  0 1 1 0

A rank's local tensor holds the tokens of its spans in the order of its spans. Counts may differ between ranks and may
be 0. Nothing is padded. Everything else (shards, positions, masks of a rank, routes) is derived from these spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from longweave.errors import InputError, shown
from longweave.plan.ranges import (
    MOST_TOKENS,
    Ints,
    Span,
    as_cu_seqlens,
    as_ints,
    as_list,
    check_int,
    check_total,
    check_world_size,
    expand,
    freeze,
    join_touching,
    plain_index,
    ramp,
)

if TYPE_CHECKING:
    from longweave.plan.cost import Machine, Shape
    from longweave.plan.mask import Mask


class Layout:
    """An immutable division of `total` packed tokens over `world_size` ranks. Make one with the constructors below.

    >>> layout = Layout.zigzag([0, 12, 18, 22], world_size=2)
    >>> layout.spans
    ((Span(start=0, stop=3), …), (Span(start=3, stop=9), …))

    In bulk it is a table of spans: row i is the span `starts[i] … stops[i]` of rank `ranks[i]`; rank r owns the rows
    `offsets[r] … offsets[r + 1]`. Equal layouts hash alike and have the same `fingerprint`.
    """

    def __init__(self, total: int, world_size: int, starts: Ints, stops: Ints, ranks: Ints) -> None:
        """From spans that are sorted by rank, inside a rank in the order of its local tokens."""
        self.total, self.world_size = check_total(total), check_world_size(world_size)
        starts, stops, ranks = join_touching(*_columns(starts, stops, ranks, self.world_size))
        self.starts, self.stops, self.ranks = freeze(starts), freeze(stops), freeze(ranks)
        self.offsets = freeze(np.searchsorted(ranks, np.arange(world_size + 1)))
        self._check_cover()

    # -- constructors ------------------------------------------------------------------------------

    @classmethod
    def contiguous(cls, total: int, world_size: int) -> Layout:
        """Rank r holds the r-th of `world_size` runs whose lengths differ by at most one token."""
        total, world_size = check_total(total), check_world_size(world_size)
        cuts = np.arange(world_size + 1, dtype=np.int64) * total // world_size
        return cls(total, world_size, cuts[:-1], cuts[1:], np.arange(world_size))

    @classmethod
    def zigzag(cls, cu_seqlens: object, world_size: int) -> Layout:
        """Every document in 2·P pieces, piece i and piece 2P-1-i to rank i: equal causal work for all ranks.

        Pieces of a document differ by at most one token. The odd tokens are dealt in turns, so rank totals differ by
        at most one token as well, also over thousands of documents that are shorter than 2·P.
        """
        cu, world_size = as_cu_seqlens(cu_seqlens), check_world_size(world_size)
        lengths = np.diff(cu)
        pieces = 2 * world_size
        sizes = (lengths // pieces)[:, None] + _odd_tokens(lengths, world_size)
        stops = cu[:-1, None] + np.cumsum(sizes, axis=1)
        starts = stops - sizes
        piece = np.arange(pieces)
        ranks = np.broadcast_to(np.minimum(piece, pieces - 1 - piece), sizes.shape)
        # Group by rank, keep token order inside a rank. A small integer type makes the stable sort a radix sort.
        full = np.flatnonzero(sizes)
        ranks = ranks.reshape(-1)[full]
        order = np.argsort(ranks.astype(np.uint16 if world_size < 1 << 16 else np.int64), kind="stable")
        rows = full[order]
        return cls(int(cu[-1]), world_size, starts.reshape(-1)[rows], stops.reshape(-1)[rows], ranks[order])

    @classmethod
    def balanced(
        cls,
        mask: Mask,
        world_size: int,
        *,
        chunk_size: int | Literal["auto"] = "auto",
        imbalance: float = 0.03,
        token_slack: int | None = None,
        node_size: int | None = None,
        shape: Shape | None = None,
        machine: Machine | None = None,
    ) -> Layout:
        """The dispatch solver: equal work and equal tokens for all ranks, and little K/V to move between them.

        Documents are cut into chunks of `chunk_size` tokens (by default about 1/64 of a rank's tokens) and stay whole
        where they can. Of several layouts the one whose slowest rank is fastest wins, by the larger of its compute and
        its traffic on `machine` for a layer of `shape` (`plan.cost`). No rank holds more than `token_slack` tokens (by
        default one chunk) over an equal share. A rank may exceed the mean mask area by `imbalance` of it; a layout over
        that must be faster by five times the excess to be taken, as where documents are so short that moving them costs
        more than computing. With `node_size` ranks to a node, traffic inside a node counts less, and documents stay
        inside where they can.

        >>> Layout.balanced(Mask.causal([0, 6000, 8000, 12000]), world_size=2).spans
        (((0, 1408), (4480, 8000), (10432, 11456)), ((1408, 4480), (8000, 10432), (11456, 12000)))

        Works for every mask, needs no communication, and gives the same layout on every rank.
        """
        from longweave.plan.dispatch import solve  # the solver makes layouts, so it imports this module

        return solve(mask, world_size, chunk_size, imbalance, token_slack, node_size, shape, machine)

    @classmethod
    def from_spans(cls, total: int, spans: Sequence[Iterable[tuple[int, int]]]) -> Layout:
        """`spans[rank]` lists the `(start, stop)` spans of that rank, in the order of its local tokens."""
        total = check_total(total)
        by_rank = as_list(spans, f"spans is {shown(spans)}; give a list with the (start, stop) spans of every rank")
        world_size = check_world_size(len(by_rank))
        flat: list[tuple[int, int, int]] = []
        for rank, own in enumerate(by_rank):
            for span in as_list(own, f"rank {rank} has the spans {shown(own)}; give a list of (start, stop)"):
                try:
                    start, stop = map(plain_index, span)
                except (TypeError, ValueError, RuntimeError) as error:
                    raise InputError(f"rank {rank} has the span {shown(span)}; give (start, stop)") from error
                if start > stop:
                    raise InputError(f"rank {rank} has the span ({start}, {stop}), which ends before it starts")
                if start < 0:
                    raise InputError(f"rank {rank} has a span that starts at {start}; tokens count from 0")
                if stop > total:
                    raise InputError(
                        f"rank {rank} has a span that ends at {stop} but there are {total} tokens; correct the span or "
                        "the total"
                    )
                flat.append((start, stop, rank))
        rows = np.array(flat, dtype=np.int64).reshape(-1, 3)
        return cls(total, world_size, rows[:, 0], rows[:, 1], rows[:, 2])

    # -- what it says ------------------------------------------------------------------------------

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank its spans, in the order of its local tokens."""
        return tuple(self.spans_of(rank) for rank in range(self.world_size))

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        starts, stops = self.span_arrays(rank)
        return tuple(map(Span, starts.tolist(), stops.tolist()))

    def span_arrays(self, rank: int) -> tuple[Ints, Ints]:
        """The starts and stops of the spans of one rank."""
        rows = self.rows_of(rank)
        return self.starts[rows], self.stops[rows]

    def indices(self, rank: int) -> Ints:
        """The global index of each local token of a rank."""
        return expand(*self.span_arrays(rank))

    def positions(self, rank: int, cu_seqlens: object, offsets: object = None) -> Ints:
        """The position of each local token inside its own document: the only right source of RoPE positions.

        `offsets`, one int per document, is added where a document does not begin at position 0, such as the branches
        of `Mask.shared_prefix`, which begin at `prefix_len`.
        """
        cu = as_cu_seqlens(cu_seqlens)
        if int(cu[-1]) != self.total:
            raise InputError(f"cu_seqlens ends at {cu[-1]} but the layout has {self.total} tokens; use the same pack")
        tokens = self.indices(rank)
        document = np.searchsorted(cu, tokens, side="right") - 1
        begin = cu[:-1]
        if offsets is not None:
            extra = as_ints(offsets, "offsets", "give one int per document")
            if extra.shape != begin.shape:
                raise InputError(f"offsets has shape {extra.shape} for {len(begin)} documents; give one int each")
            if (np.abs(extra) > MOST_TOKENS).any():
                raise InputError(f"offsets holds {extra[np.argmax(np.abs(extra))]}; give at most {MOST_TOKENS}")
            begin = begin - extra
        return tokens - begin[document] if len(tokens) else tokens

    def owner(self, token: int | npt.ArrayLike) -> int | Ints:
        """The rank that holds a token (or an array of tokens)."""
        tokens = as_ints(token, "token", "give token indices")
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.total):
            bad = tokens[(tokens < 0) | (tokens >= self.total)].flat[0] if tokens.ndim else tokens
            raise InputError(f"token {bad} does not exist; the layout has tokens 0 to {self.total - 1}")
        starts, _, ranks = self.sorted
        found: Ints = ranks[np.searchsorted(starts, tokens, side="right") - 1]
        return found if tokens.ndim else int(found)

    # -- in bulk -----------------------------------------------------------------------------------

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens of each rank."""
        before = np.append(0, np.cumsum(self.stops - self.starts))
        return tuple(np.diff(before[self.offsets]).tolist())

    @cached_property
    def token_order(self) -> Ints:
        """The rows sorted by token."""
        return freeze(np.argsort(self.starts, kind="stable"))

    @cached_property
    def sorted(self) -> tuple[Ints, Ints, Ints]:
        """(starts, stops, ranks) in token order."""
        order = self.token_order
        return self.starts[order], self.stops[order], self.ranks[order]

    @cached_property
    def local_starts(self) -> Ints:
        """Where each span begins in the local tensor of its rank."""
        lengths = self.stops - self.starts
        before = np.append(0, np.cumsum(lengths))
        return freeze(before[:-1] - before[self.offsets[self.ranks]])

    def rows_of(self, rank: int) -> slice:
        """The rows of a rank."""
        is_int = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
        if not is_int or not 0 <= rank < self.world_size:
            raise InputError(f"rank {shown(rank)} does not exist; the layout has ranks 0 to {self.world_size - 1}")
        return slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))

    def local_spans(self, rank: int) -> tuple[Ints, Ints, Ints]:
        """The starts and stops of a rank's spans in token order, and what takes each span's tokens to local ones."""
        rows = self.rows_of(rank)
        order = np.argsort(self.starts[rows], kind="stable")
        starts, stops, local = (column[rows][order] for column in (self.starts, self.stops, self.local_starts))
        return starts, stops, local - starts

    def joined(self, size: int) -> Layout:
        """The same tokens on fewer ranks: every `size` neighbours become one, with its tokens in token order."""
        remedy = f"give a divisor of the {self.world_size} ranks"
        if self.world_size % check_int("size", size, remedy, 1):
            raise InputError(f"size is {size}; {remedy}")
        starts, stops, ranks = self.sorted
        blocks = ranks // size
        order = np.argsort(blocks, kind="stable")
        return Layout(self.total, self.world_size // size, starts[order], stops[order], blocks[order])

    # -- checks ------------------------------------------------------------------------------------

    def _check_cover(self) -> None:
        starts, stops, ranks = self.sorted
        ends = np.append(0, stops)
        wrong = np.flatnonzero(np.append(starts, self.total) != ends)
        if not len(wrong):
            return
        i = int(wrong[0])
        end = int(ends[i])
        if i < len(starts) and starts[i] < 0:
            raise InputError(f"rank {ranks[i]} has a span that starts at {starts[i]}; tokens count from 0")
        if i == len(starts) and end > self.total:
            raise InputError(f"a span ends at {end} but there are {self.total} tokens; correct the span or the total")
        if i < len(starts) and starts[i] < end:
            raise InputError(
                f"token {starts[i]} is held twice, by ranks {ranks[i - 1]} and {ranks[i]}; "
                "every token must lie in exactly one span"
            )
        raise InputError(f"token {end} is held by no rank; every token must lie in exactly one span")

    # -- identity ----------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        digest = blake2b(b"layout", digest_size=16)
        for part in (np.array([self.total, self.world_size]), self.offsets, self.starts, self.stops):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.fingerprint == other.fingerprint)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[type[Layout], tuple[int, int, Ints, Ints, Ints]]:
        return Layout, (self.total, self.world_size, self.starts, self.stops, self.ranks)

    def __repr__(self) -> str:
        return f"<Layout of {self.total} tokens on {self.world_size} ranks, {len(self.starts)} spans>"


def _columns(starts: object, stops: object, ranks: object, world_size: int) -> tuple[Ints, Ints, Ints]:
    """The columns of a layout's table, if they are that."""
    remedy = "make layouts with Layout.from_spans or its siblings"
    names = ("starts", "stops", "ranks")
    columns = [as_ints(column, name, remedy) for column, name in zip((starts, stops, ranks), names, strict=True)]
    shapes = [column.shape for column in columns]
    owner = columns[2]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1:
        raise InputError(f"starts, stops and ranks have the shapes {shapes}; {remedy}")
    if len(owner) and (owner[0] < 0 or owner[-1] >= world_size or (owner[1:] < owner[:-1]).any()):
        raise InputError(f"ranks is {shown(owner)}, which does not rise from 0 to {world_size - 1} at most; {remedy}")
    return columns[0], columns[1], owner


def _odd_tokens(lengths: Ints, world_size: int) -> Ints:
    """Which pieces of each document get one token more: (documents, 2P) of 0 and 1.

    The odd tokens of all documents are dealt to the ranks in turns, so no rank gets more than one token too many in
    total. Late tokens see more keys, so where a rank gets only one from a document, front or back piece matters: some
    documents are dealt from the front, others mirrored. Documents of like length stand together, and the choice follows
    the Thue-Morse sequence, which has no period that could fall into step with the dealing.
    """
    pieces = 2 * world_size
    odd = lengths % pieces
    order = np.lexsort((lengths, odd))
    odd_sorted = odd[order]
    dealt_before = np.cumsum(odd_sorted) - odd_sorted
    document = np.repeat(np.arange(len(order)), odd_sorted)
    turn = ramp(odd_sorted)
    rank = (np.repeat(dealt_before, odd_sorted) + turn) % world_size
    second = turn >= world_size  # this rank has already had one from this document
    alone = turn + world_size >= np.repeat(odd_sorted, odd_sorted)  # and gets no second one
    mirrored = np.repeat(_bit_parity(np.cumsum(odd_sorted > 0)) == 1, odd_sorted)
    back = second | (alone & mirrored)
    taken = np.zeros((len(lengths), pieces), dtype=np.int64)
    taken[order[document], np.where(back, pieces - 1 - rank, rank)] = 1
    return taken


def _bit_parity(numbers: Ints) -> Ints:
    """The number of 1 bits, modulo 2."""
    for shift in (32, 16, 8, 4, 2, 1):
        numbers = numbers ^ (numbers >> shift)
    return numbers & 1
