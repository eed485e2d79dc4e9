"""Heads over ranks, and K/V heads in steps."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longweave.plan.heads import head_groups, split_heads


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 12))
def test_every_query_head_once_with_its_kv_head(kv_heads: int, per_kv: int, ranks: int) -> None:
    heads = kv_heads * per_kv
    split = split_heads(heads, kv_heads, ranks)
    assert [h for start, stop in split.q for h in range(start, stop)] == list(range(heads))
    sizes = [stop - start for start, stop in split.q]
    assert max(sizes) - min(sizes) <= 1
    for (q0, q1), (k0, k1), runs in zip(split.q, split.k, split.runs, strict=True):
        seen = []
        for a, b, c, d in runs:
            assert (b - a) % (d - c) == 0
            for i in range(a, b):
                seen.append((q0 + i, k0 + c + (i - a) // ((b - a) // (d - c))))
        assert seen == [(q, q // per_kv) for q in range(q0, q1)]
        assert {k for _, k in seen} == set(range(k0, k1)), "no K/V head that is not read"
    assert split.replicated == (sum(k1 - k0 for k0, k1 in split.k) > kv_heads)


@given(st.integers(1, 16), st.integers(1, 16), st.none() | st.integers(1, 16), st.none() | st.integers(1, 16))
def test_head_groups_cover_all_heads(kv_heads: int, stride: int, first: int | None, last: int | None) -> None:
    groups = head_groups(kv_heads, stride, first, last)
    assert [h for start, stop in groups for h in range(start, stop)] == list(range(kv_heads))
    assert all(0 < stop - start <= stride for start, stop in groups)
    assert all(a[1] == b[0] for a, b in pairwise(groups))


@pytest.mark.parametrize(
    ("args", "widths"),
    [
        ((8, 4), [4, 4]),
        ((8, 4, 1, 1), [1, 3, 3, 1]),
        ((4, 4, 1, 1), [1, 2, 1]),  # one step with both
        ((4, 4, 2, 2), [2, 2]),  # and nothing between
        ((8, 4, 4, 4), [4, 4]),  # as large as the step: a no-op
        ((7, 3, 1, None), [1, 2, 3, 1]),  # a ragged last step
        ((7, 3, None, 1), [3, 3, 1]),
        ((8, 3, None, 1), [3, 3, 1, 1]),
        ((1, 1, None, None), [1]),
    ],
)
def test_first_and_last(args: tuple, widths: list[int]) -> None:
    assert [stop - start for start, stop in head_groups(*args)] == widths
