"""Where pooled documents run: at home, or levelled with few cuts, and only if it pays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_layout import check
from test_routing import layouts

from longweave import Layout, Mask
from longweave.plan import homing
from longweave.plan.cost import CPU, Machine, Shape, areas
from longweave.plan.homing import GRAIN, WORTH, DecoderWork, _Curve, _in_chain, _seconds, home_layout, level, levelled

SHAPE = Shape(heads=8, kv_heads=2, head_dim=64)
WORK = DecoderWork(flops_per_token=2e8, flops_per_pair=24.0 * SHAPE.flops_per_pair, bytes_home=1024.0)
KINDS = {"causal": Mask.causal, "full": Mask.full}

counts = st.lists(st.integers(0, 30), min_size=1, max_size=7)


@st.composite
def brought(draw: st.DrawFn, longest: int = 3000, ranks: int = 6) -> tuple[Mask, Layout]:
    """Documents of every rank, of very different lengths, some ranks without any: at least one token in all."""
    lengths = st.one_of(st.integers(0, 40), st.integers(0, longest))
    ranks_of = st.lists(st.lists(lengths, max_size=4), min_size=1, max_size=ranks)
    documents = draw(ranks_of.filter(lambda all_ranks: any(map(sum, all_ranks))))
    borders = np.cumsum([0, *(length for some in documents for length in some)])
    return KINDS[draw(st.sampled_from(list(KINDS)))](borders), home_layout([sum(some) for some in documents])


def stays(layout: Layout, home: Layout) -> int:
    return sum(len(np.intersect1d(layout.indices(r), home.indices(r))) for r in range(home.world_size))


# -- home --------------------------------------------------------------------------------------------


@given(counts)
@example([0])
@example([0, 0, 0])
@example([0, 5, 0, 0, 2, 0])
def test_home_is_contiguous_in_rank_order(tokens: list[int]) -> None:
    home = home_layout(tokens)
    check(home)
    assert (home.total, home.world_size, list(home.counts)) == (sum(tokens), len(tokens), tokens)
    found = [token for rank in range(len(tokens)) for token in home.indices(rank).tolist()]
    assert found == list(range(sum(tokens)))


# -- level -------------------------------------------------------------------------------------------


def flops(mask: Mask, layout: Layout, work: DecoderWork) -> np.ndarray:
    return np.array(layout.counts) * work.flops_per_token + areas(mask, layout) * work.flops_per_pair


def cuts(mask: Mask, layout: Layout) -> tuple[int, int]:
    """Documents that are cut, and the places where."""
    owners = layout.owner(np.arange(layout.total))
    changes = np.flatnonzero(np.diff(owners)) + 1
    inside = changes[~np.isin(changes, mask.cu_seqlens)]
    return len(set(np.searchsorted(mask.cu_seqlens, inside, side="right").tolist())), len(inside)


@given(brought(), st.booleans())
def test_work_is_level_with_few_cuts(batch: tuple[Mask, Layout], chained: bool) -> None:
    """Fewer documents than ranks are cut, and every rank ends at most one part, or two of one document."""
    mask, home = batch
    work = replace(WORK, is_chained=chained)
    found = level(mask, home, work)
    check(found)
    assert (found.total, found.world_size) == (home.total, home.world_size)
    assert level(mask, home, work) == found, "every rank finds the same"
    done = flops(mask, found, work)
    longest = int(np.diff(mask.cu_seqlens).max())
    rounding = 2 * GRAIN * (work.flops_per_token + longest * work.flops_per_pair)
    assert done.max() <= done.mean() * (1 + 3 * WORTH) + rounding
    documents, places = cuts(mask, found)
    assert documents < max(home.world_size, 2)
    assert places <= 2 * home.world_size + documents


@given(st.integers(2, 6), st.integers(1, 400), st.booleans())
def test_whole_documents_stay_or_move_whole(world: int, length: int, chained: bool) -> None:
    """One rank brought a document for every rank: each takes one, and the rank that brought them keeps one."""
    mask = Mask.causal(np.arange(world + 1) * length)
    home = home_layout([0] * (world - 1) + [world * length])
    found = level(mask, home, replace(WORK, is_chained=chained))
    assert cuts(mask, found) == (0, 0)
    assert list(found.counts) == [length] * world


def test_a_chain_waits_least_by_hand() -> None:
    """Two ranks share a document of 1000 tokens: who has whole documents to run meanwhile lets the other go first."""
    curve = _Curve(1000, replace(WORK, flops_per_pair=0.0), True)
    shares = [(0, curve.whole * 0.4), (1, curve.whole * 0.6)]
    assert _in_chain(shares[:1], curve, [0, 0]) == shares[:1]
    assert _in_chain(shares, curve, [600, 400]) == shares, "nobody waits: 0 begins, 1 has 400 tokens to run"
    assert _in_chain(shares, curve, [600, 0]) == shares, "1 waits for 400 tokens, less than it takes to sum up 600"
    assert _in_chain(shares, curve, [700, 500]) == shares
    alone = _in_chain(shares, curve, [0, 0])
    assert [rank for rank, _ in alone] == [0, 1, 0], "nothing to do meanwhile: 1 sums its part up first"
    assert sum(amount for _, amount in alone) == pytest.approx(curve.whole)
    three = _in_chain([(2, 1.0), (0, 2.0), (1, 3.0)], curve, [0, 0, 0])
    assert [rank for rank, _ in three] == [2, 0, 1, 2]


@given(st.integers(1, 5000), st.booleans(), st.floats(0, 1), st.sampled_from([0.0, 1.0, 1e5]))
def test_the_curve_of_a_document(length: int, causal: bool, share: float, per_pair: float) -> None:
    curve = _Curve(length, DecoderWork(1e3, per_pair, 0.0), causal)
    pairs = length * (length + 1) / 2 if causal else length * length
    assert curve.whole == pytest.approx(1e3 * length + per_pair * pairs)
    x = curve.at(curve.whole * share)
    assert -1e-6 <= x <= length * (1 + 1e-6)
    assert curve.linear * x + curve.square * x * x == pytest.approx(curve.whole * share, abs=1e-6 * curve.whole)


# -- levelled ----------------------------------------------------------------------------------------


@given(brought(longest=60, ranks=4), st.data())
def test_modelled_time_counted_token_by_token(batch: tuple[Mask, Layout], data: st.DataObject) -> None:
    mask, home = batch
    layout = data.draw(layouts(home.total, home.world_size))
    machine, work = Machine(flops=7.0, bytes_per_second=5.0), DecoderWork(3.0, 2.0, 11.0)
    ranks = range(home.world_size)
    pairs = mask.dense().sum(1)
    compute = [3 * len(layout.indices(r)) + 2 * pairs[layout.indices(r)].sum() for r in ranks]
    moved = [(layout.owner(t), home.owner(t)) for t in range(home.total) if layout.owner(t) != home.owner(t)]
    busiest = max(max(sum(pair[side] == r for pair in moved) for side in (0, 1)) for r in ranks)
    expected = max(compute) / 7 + busiest * 11 / 5
    assert _seconds(mask, layout, home, work, machine) == pytest.approx(expected)


@given(brought(), st.sampled_from([Machine(), CPU]), st.sampled_from([1e3, 1e5, 1e7]))
def test_levelled_is_never_slower_than_home(batch: tuple[Mask, Layout], machine: Machine, bytes_home: float) -> None:
    mask, home = batch
    work = replace(WORK, bytes_home=bytes_home)
    found = levelled(mask, home, work, machine)
    check(found)
    assert (found.total, found.world_size) == (home.total, home.world_size)
    assert levelled(mask, home, work, machine) == found, "every rank finds the same"
    at_home = _seconds(mask, home, home, work, machine)
    assert found == home or _seconds(mask, found, home, work, machine) < at_home * (1 - WORTH)


@given(st.integers(2, 8), st.lists(st.integers(1, 200), min_size=1, max_size=5), st.sampled_from(list(KINDS)))
def test_equal_ranks_stay_at_home(world: int, documents: list[int], kind: str) -> None:
    mask = KINDS[kind](np.cumsum([0, *documents * world]))
    home = home_layout([sum(documents)] * world)
    assert levelled(mask, home, WORK, Machine()) is home


@given(st.integers(2, 8), st.data(), st.lists(st.integers(1, 64), min_size=1, max_size=4), st.sampled_from(list(KINDS)))
def test_a_giant_among_short_ones_is_shared(world: int, data: st.DataObject, short: list[int], kind: str) -> None:
    giant, at = data.draw(st.integers(8_000, 40_000)), data.draw(st.integers(0, world - 1))
    documents = [[giant] if rank == at else short for rank in range(world)]
    mask = KINDS[kind](np.cumsum([0, *(length for some in documents for length in some)]))
    home = home_layout([sum(some) for some in documents])
    found = levelled(mask, home, WORK, Machine())
    before, after = flops(mask, home, WORK), flops(mask, found, WORK)
    assert before.argmax() == at
    assert after.max() < before.max() * 1.25 / world, "nearly level"
    assert max(found.counts) < giant
    assert stays(found, home) >= giant / world / 2, "the giant's rank keeps a share of it"


@given(brought(ranks=1))
def test_one_rank_is_at_home(batch: tuple[Mask, Layout]) -> None:
    mask, home = batch
    assert levelled(mask, home, WORK, Machine()) is home


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_way_home_is_not_worth_it(kind: str) -> None:
    """The same ragged batch: where moving is dear, documents stay where they are."""
    mask, home = KINDS[kind]([0, 4000, 4050, 4100]), home_layout([4000, 50, 50])
    assert levelled(mask, home, WORK, Machine()) != home
    assert levelled(mask, home, WORK, Machine(bytes_per_second=1e3)) is home


def test_level_ranks_spare_themselves_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rows, and one rank alone: nothing can be gained, which is seen before a layout is sought."""
    monkeypatch.setattr(homing, "level", None)
    for counts, borders in (([800, 800, 800], [0, 500, 800, 1100, 1600, 1900, 2400]), ([70], [0, 70])):
        home = home_layout(counts)
        assert levelled(Mask.causal(borders), home, WORK, CPU) == home
