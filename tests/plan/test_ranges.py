"""Spans against sets of integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from longweave.plan.ranges import Span, expand, join_touching, overlaps, ramp

spans = st.tuples(st.integers(-5, 30), st.integers(0, 12)).map(lambda t: Span(t[0], t[0] + t[1]))


def ints(*items: Span) -> set[int]:
    return {i for span in items for i in range(span.start, span.stop)}


def apart(items: list[Span]) -> list[Span]:
    """Sorted spans that are not empty and do not overlap."""
    kept: list[Span] = []
    for span in sorted(s for s in items if s.length):
        if not kept or span.start >= kept[-1].stop:
            kept.append(span)
    return kept


@given(st.lists(spans), st.lists(spans))
def test_overlaps_finds_every_pair_once(left: list[Span], right: list[Span]) -> None:
    left = [s for s in left if s.length]
    right = apart(right)
    starts, stops = (np.array([s[i] for s in left], dtype=np.int64) for i in (0, 1))
    r_starts, r_stops = (np.array([s[i] for s in right], dtype=np.int64) for i in (0, 1))
    pairs = [*zip(*(x.tolist() for x in overlaps(starts, stops, r_starts, r_stops)), strict=True)]
    assert pairs == [(i, j) for i, a in enumerate(left) for j, b in enumerate(right) if ints(a) & ints(b)]


@given(st.lists(st.tuples(spans, st.integers(0, 1))))
def test_join_touching_keeps_every_integer_and_its_key(items: list[tuple[Span, int]]) -> None:
    columns = zip(*((s.start, s.stop, k) for s, k in items), strict=True) if items else ((), (), ())
    starts, stops, keys = (np.array(column, dtype=np.int64) for column in columns)
    new = join_touching(starts, stops, keys)
    listed = [(i, k) for s, k in items for i in range(s.start, s.stop)]
    assert [(i, k) for a, b, k in zip(*(x.tolist() for x in new), strict=True) for i in range(a, b)] == listed
    assert all(b > a for a, b in zip(*(x.tolist() for x in new[:2]), strict=True))


def test_ramp_and_expand() -> None:
    assert ramp(np.array([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    assert ramp(np.array([], dtype=np.int64)).tolist() == []
    assert expand(np.array([5, 1]), np.array([7, 4])).tolist() == [5, 6, 1, 2, 3]
