"""Masks against dense boolean matrices built the obvious way."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longweave import InputError, Mask, Slice, Span
from longweave.plan import slices as sl

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def borders(items: list[int]) -> list[int]:
    return [0, *np.cumsum(items).tolist()]


def documents(items: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(items)), items)


def same_document(items: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    doc, token = documents(items), np.arange(sum(items))
    return doc[:, None] == doc[None, :], token[:, None], token[None, :]


@given(lengths)
def test_causal_and_full(items: list[int]) -> None:
    same, q, k = same_document(items)
    assert np.array_equal(Mask.causal(borders(items)).dense(), same & (k <= q))
    assert np.array_equal(Mask.full(borders(items)).dense(), same)


@given(lengths, st.integers(1, 12))
def test_sliding_window(items: list[int], window: int) -> None:
    same, q, k = same_document(items)
    assert np.array_equal(Mask.sliding_window(borders(items), window).dense(), same & (k <= q) & (q - k < window))


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), min_size=1, max_size=5))
def test_prefix_causal(items: list[tuple[int, float]]) -> None:
    sizes = [n for n, _ in items]
    prefix = [round(n * share) for n, share in items]
    same, q, k = same_document(sizes)
    start = np.repeat(borders(sizes)[:-1], sizes)
    in_prefix = np.arange(sum(sizes)) - start < np.repeat(prefix, sizes)
    expected = same & ((k <= q) | (in_prefix[:, None] & in_prefix[None, :]))
    assert np.array_equal(Mask.prefix_causal(borders(sizes), prefix).dense(), expected)


@given(st.integers(0, 7), st.lists(st.integers(0, 6), max_size=5))
def test_shared_prefix(prefix: int, branches: list[int]) -> None:
    same, q, k = same_document([prefix, *branches])
    expected = (k <= q) & (same | (k < prefix))
    mask = Mask.shared_prefix(prefix, branches)
    assert np.array_equal(mask.dense(), expected)
    assert mask.area == expected.sum()


span = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda t: (min(t), max(t)))
limit = st.none() | st.integers(-13, 13)


@given(span, span, limit, limit, span, span)
def test_area_of_any_slice_cut_by_any_two_spans(q, k, lo, hi, q_cut, k_cut) -> None:
    mask = Mask.from_slices(12, [Slice(Span(*q), Span(*k), lo, hi)])
    dense = mask.dense()
    expected = np.zeros((12, 12), dtype=bool)
    for i in range(*q):
        for j in range(*k):
            expected[i, j] = (lo is None or j - i >= lo) and (hi is None or j - i <= hi)
    assert np.array_equal(dense, expected)
    assert mask.area == expected.sum()
    rows = mask.rows
    for cut, (start, stop) in ((sl.cut_q, q_cut), (sl.cut_k, k_cut)):
        rows = cut(rows, *np.array([[start], [stop]] if stop > start else [[], []], dtype=np.int64))[0]
    assert sl.area(rows).sum() == expected[slice(*q_cut), slice(*k_cut)].sum()


@given(span, span, limit, limit, st.integers(-20, 20), st.integers(-20, 20))
def test_move_keeps_the_pairs(q, k, lo, hi, dq, dk) -> None:
    rows = Mask.from_slices(12, [(q, k, (lo, hi))]).rows
    moved = sl.move(rows, dq, dk)
    assert _pairs(moved) == {(i + dq, j + dk) for i, j in _pairs(rows)}


def _pairs(rows: np.ndarray) -> set[tuple[int, int]]:
    return {
        (q, k)
        for q0, q1, k0, k1, lo, hi in rows.tolist()
        for q in range(q0, q1)
        for k in range(k0, k1)
        if lo <= k - q <= hi
    }


@given(st.lists(st.tuples(span, span, st.tuples(limit, limit)), max_size=4))
def test_overlap_is_found_exactly(items) -> None:
    seen: set[tuple[int, int]] = set()
    clash = False
    for (q0, q1), (k0, k1), (lo, hi) in items:
        own = {
            (q, k)
            for q in range(q0, q1)
            for k in range(k0, k1)
            if (lo is None or k - q >= lo) and (hi is None or k - q <= hi)
        }
        clash |= bool(seen & own)
        seen |= own
    if clash:
        with pytest.raises(InputError, match="count twice"):
            Mask.from_slices(12, items)
    else:
        assert _pairs(Mask.from_slices(12, items).rows) == seen


@given(st.lists(st.tuples(span, span, st.tuples(limit, limit)), max_size=4), st.lists(st.integers(0, 12), max_size=5))
def test_the_first_pair_of_two_documents(items, cuts: list[int]) -> None:
    mask = Mask(12, _rows(items), np.array([0, 12]))  # pairs may be named twice here
    cu = sorted([0, 12, *cuts])
    document = [max(d for d, start in enumerate(cu[:-1]) if start <= token) for token in range(12)]
    crossing = sorted((document[q], document[k]) for q, k in _pairs(mask.rows) if document[q] != document[k])
    assert mask.crosses_documents(cu) == (crossing[0] if crossing else None)


def _rows(items) -> np.ndarray:
    masks = [Mask.from_slices(12, [item]).rows for item in items]
    return np.concatenate([*masks, np.empty((0, 6), dtype=np.int64)])


def test_masks_that_cross_documents() -> None:
    cu = [0, 4, 4, 9]
    assert Mask.sliding_window(cu, 3).crosses_documents(cu) is None
    assert Mask.causal([0, 9]).crosses_documents(cu) == (2, 0)
    assert Mask.full([0, 9]).crosses_documents(cu) == (0, 2)
    assert Mask.shared_prefix(3, [2, 4]).crosses_documents([0, 3, 5, 9]) == (1, 0)
    assert Mask.causal([0]).crosses_documents([0, 0]) is None


def test_positions_of_a_shared_prefix_go_on() -> None:
    mask = Mask.shared_prefix(4, [2, 0, 3])
    assert mask.position_offsets.tolist() == [0, 4, 4, 4]
    assert pickle.loads(pickle.dumps(mask)).position_offsets.tolist() == [0, 4, 4, 4]
    assert Mask.shared_prefix(4, []).position_offsets.tolist() == [0]
    others = [Mask.causal([0, 4]), Mask.full([0, 4]), Mask.sliding_window([0, 4], 2), Mask.prefix_causal([0, 4], 1)]
    assert [mask.position_offsets for mask in others] == [None] * 4


def test_large_areas_are_exact() -> None:
    n = 50_000_000
    assert Mask.causal([0, n]).area == n * (n + 1) // 2
    assert Mask.full([0, n]).area == n * n
    assert Mask.sliding_window([0, n], 4096).area == 4096 * 4097 // 2 + (n - 4096) * 4096


def test_limits_beyond_all_tokens_are_no_limits() -> None:
    assert Mask.sliding_window([0, 9], 2**70) == Mask.causal([0, 9])
    assert Mask.from_slices(9, [((0, 9), (0, 9), (-(2**70), 2**70))]) == Mask.full([0, 9])


def test_identity_and_kinds() -> None:
    a = Mask.causal([0, 4, 9])
    b = Mask.from_slices(9, [((4, 9), (4, 9), "causal"), ((0, 4), (0, 4), "causal")])
    assert a == b
    assert hash(a) == hash(b)
    assert a.fingerprint == b.fingerprint
    assert a != Mask.full([0, 4, 9])
    again = pickle.loads(pickle.dumps(a))
    assert again == a
    assert again.cu_seqlens.tolist() == [0, 4, 9]
    assert [s.kind for s in Mask.sliding_window([0, 9], 2).slices] == ["band"]
    assert [s.kind for s in a.slices] == ["causal", "causal"]
    assert [s.kind for s in Mask.prefix_causal([0, 5], [5]).slices] == ["full"]
    assert Mask.causal([0, 1]).slices == (Slice(Span(0, 1), Span(0, 1)),), "one token: the limit cuts nothing"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask.causal([0, 5, 3]), r"falls from 5 to 3 at entry 2"),
        (lambda: Mask.causal([1, 5]), r"starts at 1"),
        (lambda: Mask.causal([]), r"shape \(0,\)"),
        (lambda: Mask.causal([0, -1]), r"falls from 0 to -1"),
        (lambda: Mask.causal([0, 1.5]), r"holds floats, not ints"),
        (lambda: Mask.causal([[0, 1], [1, 2]]), r"shape \(2, 2\)"),
        (lambda: Mask.causal(7), r"is a int"),
        (lambda: Mask.causal([0, [1]]), r"not made of ints"),
        (lambda: Mask.sliding_window([0, 5], 0), r"window is 0"),
        (lambda: Mask.prefix_causal([0, 5], [6]), r"prefix_lens\[0\] is 6 but document 0 has 5"),
        (lambda: Mask.prefix_causal([0, 5], [1, 2]), r"2 entries for 1 documents"),
        (lambda: Mask.prefix_causal([0, 5], [1.0]), r"floats"),
        (lambda: Mask.shared_prefix(5, [3.7]), r"branch_lens holds floats"),
        (lambda: Mask.from_slices(5, [((0, 2.5), (0, 2), "full")]), r"slice 0 is"),
        (lambda: Mask.shared_prefix(-1, [2]), r"-1"),
        (lambda: Mask.shared_prefix(3, [2, -1]), r"branch_lens is"),
        (lambda: Mask.from_slices(5, [((0, 9), (0, 2), "full")]), r"inside 0 to 5"),
        (lambda: Mask.from_slices(5, [((0, 2), (0, 2), "diagonal")]), r"slice 0 is"),
        (lambda: Mask.from_slices(5, [((0, 2), "full")]), r"slice 0 is"),
        (lambda: Mask.causal([0, 5]).crosses_documents([0, 4]), r"ends at 4 but the mask has 5 tokens"),
    ],
)
def test_bad_masks(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def _positions(mask: Mask) -> np.ndarray:
    document = np.searchsorted(mask.cu_seqlens, np.arange(mask.total), side="right") - 1
    begin = mask.cu_seqlens[:-1] - (0 if mask.position_offsets is None else mask.position_offsets)
    return np.arange(mask.total) - begin[document]


@given(st.integers(1, 12), st.integers(0, 6), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_a_window_counts_positions(window: int, prefix: int, branches: list[int]) -> None:
    cu = np.cumsum([0, prefix, *branches])
    masks = [Mask.causal(cu), Mask.shared_prefix(prefix, branches), Mask.sliding_window(cu, 3)]
    masks.append(Mask.from_slices(12, [((0, 6), (0, 6), "causal"), ((6, 12), (2, 12), (-5, 0))]))
    for mask in masks:
        at = _positions(mask)
        near = at[:, None] - at[None, :] < window
        assert np.array_equal(mask.windowed(window).dense(), mask.dense() & near)
        assert mask.windowed(window).cu_seqlens.tolist() == mask.cu_seqlens.tolist()
    assert Mask.causal(cu).windowed(window) == Mask.sliding_window(cu, window)


def test_a_window_on_a_mask_that_looks_ahead_is_refused_unless_it_cuts_nothing() -> None:
    for mask in (Mask.full([0, 5, 9]), Mask.prefix_causal([0, 5, 9], [3, 2])):
        assert mask.windowed(5) is mask
        with pytest.raises(InputError, match="window of 2 was given with a mask that lets tokens see ahead"):
            mask.windowed(2)
