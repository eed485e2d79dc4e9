"""Where pooled documents run: at home, or levelled, with shares named so that many tokens stay, and only if it pays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from test_layout import check
from test_routing import layouts

from longweave import Layout, Mask
from longweave.plan.cost import CPU, Machine, Shape, areas
from longweave.plan.homing import WORTH, DecoderWork, _seconds, home_layout, levelled, near

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


def shares(layout: Layout) -> list[tuple[int, ...]]:
    """The local tokens of every rank in order, whoever has them."""
    return sorted(tuple(layout.indices(rank).tolist()) for rank in range(layout.world_size))


def met(layout: Layout, home: Layout) -> np.ndarray:
    """(P, P): tokens that each share has in common with each rank, counted one by one."""
    table = np.zeros((home.world_size, home.world_size), dtype=int)
    for token in range(home.total):
        table[layout.owner(token), home.owner(token)] += 1
    return table


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


# -- near --------------------------------------------------------------------------------------------


@st.composite
def divided(draw: st.DrawFn) -> tuple[Layout, Layout]:
    home = home_layout(draw(counts))
    return draw(layouts(home.total, home.world_size)), home


@given(divided())
def test_near_only_names_the_shares_anew(pair: tuple[Layout, Layout]) -> None:
    layout, home = pair
    found = near(layout, home)
    check(found)
    assert shares(found) == shares(layout)
    assert (found.total, found.world_size) == (home.total, home.world_size)
    assert near(layout, home) == found, "every rank finds the same"


@given(divided())
def test_near_leaves_most_tokens_at_home(pair: tuple[Layout, Layout]) -> None:
    """The largest meeting of a share and a rank stays, and half of what the best names of all would leave."""
    layout, home = pair
    table = met(layout, home)
    best = table[linear_sum_assignment(table, maximize=True)].sum()
    left = stays(near(layout, home), home)
    assert left >= table.max()
    assert 2 * left >= best


@given(counts, st.randoms(use_true_random=False))
def test_near_finds_home_under_any_names(tokens: list[int], random) -> None:
    home = home_layout(tokens)
    assert near(home, home) == home
    spans = list(home.spans)
    random.shuffle(spans)
    found = near(Layout.from_spans(home.total, spans), home)
    assert stays(found, home) == home.total
    assert found == home


def test_near_by_hand() -> None:
    """Share 0 meets rank 1 in 5 tokens and rank 0 in 4, but share 1 has nothing for rank 0: the largest goes first."""
    home = home_layout([4, 6, 2])
    found = near(Layout.from_spans(12, [[(0, 9)], [(9, 12)], []]), home)
    assert found.spans == ((), ((0, 9),), ((9, 12),))
    turned = near(Layout.from_spans(12, [[(8, 12)], [(0, 4)], [(6, 8), (4, 6)]]), home)
    assert turned.spans == (((0, 4),), ((6, 8), (4, 6)), ((8, 12),)), "local order is kept"


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
    found = levelled(mask, home, work, SHAPE, machine)
    check(found)
    assert (found.total, found.world_size) == (home.total, home.world_size)
    assert levelled(mask, home, work, SHAPE, machine) == found, "every rank finds the same"
    at_home = _seconds(mask, home, home, work, machine)
    assert found == home or _seconds(mask, found, home, work, machine) < at_home * (1 - WORTH)


@given(st.integers(2, 8), st.lists(st.integers(1, 200), min_size=1, max_size=5), st.sampled_from(list(KINDS)))
def test_equal_ranks_stay_at_home(world: int, documents: list[int], kind: str) -> None:
    mask = KINDS[kind](np.cumsum([0, *documents * world]))
    home = home_layout([sum(documents)] * world)
    assert levelled(mask, home, WORK, SHAPE, Machine()) is home


@given(st.integers(2, 8), st.data(), st.lists(st.integers(1, 64), min_size=1, max_size=4), st.sampled_from(list(KINDS)))
def test_a_giant_among_short_ones_is_shared(world: int, data: st.DataObject, short: list[int], kind: str) -> None:
    giant, at = data.draw(st.integers(8_000, 40_000)), data.draw(st.integers(0, world - 1))
    documents = [[giant] if rank == at else short for rank in range(world)]
    mask = KINDS[kind](np.cumsum([0, *(length for some in documents for length in some)]))
    home = home_layout([sum(some) for some in documents])
    found = levelled(mask, home, WORK, SHAPE, Machine())
    flops = [
        np.array(layout.counts) * WORK.flops_per_token + areas(mask, layout) * WORK.flops_per_pair
        for layout in (home, found)
    ]
    assert flops[0].argmax() == at
    assert flops[1].max() < flops[0].max() * 1.25 / world, "nearly level"
    assert max(found.counts) < giant
    assert stays(found, home) >= giant / world / 2, "the giant's rank keeps a share of it"


@given(brought(ranks=1))
def test_one_rank_is_at_home(batch: tuple[Mask, Layout]) -> None:
    mask, home = batch
    assert levelled(mask, home, WORK, SHAPE, Machine()) is home


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_way_home_is_not_worth_it(kind: str) -> None:
    """The same ragged batch: where moving is dear, documents stay where they are."""
    mask, home = KINDS[kind]([0, 4000, 4050, 4100]), home_layout([4000, 50, 50])
    assert levelled(mask, home, WORK, SHAPE, Machine()) != home
    assert levelled(mask, home, WORK, SHAPE, Machine(bytes_per_second=1e3)) is home


def test_level_ranks_spare_themselves_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rows, and one rank alone: nothing can be gained, which is seen before a layout is sought."""
    monkeypatch.setattr(Layout, "balanced", None)
    for counts, borders in (([800, 800, 800], [0, 500, 800, 1100, 1600, 1900, 2400]), ([70], [0, 70])):
        home = home_layout(counts)
        assert levelled(Mask.causal(borders), home, WORK, SHAPE, CPU) == home
