"""Who may attend to whom: a set of attention slices over the packed sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longweave.errors import InputError, shown
from longweave.plan import slices as sl
from longweave.plan.ranges import (
    MOST_TOKENS,
    Ints,
    Span,
    as_cu_seqlens,
    as_ints,
    as_list,
    check_int,
    check_total,
    frozen,
    plain_index,
)

MOST_KEYS = 3_000_000_000  # of a document: its square is below 2^63
MOST_DENSE = 1 << 15  # tokens of a mask that is wanted as an array: 1 GiB of bools

_KINDS: dict[str, tuple[int | None, int | None]] = {"full": (None, None), "causal": (None, 0)}


class Slice(NamedTuple):
    """Queries `q` see keys `k` where lo <= k_token - q_token <= hi, all in global coordinates; None is no limit."""

    q: Span
    k: Span
    lo: int | None = None
    hi: int | None = None

    @property
    def kind(self) -> str:
        """`full`, `causal` (a key no later than its query), or `band` (any other limits)."""
        for kind, limits in _KINDS.items():
            if (self.lo, self.hi) == limits:
                return kind
        return "band"


class Mask:
    """An immutable attention mask over `total` packed tokens. Make one with the constructors below.

    Two masks that name the same slices are equal, hash alike and have the same `fingerprint`. A query that no slice
    names sees nothing: its output is 0.
    """

    def __init__(self, total: int, rows: Ints, cu_seqlens: Ints, position_offsets: Ints | None = None) -> None:
        """From slices as rows of `plan.slices`, none of which allows a pair of another one."""
        self.total = check_total(total)
        self.cu_seqlens = as_cu_seqlens(cu_seqlens)
        if self.cu_seqlens[-1] != self.total:
            raise InputError(
                f"cu_seqlens ends at {self.cu_seqlens[-1]} but the mask has {total} tokens; use the same pack"
            )
        self.rows = frozen(sl.tighten(_check_rows(rows, total))[0])
        #: for each document what its positions begin with (see `Layout.positions`); None is 0 for all
        self.position_offsets = None if position_offsets is None else self._check_offsets(position_offsets)
        _check_area(self.rows)

    # -- constructors ------------------------------------------------------------------------------

    @classmethod
    def causal(cls, cu_seqlens: object) -> Mask:
        """Every token sees itself and the tokens before it in its own document."""
        return cls._per_document(cu_seqlens, -sl.NO_LIMIT, 0)

    @classmethod
    def full(cls, cu_seqlens: object) -> Mask:
        """Every token sees its whole document."""
        return cls._per_document(cu_seqlens, -sl.NO_LIMIT, sl.NO_LIMIT)

    @classmethod
    def sliding_window(cls, cu_seqlens: object, window: int) -> Mask:
        """Every token sees itself and the `window - 1` tokens before it in its own document."""
        return cls._per_document(cu_seqlens, max(1 - check_window(window), -sl.NO_LIMIT), 0)

    @classmethod
    def prefix_causal(cls, cu_seqlens: object, prefix_lens: Sequence[int] | int) -> Mask:
        """The first `prefix_lens[i]` tokens of document i all see each other; the rest is causal."""
        cu = as_cu_seqlens(cu_seqlens)
        start, stop = cu[:-1], cu[1:]
        prefix = as_ints(prefix_lens, "prefix_lens", "give one int per document")
        if prefix.ndim and prefix.shape != start.shape:
            raise InputError(f"prefix_lens has {len(prefix)} entries for {len(start)} documents; give one each")
        prefix = np.broadcast_to(prefix, start.shape)
        bad = np.flatnonzero((prefix < 0) | (prefix > stop - start))
        if len(bad):
            i = int(bad[0])
            raise InputError(
                f"prefix_lens[{i}] is {prefix[i]} but document {i} has {stop[i] - start[i]} tokens; "
                "a prefix is between 0 and its document's length"
            )
        edge = start + prefix
        head = _columns(start, edge, start, edge, -sl.NO_LIMIT, sl.NO_LIMIT)
        tail = _columns(edge, stop, start, stop, -sl.NO_LIMIT, 0)
        return cls(int(cu[-1]), np.concatenate([head, tail]), cu)

    @classmethod
    def shared_prefix(cls, prefix_len: int, branch_lens: Sequence[int]) -> Mask:
        """One prompt, many answers: every branch sees the prompt and itself (causally), no branch sees another.

        The prompt comes first and is itself causal. `mask.cu_seqlens` has the prompt as document 0 and the branches
        after it; their positions go on where the prompt ends: `layout.positions(rank, mask.cu_seqlens,
        mask.position_offsets)`.
        """
        remedy = f"give the number of tokens of the prompt, at most {MOST_TOKENS}"
        prefix_len = check_int("prefix_len", prefix_len, remedy, 0, MOST_TOKENS)
        branches = as_ints(branch_lens, "branch_lens", "give one length per branch")
        if branches.ndim != 1 or (branches < 0).any():
            raise InputError(f"branch_lens is {shown(branch_lens)}; give one length per branch")
        cu = as_cu_seqlens(np.cumsum(np.append([0, prefix_len], branches)))
        own = _columns(cu[:-1], cu[1:], cu[:-1], cu[1:], -sl.NO_LIMIT, 0)
        prompt = _columns(cu[1:-1], cu[2:], 0, prefix_len, -sl.NO_LIMIT, sl.NO_LIMIT)
        offsets = np.append(0, np.full(len(branches), prefix_len))
        return cls(int(cu[-1]), np.concatenate([own, prompt]), cu, offsets)

    @classmethod
    def from_slices(cls, total: int, slices: Iterable[Slice | tuple[object, ...]]) -> Mask:
        """A mask from `(q span, k span, kind)` in global coordinates.

        `kind` is "full", "causal" (keys whose token index is at most the query's) or limits `(lo, hi)` on
        `k - q`, None for no limit. A pair that is named twice would count twice in the softmax: refused.

            Mask.from_slices(10, [((0, 4), (0, 4), "causal"), ((4, 10), (2, 10), (-3, 0))])
        """
        total = check_total(total)
        items = as_list(slices, f"slices is {shown(slices)}; give a list of (q span, k span, kind)")
        raw = np.array([_parse(i, total, item) for i, item in enumerate(items)], dtype=np.int64)
        rows, origin = sl.tighten(raw.reshape(-1, 6))
        _check_area(rows)
        clash = sl.first_overlap(rows)
        if clash:
            a, b = sorted(int(origin[i]) for i in clash)
            raise InputError(
                f"slices {a} and {b} both allow some query-key pair, which would count twice in the softmax; "
                "cut one of them"
            )
        return cls(total, rows, frozen([0, total]))

    @classmethod
    def _per_document(cls, cu_seqlens: object, lo: int, hi: int) -> Mask:
        cu = as_cu_seqlens(cu_seqlens)
        return cls(int(cu[-1]), _columns(cu[:-1], cu[1:], cu[:-1], cu[1:], lo, hi), cu)

    def _check_offsets(self, offsets: object) -> Ints:
        found = as_ints(offsets, "position_offsets", "give one int per document")
        if found.shape != (len(self.cu_seqlens) - 1,) or (np.abs(found) > MOST_TOKENS).any():
            raise InputError(f"position_offsets is {shown(offsets)}; give one int per document")
        return frozen(found)

    def windowed(self, window: int) -> Mask:
        """The same mask, but a token sees no further back than `window` tokens, itself included.

        Distances are counted in positions: an answer of `shared_prefix` sees less of its prompt the further it gets.
        Where a mask lets tokens see ahead, a window could be meant one way or both: refused, unless it cuts nothing.
        """
        begin = self.cu_seqlens[:-1] - (0 if self.position_offsets is None else self.position_offsets)
        query, key = (begin[_document(self.cu_seqlens, self.rows[:, column])] for column in (sl.Q0, sl.K0))
        rows = self.rows.copy()
        rows[:, sl.LO] = np.maximum(rows[:, sl.LO], max(1 - check_window(window), -sl.NO_LIMIT) + key - query)
        cut = Mask(self.total, rows, self.cu_seqlens, self.position_offsets)
        if cut.area == self.area:
            return self
        furthest = np.minimum(self.rows[:, sl.HI], self.rows[:, sl.K1] - 1 - self.rows[:, sl.Q0])
        if (furthest > key - query).any():
            raise InputError(
                f"a window of {window} was given with a mask that lets tokens see ahead; say how far tokens see in "
                "both directions with Mask.from_slices and limits (lo, hi)"
            )
        return cut

    # -- what it says ------------------------------------------------------------------------------

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """The slices; limits that cut nothing are None."""
        return tuple(
            Slice(
                Span(q0, q1),
                Span(k0, k1),
                None if lo <= -sl.NO_LIMIT else lo,
                None if hi >= sl.NO_LIMIT else hi,
            )
            for q0, q1, k0, k1, lo, hi in self.rows.tolist()
        )

    @cached_property
    def area(self) -> int:
        """The number of allowed query-key pairs: the work."""
        return int(sl.area(self.rows).sum())

    def crosses_documents(self, cu_seqlens: object) -> tuple[int, int] | None:
        """The first (document of a query, document of a key that it sees) that are not the same, or None."""
        cu = as_cu_seqlens(cu_seqlens)
        if int(cu[-1]) != self.total:
            raise InputError(f"cu_seqlens ends at {cu[-1]} but the mask has {self.total} tokens; use the same pack")
        full = np.flatnonzero(cu[1:] > cu[:-1])
        starts, stops = cu[:-1][full], cu[1:][full]
        rows, place = sl.cut_q(self.rows, starts, stops)
        # Each row sees every key of its box, so the first key outside the document is one of its two ends.
        before, after = rows[:, sl.K0] < starts[place], rows[:, sl.K1] > stops[place]
        found = np.flatnonzero(before | after)
        if not len(found):
            return None
        first, place = rows[found, sl.K0], place[found]
        key = np.where(before[found], first, np.maximum(first, stops[place]))
        pairs = np.stack([full[place], np.searchsorted(cu, key, side="right") - 1])
        query_document, key_document = pairs[:, np.lexsort(pairs[::-1])[0]].tolist()
        return query_document, key_document

    def dense(self) -> npt.NDArray[np.bool_]:
        """The mask as a `(total, total)` array of bools, queries down, keys across. For tests and pictures."""
        if self.total > MOST_DENSE:
            raise InputError(f"the mask has {self.total} tokens; dense() is for {MOST_DENSE} at most, use slices")
        allowed = np.zeros((self.total, self.total), dtype=bool)
        for q0, q1, k0, k1, lo, hi in self.rows.tolist():
            distance = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
            allowed[q0:q1, k0:k1] |= (distance >= lo) & (distance <= hi)
        return allowed

    # -- identity ----------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        digest = blake2b(b"mask", digest_size=16)
        digest.update(np.int64(self.total).tobytes())
        order = np.lexsort(self.rows.T[::-1])
        digest.update(self.rows[order].tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mask) and self.fingerprint == other.fingerprint)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[type[Mask], tuple[int, Ints, Ints, Ints | None]]:
        return Mask, (self.total, self.rows, self.cu_seqlens, self.position_offsets)

    def __repr__(self) -> str:
        return f"<Mask of {self.total} tokens, {len(self.rows)} slices, {self.area} pairs>"


def check_window(window: object) -> int:
    return check_int("window", window, "give the number of tokens seen, itself included, at least 1", 1)


def _check_rows(rows: object, total: int) -> Ints:
    found = as_ints(rows, "rows", "make masks with Mask.from_slices or its siblings")
    if found.ndim != 2 or found.shape[1] != 6:
        raise InputError(f"rows has shape {found.shape}; make masks with Mask.from_slices or its siblings")
    spans = found[:, : sl.LO]
    if found.size and (spans.min() < 0 or spans.max() > total or np.abs(found[:, sl.LO :]).max() > 2 * sl.NO_LIMIT):
        raise InputError(f"a slice leaves the {total} tokens; make masks with Mask.from_slices or its siblings")
    return found


def _check_area(rows: Ints) -> None:
    """Pairs are counted in 64 bits."""
    queries, keys = (rows[:, sl.Q1] - rows[:, sl.Q0]).astype(float), (rows[:, sl.K1] - rows[:, sl.K0]).astype(float)
    if not len(rows):
        return
    if keys.max() > MOST_KEYS:
        raise InputError(
            f"a slice of the mask has {int(keys.max())} keys; give documents of at most {MOST_KEYS} tokens"
        )
    pairs = (queries * keys).sum()
    if pairs > MOST_KEYS**2:
        raise InputError(
            f"the mask has up to {pairs:.2g} pairs of query and key, which cannot be counted in 64 bits; "
            "give fewer documents, or shorter ones"
        )


def _document(cu_seqlens: Ints, tokens: Ints) -> Ints:
    return np.searchsorted(cu_seqlens, tokens, side="right") - 1


def _columns(*columns: Ints | int) -> Ints:
    return np.stack(np.broadcast_arrays(*columns), axis=1).astype(np.int64)


def _parse(i: int, total: int, item: Any) -> tuple[int, ...]:
    """One slice as a row."""
    try:
        if isinstance(item, Slice):
            item = (item.q, item.k, (item.lo, item.hi))
        (q0, q1), (k0, k1), kind = item
        lo, hi = _KINDS[kind] if isinstance(kind, str) else kind
        q0, q1, k0, k1 = map(plain_index, (q0, q1, k0, k1))
        lo, hi = -sl.NO_LIMIT if lo is None else plain_index(lo), sl.NO_LIMIT if hi is None else plain_index(hi)
        limits = (min(max(limit, -sl.NO_LIMIT), sl.NO_LIMIT) for limit in (lo, hi))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(
            f"slice {i} is {shown(item)}; give ((q start, q stop), (k start, k stop), kind) with kind "
            '"full", "causal" or limits (lo, hi) on k - q'
        ) from error
    if not (0 <= q0 <= q1 <= total and 0 <= k0 <= k1 <= total):
        raise InputError(f"slice {i} has spans ({q0}, {q1}) and ({k0}, {k1}); they must lie inside 0 to {total}")
    return (q0, q1, k0, k1, *limits)
