"""Half-open spans of integers, one by one (`Span`) and in bulk (arrays of starts and stops).

expand [5, 1] [7, 4]      overlaps                     join_touching
                          ────   ─────   left          ─────│────  │────
5 6 1 2 3                   ──────  ──   right         ──────────  │────
                          (0,0)(1,0)(1,1)              equal keys  another key
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from math import inf, nan
from operator import index
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longweave.errors import InputError, shown

Ints = npt.NDArray[np.int64]

MOST_TOKENS = (1 << 40) - 1  # of a packed sequence: sums and products of indices stay far from 64 bits
MOST_RANKS = 1 << 20


class Span(NamedTuple):
    """The integers `start <= i < stop`. Immutable; equal to the plain tuple `(start, stop)`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return max(0, self.stop - self.start)


# -- in bulk ------------------------------------------------------------------------------------------


def overlaps(starts: Ints, stops: Ints, sorted_starts: Ints, sorted_stops: Ints) -> tuple[Ints, Ints]:
    """All index pairs (left, right) whose spans share an integer.

    Left spans may be anything that is not empty; right spans are sorted, disjoint and not empty. The pairs come
    in left order, then in right order. Cost: two binary searches per left span, plus the result.
    """
    first = np.searchsorted(sorted_stops, starts, side="right")
    last = np.searchsorted(sorted_starts, stops, side="left")
    counts = np.maximum(last - first, 0)
    left = np.repeat(np.arange(len(starts)), counts)
    return left, np.repeat(first, counts) + ramp(counts)


def ramp(counts: Ints) -> Ints:
    """0 … counts[0]-1, 0 … counts[1]-1, and so on: `[2, 3] -> [0, 1, 0, 1, 2]`."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)


def expand(starts: Ints, stops: Ints) -> Ints:
    """Every integer of every span, in the order given."""
    lengths = stops - starts
    return np.repeat(starts, lengths) + ramp(lengths)


def join_touching(starts: Ints, stops: Ints, keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Drop empty spans, then make one span of neighbours in the list that touch and have the same key. New arrays."""
    full = stops > starts
    if not full.all():
        starts, stops, keys = starts[full], stops[full], keys[full]
    if not len(starts):
        return starts.copy(), stops.copy(), keys.copy()
    begins = np.ones(len(starts), dtype=bool)
    begins[1:] = (starts[1:] != stops[:-1]) | (keys[1:] != keys[:-1])
    firsts = np.flatnonzero(begins)
    lasts = np.append(firsts[1:], len(starts)) - 1
    return starts[firsts], stops[lasts], keys[firsts]


def frozen(array: npt.ArrayLike) -> Ints:
    """A read-only int64 array."""
    result = np.ascontiguousarray(array, dtype=np.int64)
    if result.flags.writeable:
        result = result.copy() if result is array else result
        result.flags.writeable = False
    return result


def freeze(array: Ints) -> Ints:
    """Make an array read-only that nobody else holds: unlike `frozen`, without a copy."""
    array.flags.writeable = False
    return array


# -- cu_seqlens ---------------------------------------------------------------------------------------


def as_cu_seqlens(cu_seqlens: object) -> Ints:
    """Check document borders and return them as an int64 array.

    Takes a list, tuple, numpy array, or anything with `.tolist()` such as a torch tensor.
    """
    remedy = "give the document borders as increasing ints, such as [0, 137, 2178]"
    given = cu_seqlens
    if not isinstance(cu_seqlens, np.ndarray | list | tuple):
        if not hasattr(cu_seqlens, "tolist"):
            raise InputError(f"cu_seqlens is a {type(cu_seqlens).__name__}; {remedy}")
        try:
            cu_seqlens = cu_seqlens.tolist()
        except (TypeError, RuntimeError) as error:  # a tensor without values, or one that is not dense
            raise InputError(
                f"cu_seqlens is a {type(given).__name__} that cannot be read ({error}); {remedy}"
            ) from error
    cu = as_ints(cu_seqlens, "cu_seqlens", remedy, getattr(given, "dtype", None))
    if cu.ndim != 1 or not len(cu):
        raise InputError(f"cu_seqlens has shape {cu.shape}; {remedy}")
    if cu[0] != 0:
        raise InputError(f"cu_seqlens starts at {cu[0]}, not at 0; {remedy}")
    falls = np.flatnonzero(cu[1:] < cu[:-1])
    if len(falls):
        i = int(falls[0])
        raise InputError(f"cu_seqlens falls from {cu[i]} to {cu[i + 1]} at entry {i + 1}; {remedy}")
    if cu[-1] > MOST_TOKENS:
        raise InputError(f"cu_seqlens ends at {cu[-1]}; a packed sequence has at most {MOST_TOKENS} tokens")
    return frozen(cu)


def as_ints(values: object, name: str, remedy: str, dtype: object = None) -> Ints:
    """An int64 array of what are really ints: floats and bools are refused, not rounded.

    dtype: of what the values were taken from, for the error's text; numpy calls every list of floats float64.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(f"{name} is not made of ints ({error}); {remedy}") from error
    holds_bools = _holds_bools(values)
    if holds_bools or (array.dtype.kind not in "iu" and array.size):
        held = "floats" if isinstance(values, list | tuple | float) and array.dtype.kind == "f" else array.dtype
        held = str(dtype or ("bools" if holds_bools else held)).removeprefix("torch.")
        raise InputError(f"{name} holds {held}, not ints; {remedy}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InputError(f"{name} holds {array.max()}, which is beyond 64 bits; {remedy}")
    return array.astype(np.int64)


def _holds_bools(values: object) -> bool:
    """numpy takes a list of ints and bools for one of ints."""
    return isinstance(values, list | tuple) and any(
        isinstance(value, bool | np.bool_) or _holds_bools(value) for value in values
    )


def as_list(values: object, problem: str) -> list[Any]:
    """The values of anything that has an order; `problem` is what to say of anything else."""
    if isinstance(values, str | bytes | Mapping | Set):
        raise InputError(problem)
    try:
        return list(values)  # type: ignore[call-overload, no-any-return]
    except (TypeError, RuntimeError) as error:
        raise InputError(problem) from error


def plain_index(value: object) -> int:
    """As `operator.index`, of what is no bool."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{value} is a bool")
    return index(value)  # type: ignore[arg-type]


def check_int(name: str, value: object, remedy: str, least: int, most: int | None = None) -> int:
    """Really an int, and neither less than `least` nor more than `most`."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_int or value < least or (most is not None and value > most):  # type: ignore[operator]
        raise InputError(f"{name} is {shown(value)}; {remedy}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def check_number(name: str, value: object, remedy: str, least: float = -inf, most: float = inf) -> float:
    """Really a number, not NaN, and neither less than `least` nor more than `most`."""
    try:
        is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        number = float(value) if is_number else nan  # type: ignore[arg-type]
    except OverflowError:
        number = nan
    if not least <= number <= most:
        raise InputError(f"{name} is {shown(value)}; {remedy}")
    return number


def check_world_size(world_size: object) -> int:
    return check_int(
        "world_size", world_size, f"give the number of ranks, at least 1, at most {MOST_RANKS}", 1, MOST_RANKS
    )


def check_total(total: object) -> int:
    remedy = f"give the number of tokens in the packed sequence, at least 0, at most {MOST_TOKENS}"
    return check_int("total", total, remedy, 0, MOST_TOKENS)
