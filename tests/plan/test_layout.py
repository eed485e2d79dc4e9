"""Layouts: cover, balance, positions, identity."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longweave import InputError, Layout, Mask
from longweave.plan import slices as sl

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=12)
worlds = st.integers(1, 9)


def borders(items: list[int]) -> list[int]:
    return [0, *np.cumsum(items).tolist()]


def areas(mask: Mask, layout: Layout) -> np.ndarray:
    starts, stops, ranks = layout.sorted
    rows, span = sl.cut_q(mask.rows, starts, stops)
    return np.bincount(ranks[span], weights=sl.area(rows), minlength=layout.world_size)


def check(layout: Layout) -> None:
    tokens = np.concatenate([layout.indices(rank) for rank in range(layout.world_size)])
    assert sorted(tokens.tolist()) == list(range(layout.total)), "every token exactly once"
    assert [len(layout.indices(rank)) for rank in range(layout.world_size)] == list(layout.counts)
    for rank, own in enumerate(layout.spans):
        assert [i for start, stop in own for i in range(start, stop)] == layout.indices(rank).tolist()
        assert all(a.stop != b.start for a, b in itertools.pairwise(own)), "touching spans are one span"
        if layout.counts[rank]:
            assert (layout.owner(layout.indices(rank)) == rank).all()


@given(st.integers(0, 100), worlds)
def test_contiguous(total: int, world: int) -> None:
    layout = Layout.contiguous(total, world)
    check(layout)
    assert max(layout.counts) - min(layout.counts) <= 1
    assert all(len(own) <= 1 for own in layout.spans)


@given(lengths, worlds)
def test_zigzag(items: list[int], world: int) -> None:
    cu = borders(items)
    layout = Layout.zigzag(cu, world)
    check(layout)
    assert max(layout.counts) - min(layout.counts) <= 1
    for start, stop in itertools.pairwise(cu):
        owners = [layout.owner(token) for token in range(start, stop)]
        # Down the ranks and up again: 0 … P-1, P-1 … 0.
        turn = owners.index(max(owners)) if owners else 0
        assert owners[: turn + 1] == sorted(owners[: turn + 1])
        assert owners[turn:] == sorted(owners[turn:], reverse=True)
        held = np.bincount(owners, minlength=world) if owners else np.zeros(world)
        assert held.max() - held.min() <= 2, "two pieces a rank, each within one token of the others"
        if len(owners) >= 2 * world:
            assert len(_pieces(owners)) == 2 * world - 1, "2P pieces, the two in the middle on one rank"


def _pieces(owners: list[int]) -> list[int]:
    return [a for i, a in enumerate(owners) if i == 0 or owners[i - 1] != a]


def test_zigzag_of_a_long_document_has_equal_causal_work() -> None:
    for world in (2, 3, 8):
        work = areas(Mask.causal([0, 10_007]), Layout.zigzag([0, 10_007], world))
        assert work.max() / work.mean() < 1.002


@pytest.mark.parametrize("world", [2, 3, 8, 64])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 16, 31, 64, 100, None])
def test_zigzag_of_thousands_of_short_documents_is_balanced(world: int, length: int | None) -> None:
    rng = np.random.default_rng(0)
    cu = borders((np.full(4000, length) if length else rng.integers(1, 2 * world, 4000)).tolist())
    layout = Layout.zigzag(cu, world)
    assert max(layout.counts) - min(layout.counts) <= 1
    work = areas(Mask.causal(cu), layout)
    assert work.max() / work.mean() < 1.07


@given(lengths, worlds)
def test_positions(items: list[int], world: int) -> None:
    cu = borders(items)
    expected = np.concatenate([np.arange(n) for n in items])
    layout = Layout.zigzag(cu, world)
    for rank in range(world):
        assert layout.positions(rank, cu).tolist() == expected[layout.indices(rank)].tolist()


def test_positions_of_branches_go_on_after_the_prompt() -> None:
    mask = Mask.shared_prefix(4, [2, 3])
    layout = Layout.from_spans(9, [[(4, 9)], [(0, 4)]])
    assert layout.positions(0, mask.cu_seqlens, mask.position_offsets).tolist() == [4, 5, 4, 5, 6]
    assert layout.positions(1, mask.cu_seqlens, offsets=[0, 4, 4]).tolist() == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"offsets has shape \(2,\) for 3 documents"):
        layout.positions(0, mask.cu_seqlens, offsets=[0, 4])


def test_from_spans_keeps_the_order_of_a_rank() -> None:
    layout = Layout.from_spans(10, [[(7, 10), (0, 2)], [], [(2, 5), (5, 7)]])
    check(layout)
    assert layout.spans == (((7, 10), (0, 2)), (), ((2, 7),))
    assert layout.indices(0).tolist() == [7, 8, 9, 0, 1]
    assert layout.counts == (5, 0, 5)
    assert layout.owner(8) == 0
    assert layout.owner([0, 2, 9]).tolist() == [0, 2, 0]


@given(lengths, st.integers(1, 4), st.integers(1, 4))
def test_neighbouring_ranks_joined(items: list[int], blocks: int, size: int) -> None:
    layout = Layout.zigzag(borders(items), blocks * size)
    joined = layout.joined(size)
    check(joined)
    assert joined.world_size == blocks
    for block in range(blocks):
        held = np.concatenate([layout.indices(rank) for rank in range(block * size, (block + 1) * size)])
        assert joined.indices(block).tolist() == sorted(held.tolist())


@given(lengths, worlds)
def test_local_spans(items: list[int], world: int) -> None:
    layout = Layout.zigzag(borders(items), world)
    layout = Layout.from_spans(layout.total, [own[::-1] for own in layout.spans])
    for rank in range(world):
        tokens = layout.indices(rank)
        starts, stops, to_local = layout.local_spans(rank)
        assert starts.tolist() == sorted(starts.tolist())
        for start, stop, shift in zip(starts, stops, to_local, strict=True):
            assert tokens[start + shift : stop + shift].tolist() == list(range(start, stop))
        assert (stops - starts).sum() == len(tokens)


def test_identity() -> None:
    cu = [0, 137, 2178, 2267]
    a, b = Layout.zigzag(cu, 8), Layout.zigzag(torch.tensor(cu, dtype=torch.int32), 8)
    assert a == b == Layout.zigzag(np.array(cu), 8) == Layout.zigzag(tuple(cu), 8)
    assert len({a, b}) == 1
    assert a.fingerprint == b.fingerprint
    assert a != Layout.zigzag(cu, 4)
    assert a != Layout.contiguous(2267, 8)
    assert Layout.from_spans(4, [[(2, 4), (0, 2)]]) != Layout.from_spans(4, [[(0, 4)]]), "local order counts"
    assert pickle.loads(pickle.dumps(a)) == a
    again = pickle.loads(pickle.dumps(a))
    assert again.spans == a.spans
    assert not again.starts.flags.writeable
    assert Layout.from_spans(2267, a.spans) == a


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.zigzag([0, 3, 1], 2), r"falls from 3 to 1"),
        (lambda: [Layout.zigzag([0, 137], 2), Layout.zigzag([0, 137.0], 2)], r"holds floats, not ints"),
        (lambda: Layout.zigzag([False, 137], 2), r"bools, not ints"),
        (lambda: Layout.zigzag([0, [1, 2]], 2), r"not made of ints"),
        (lambda: Layout.zigzag(b"12345678", 2), r"is a bytes"),
        (lambda: Layout.from_spans(5, [[(0, 2.7), (2.2, 5)]]), r"span \(0, 2.7\)"),
        (lambda: Layout.contiguous(5, 2).positions(0, [0, 5], offsets=[1.9]), r"offsets holds floats"),
        (lambda: Layout.contiguous(5, 2).owner(1.5), r"token holds floats"),
        (lambda: Layout.zigzag((0, 5), 0), r"world_size is 0"),
        (lambda: Layout.contiguous(5, -1), r"world_size is -1"),
        (lambda: Layout.contiguous(5, 2.0), r"world_size is 2\.0"),
        (lambda: Layout.contiguous(-5, 2), r"total is -5"),
        (lambda: Layout.from_spans(5, [[(0, 3)], [(2, 5)]]), r"token 2 is held twice, by ranks 0 and 1"),
        (lambda: Layout.from_spans(5, [[(0, 3)], [(4, 5)]]), r"token 3 is held by no rank"),
        (lambda: Layout.from_spans(5, [[(0, 3)], []]), r"token 3 is held by no rank"),
        (lambda: Layout.from_spans(5, [[(0, 3)], [(3, 6)]]), r"ends at 6 but there are 5"),
        (lambda: Layout.from_spans(5, [[(-1, 5)]]), r"starts at -1"),
        (lambda: Layout.from_spans(5, [[(3, 0)]]), r"ends before it starts"),
        (lambda: Layout.from_spans(5, [[7]]), r"span 7"),
        (lambda: Layout.from_spans(5, []), r"world_size is 0"),
        (lambda: Layout.contiguous(5, 2).positions(0, [0, 4]), r"ends at 4 but the layout has 5"),
        (lambda: Layout.contiguous(5, 2).indices(2), r"rank 2 does not exist"),
        (lambda: Layout.contiguous(5, 2).owner(5), r"token 5 does not exist"),
        (lambda: Layout.contiguous(5, 2).owner([1, -1]), r"token -1 does not exist"),
    ],
)
def test_bad_layouts(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
