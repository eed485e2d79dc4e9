"""Where pooled documents run: at home, or balanced with few cuts, and only if it pays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_layout import check
from test_routing import layouts

from longweave import Layout, Mask
from longweave.plan import homing
from longweave.plan import slices as sl
from longweave.plan.cost import CPU, Machine, Shape, areas
from longweave.plan.document_work import AttentionWork, Curve, DecoderWork
from longweave.plan.homing import (
    CUT_SLACK,
    GRAIN,
    LEAST_SAVED,
    SLACK,
    _around,
    _divide,
    _documents,
    _in_turn,
    _place_whole,
    _seconds,
    balanced_layout,
    faster_layout,
    home_layout,
)

SHAPE = Shape(heads=8, kv_heads=2, head_dim=64)
WORK = DecoderWork(2e8, 24.0 * SHAPE.flops_per_pair, bytes_home=1024.0, kv_bytes=24.0 * SHAPE.kv_bytes)
# What `work_of` gives for a Qwen3.5 of 24 layers and 1024 channels, and an eighth of the summing up and three times it.
HYBRID = DecoderWork(1696054016.0, 49152.0, 4096.0, 24576.0, True, 235929600.0)
SUMMING_UP = [HYBRID.flops_to_sum_up * share for share in (1 / 8, 1, 3)]
# Attention of which half, or all, has a window.
HALF = replace(WORK, flops_per_pair=WORK.flops_per_pair / 2, kv_bytes=WORK.kv_bytes / 2)
HALF = replace(HALF, windowed=(AttentionWork(128, HALF.flops_per_pair, HALF.kv_bytes),))
WINDOWED = {
    "all": DecoderWork(2e8, 0.0, 1024.0, 0.0, windowed=(AttentionWork(700, WORK.flops_per_pair, WORK.kv_bytes),)),
    "half": HALF,
    "two windows": replace(HALF, windowed=(*HALF.windowed, AttentionWork(2000, 3e5, 1e3))),
}
KINDS = {"causal": Mask.causal, "full": Mask.full}

counts = st.lists(st.integers(0, 30), min_size=1, max_size=7)


@st.composite
def brought(draw: st.DrawFn, longest: int = 3000, ranks: int = 6) -> tuple[Mask, Layout]:
    """Documents of every rank, of very different lengths, some ranks without any: at least one token in all."""
    lengths = st.one_of(st.integers(0, 40), st.integers(0, longest))
    ranks_of = st.lists(st.lists(lengths, max_size=4), min_size=1, max_size=ranks)
    documents = draw(ranks_of.filter(lambda all_ranks: any(map(sum, all_ranks))))
    return batch_of(documents, draw(st.sampled_from(list(KINDS))))


def batch_of(documents: list[list[int]], kind: str = "causal") -> tuple[Mask, Layout]:
    """From the lengths of every rank's documents."""
    borders = np.cumsum([0, *(length for some in documents for length in some)])
    return KINDS[kind](borders), home_layout([sum(some) for some in documents])


def one_too_many(world: int, length: int) -> list[list[int]]:
    """P + 1 equal documents: one for each rank, and one that no rank has room for."""
    return [[length] * (2 if rank == world // 2 else 1) for rank in range(world)]


SHAPES = {
    "one too many": one_too_many,
    "a giant among short ones": lambda world, length: [[40 * length]] + [[length // 9, length // 5]] * (world - 1),
    "one rank has all": lambda world, length: [[]] * (world - 1) + [[length, 2 * length, 1] * world],
    "every other rank is empty": lambda world, length: [[length + rank] * (rank % 2 == 0) for rank in range(world)],
    "one token each": lambda world, length: [[1] * (length % (rank + 2)) for rank in range(world)] + [[1]],
    "giants": lambda world, length: [[length * (rank + 9) // 9] * (rank % 3 == 1) + [5] for rank in range(world)],
}


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


# -- balanced ----------------------------------------------------------------------------------------


def flops(mask: Mask, layout: Layout, work: DecoderWork) -> np.ndarray:
    """Of every rank, with what it does to sum up parts that neither begin nor end a document."""
    found = np.array(layout.counts) * work.flops_per_token + areas(mask, layout) * work.flops_per_pair
    for window, per_pair, _ in work.windowed:
        found = found + areas(mask.windowed(window), layout) * per_pair
    for rank, spans in enumerate(layout.spans):
        inside = [span for span in spans if not {span.start, span.stop} & set(mask.cu_seqlens.tolist())]
        found[rank] += sum(span.stop - span.start for span in inside) * work.flops_to_sum_up
    return found


def cuts(mask: Mask, layout: Layout) -> tuple[int, int]:
    """Documents that are cut, and the places where."""
    starts, _, ranks = layout.sorted
    changes = starts[1:][np.diff(ranks) != 0]
    inside = changes[~np.isin(changes, mask.cu_seqlens)]
    return len(set(np.searchsorted(mask.cu_seqlens, inside, side="right").tolist())), len(inside)


def bound(mask: Mask, layout: Layout, work: DecoderWork) -> np.ndarray:
    """The most work that a rank may have: mean, slack, and half a grain at each of its cuts and two that are gone."""
    grain = min(GRAIN, max(1, layout.total // layout.world_size // GRAIN))
    is_cut = ~np.isin(np.stack([layout.starts, layout.stops]), mask.cu_seqlens)
    edges = np.bincount(layout.ranks, weights=is_cut.sum(0), minlength=layout.world_size)
    longest = int(np.diff(mask.cu_seqlens).max())
    token = work.flops_per_token + longest * work.flops_per_pair
    return flops(mask, layout, work).mean() * (1 + SLACK) + (edges + 2) * grain / 2 * token


def check_balance(mask: Mask, home: Layout, work: DecoderWork) -> Layout:
    found = balanced_layout(mask, home, work)
    check(found)
    assert (found.total, found.world_size) == (home.total, home.world_size)
    assert balanced_layout(mask, home, work) == found, "every rank finds the same"
    assert (flops(mask, found, work) <= bound(mask, found, work) * (1 + 1e-9)).all()
    return found


@given(brought(), st.booleans())
def test_work_is_balanced_with_few_cuts(batch: tuple[Mask, Layout], chained: bool) -> None:
    """Fewer documents than ranks are cut, and every rank ends at most one part, or two of one document."""
    mask, home = batch
    found = check_balance(mask, home, replace(WORK, is_chained=chained))
    documents, places = cuts(mask, found)
    assert documents < max(home.world_size, 2)
    assert places <= 2 * home.world_size + documents


@pytest.mark.parametrize("world", [1, 2, 3, 48, 56, 64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_work_is_balanced_on_any_number_of_ranks(shape: str, world: int) -> None:
    for length, kind, chained in ((1, "causal", True), (300, "full", False), (4096, "causal", False)):
        mask, home = batch_of(SHAPES[shape](world, length), kind)
        check_balance(mask, home, replace(WORK, is_chained=chained))


giants = st.lists(st.integers(8_000, 60_000), min_size=2, max_size=9)


@given(st.integers(3, 32), giants, st.integers(1, 900), st.integers(0, 31), st.sampled_from(SUMMING_UP))
@example(4, [9000, 9000], 300, 0, HYBRID.flops_to_sum_up)
@example(8, [30_000, 40_000, 9000], 700, 3, HYBRID.flops_to_sum_up)
@example(32, [60_000] * 9, 10, 0, HYBRID.flops_to_sum_up)
def test_summing_up_is_balanced_too(world: int, lengths: list[int], short: int, at: int, to_sum_up: float) -> None:
    """Several giants in a model with linear layers: what is summed up is work like any other."""
    documents = [[short] for _ in range(world)]
    for i, length in enumerate(lengths):
        documents[(at + i) % world].append(length)
    mask, home = batch_of(documents)
    work = replace(HYBRID, flops_to_sum_up=to_sum_up)
    found = balanced_layout(mask, home, work)
    check(found)
    done = flops(mask, found, work)
    assert done.max() <= bound(mask, found, work).max() + 0.03 * done.mean()


@pytest.mark.parametrize("world", [3, 4, 8, 16, 32])
def test_hybrid_models_are_balanced_on_any_number_of_ranks(world: int) -> None:
    """Rows of log-normal lengths, two a rank: on average within 3 % of the mean, and never far away."""
    rng, ratios = np.random.default_rng(0), []
    for _ in range(40):
        documents = np.clip(rng.lognormal(np.log(800), 1.5, (world, 2)).astype(int), 16, 32768).tolist()
        mask, home = batch_of(documents)
        done = flops(mask, balanced_layout(mask, home, HYBRID), HYBRID)
        ratios.append(done.max() / done.mean())
    assert np.mean(ratios) < 1.03
    assert max(ratios) < 1.06


@pytest.mark.parametrize("work", WINDOWED.values(), ids=WINDOWED)
@pytest.mark.parametrize("chained", [False, True])
def test_windows_are_balanced(work: DecoderWork, chained: bool) -> None:
    """Layers with a window have less work at the end of a long document than those without."""
    rng, work = np.random.default_rng(1), replace(work, is_chained=chained)
    for _ in range(20):
        documents = [np.clip(rng.lognormal(np.log(3000), 1.5, 3).astype(int), 16, 60_000).tolist() for _ in range(8)]
        mask, home = batch_of(documents)
        done = flops(mask, balanced_layout(mask, home, work), work)
        assert done.max() <= done.mean() * 1.03


@pytest.mark.parametrize("world", [1, 2, 3, 48, 56, 64, 128, 256])
def test_one_document_too_many_is_spread(world: int) -> None:
    """However little room each rank has for it, and over fewer ranks where that is very little."""
    mask, home = batch_of(one_too_many(world, 1 << 16))
    found = faster_layout(mask, home, WORK, Machine())
    done = flops(mask, found, WORK)
    assert done.max() <= done.mean() * (1 + CUT_SLACK + 0.003), "0.003 are rounding"
    documents, places = cuts(mask, found)
    assert documents == (world > 1)
    assert places < min(world, 120)


@given(st.lists(st.floats(-0.02, 3.0), min_size=2, max_size=90), st.data())
def test_parts_are_few_and_none_is_tiny(rooms: list[float], data: st.DataObject) -> None:
    """No rank twice, nobody over the slack, the whole amount; a rank more than is needed is not taken."""
    before = np.array(rooms)
    amount = data.draw(st.floats(0.02, max(0.02, float(before.sum()))))
    if before.sum() < amount or amount <= before.max() + SLACK:
        return
    first, slack = data.draw(st.integers(0, len(rooms) - 1)), CUT_SLACK
    room = before.copy()
    shares = _divide(amount, room, first, slack)
    ranks, parts = [rank for rank, _ in shares], np.array([part for _, part in shares])
    assert len(set(ranks)) == len(ranks)
    assert parts.sum() == pytest.approx(amount)
    assert (room == before).all()
    assert (room[ranks] - parts >= -slack - 1e-9).all()
    assert parts.min() >= slack / 2 - 1e-9
    assert ranks[0] == first if before[first] > slack else before[ranks[0]] == before.max()
    assert amount - before[ranks[:-1]].sum() > slack * (len(ranks) - 1), "one rank less would not do"


rooms_of = st.lists(st.floats(-0.02, 3.0), min_size=2, max_size=40)


@given(rooms_of, st.floats(0.02, 100), st.floats(0, 2), st.integers(0, 1))
def test_what_fits_nowhere_is_spread(rooms: list[float], amount: float, extra: float, first: int) -> None:
    """Nobody ends further over its room than in the division that goes least over it; who sums up takes less."""
    room = np.array(rooms)
    shares = _divide(amount, room, first, CUT_SLACK, extra)
    loads = {rank: part * (1 + extra * (at > 0)) for at, (rank, part) in enumerate(shares)}
    assert sum(part for _, part in shares) == pytest.approx(amount)
    over = max(load - room[rank] for rank, load in loads.items())
    order = [shares[0][0], *(rank for rank in np.argsort(-room, kind="stable") if rank != shares[0][0])]
    own = np.array([1.0, *[1 / (1 + extra)] * (len(order) - 1)])
    least = ((amount - np.cumsum(room[order] * own)) / np.cumsum(own)).min()
    assert over <= max(least, CUT_SLACK) + 1e-6


@given(brought(longest=300, ranks=9))
def test_whole_documents_go_where_the_most_room_is(batch: tuple[Mask, Layout]) -> None:
    """Compared with a search over all ranks for every document."""
    mask, home = batch
    documents = _documents(mask, home, WORK)
    mean = documents.amounts.sum() / home.world_size
    room, expected = [mean] * home.world_size, [-1] * len(documents.amounts)
    for document in sorted(range(len(expected)), key=lambda d: -documents.amounts[d]):
        amount = documents.amounts[document]
        anywhere = [documents.brought_by[document], max(range(home.world_size), key=room.__getitem__)]
        fits = [rank for rank in anywhere if amount <= room[rank] + mean * SLACK]
        if fits:
            expected[document] = fits[0]
            room[fits[0]] -= amount
    found = np.full(home.world_size, mean)
    assert _place_whole(documents, found, mean * SLACK).tolist() == expected
    assert found.tolist() == room


@given(st.integers(2, 6), st.integers(1, 400), st.booleans())
def test_whole_documents_stay_or_move_whole(world: int, length: int, chained: bool) -> None:
    """One rank brought a document for every rank: each takes one, and the rank that brought them keeps one."""
    mask = Mask.causal(np.arange(world + 1) * length)
    home = home_layout([0] * (world - 1) + [world * length])
    found = balanced_layout(mask, home, replace(WORK, is_chained=chained))
    assert cuts(mask, found) == (0, 0)
    assert list(found.counts) == [length] * world


def test_a_chain_waits_least_by_hand() -> None:
    """Two ranks share a document of 1000 tokens: who has whole documents to run meanwhile lets the other go first."""
    curve = Curve(1000, replace(WORK, flops_per_pair=0.0), True)
    whole = 1000 * WORK.flops_per_token
    shares = [(0, whole * 0.4), (1, whole * 0.6)]
    assert _in_turn(shares[:1], curve, [0, 0]) == shares[:1]
    assert _in_turn(shares, curve, [600, 400]) == shares, "nobody waits: 0 begins, 1 has 400 tokens to run"
    assert _in_turn(shares, curve, [600, 0]) == shares, "1 waits for 400 tokens, less than it takes to sum up 600"
    assert _in_turn(shares, curve, [700, 500]) == shares
    assert _in_turn(shares, curve, [0, 0]) is None, "nothing to do meanwhile: 1 sums its part up first"
    assert _in_turn([(2, 1.0), (0, 2.0), (1, 3.0)], curve, [900, 900, 900]) is None
    assert _around([(2, 1.0), (0, 2.0), (1, 3.0)]) == [(2, 0.5), (0, 2.0), (1, 3.0), (2, 0.5)]


@given(st.integers(1, 5000), st.booleans(), st.floats(0, 1), st.sampled_from([0.0, 1.0, 1e5]))
def test_the_curve_of_a_document(length: int, causal: bool, share: float, per_pair: float) -> None:
    windows = ((7, per_pair / 2), (300, 3.0), (9000, 5.0))
    work = DecoderWork(1e3, per_pair, 0.0, 0.0, windowed=tuple(AttentionWork(w, flops, 0.0) for w, flops in windows))
    curve = Curve(length, work, causal)
    seen = np.arange(1, length + 1) if causal else np.full(length, length)
    of_token = 1e3 + per_pair * seen + sum(flops * (np.minimum(seen, w) if causal else seen) for w, flops in windows)
    whole = of_token.sum()
    assert _documents(*batch_of([[length]], "causal" if causal else "full"), work).amounts == pytest.approx([whole])
    for tokens in (0, 1, 6, 7, 8, length // 3, length):
        assert curve.of_first(min(tokens, length)) == pytest.approx(of_token[:tokens].sum())
    x = curve.tokens_with(whole * share)
    assert -1e-6 <= x <= length * (1 + 1e-6)
    assert curve.of_first(x) == pytest.approx(whole * share, abs=1e-6 * whole)


# -- the faster one ----------------------------------------------------------------------------------


@given(brought(longest=60, ranks=4), st.data())
def test_modelled_time_counted_token_by_token(batch: tuple[Mask, Layout], data: st.DataObject) -> None:
    """Layers with a window and without one, and parts in the middle of documents, which are summed up."""
    mask, home = batch
    layout = data.draw(layouts(home.total, home.world_size))
    window, to_sum_up = data.draw(st.sampled_from([None, 5])), data.draw(st.sampled_from([0.0, 4.0]))
    if (mask.rows[:, sl.HI] != 0).any():
        window = None
    kinds = [AttentionWork(None, 2.0, data.draw(st.sampled_from([0.0, 2.0, 90.0])))]
    kinds += [] if window is None else [AttentionWork(window, 5.0, 30.0)]
    work = DecoderWork(3.0, 2.0, 11.0, kinds[0].kv_bytes, True, to_sum_up, tuple(kinds[1:]))
    machine = Machine(flops=7.0, bytes_per_second=5.0)
    ranks = range(home.world_size)
    owner = np.array([layout.owner(t) for t in range(home.total)])
    inside = np.zeros(home.total)
    for spans in layout.spans:
        for span in spans:
            inside[span.start : span.stop] = not {span.start, span.stop} & set(mask.cu_seqlens.tolist())
    compute = [(3 * (owner == r).sum() + to_sum_up * inside[owner == r].sum()) / 7 for r in ranks]
    for kind in kinds:
        seen = (mask if kind.window is None else mask.windowed(kind.window)).dense()
        reads = [seen[owner == r].any(0) for r in ranks]  # the keys that a rank needs
        received = [(reads[r] & (owner != r)).sum() for r in ranks]
        sent = [sum((reads[other] & (owner == r)).sum() for other in ranks if other != r) for r in ranks]
        for r in ranks:
            pairs = kind.flops_per_pair * seen[owner == r].sum() / 7
            compute[r] += max(pairs, max(sent[r], received[r]) * kind.kv_bytes / 5)
    moved = [(owner[t], home.owner(t)) for t in range(home.total) if owner[t] != home.owner(t)]
    busiest = max(max(sum(pair[side] == r for pair in moved) for side in (0, 1)) for r in ranks)
    expected = max(compute) + busiest * 11 / 5
    assert _seconds(mask, layout, home, work, machine) == pytest.approx(expected)


@given(brought(), st.sampled_from([Machine(), CPU]), st.sampled_from([1e3, 1e5, 1e7]))
def test_it_is_never_slower_than_home(batch: tuple[Mask, Layout], machine: Machine, bytes_home: float) -> None:
    mask, home = batch
    work = replace(WORK, bytes_home=bytes_home)
    found = faster_layout(mask, home, work, machine)
    check(found)
    assert (found.total, found.world_size) == (home.total, home.world_size)
    assert faster_layout(mask, home, work, machine) == found, "every rank finds the same"
    at_home = _seconds(mask, home, home, work, machine)
    assert found == home or _seconds(mask, found, home, work, machine) < at_home * (1 - LEAST_SAVED)


@given(st.integers(2, 8), st.lists(st.integers(1, 200), min_size=1, max_size=5), st.sampled_from(list(KINDS)))
def test_equal_ranks_stay_at_home(world: int, documents: list[int], kind: str) -> None:
    mask = KINDS[kind](np.cumsum([0, *documents * world]))
    home = home_layout([sum(documents)] * world)
    assert faster_layout(mask, home, WORK, Machine()) is home


@given(st.integers(2, 8), st.data(), st.lists(st.integers(1, 64), min_size=1, max_size=4), st.sampled_from(list(KINDS)))
def test_a_giant_among_short_ones_is_shared(world: int, data: st.DataObject, short: list[int], kind: str) -> None:
    giant, at = data.draw(st.integers(8_000, 40_000)), data.draw(st.integers(0, world - 1))
    documents = [[giant] if rank == at else short for rank in range(world)]
    mask = KINDS[kind](np.cumsum([0, *(length for some in documents for length in some)]))
    home = home_layout([sum(some) for some in documents])
    found = faster_layout(mask, home, WORK, Machine())
    before, after = flops(mask, home, WORK), flops(mask, found, WORK)
    assert before.argmax() == at
    assert after.max() < before.max() * 1.25 / world, "nearly balanced"
    assert max(found.counts) < giant
    assert stays(found, home) >= giant / world / 2, "the giant's rank keeps a share of it"


@given(brought(ranks=1))
def test_one_rank_is_at_home(batch: tuple[Mask, Layout]) -> None:
    mask, home = batch
    assert faster_layout(mask, home, WORK, Machine()) is home


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_way_home_is_not_worth_it(kind: str) -> None:
    """The same ragged batch: where moving is dear, documents stay where they are."""
    mask, home = KINDS[kind]([0, 4000, 4050, 4100]), home_layout([4000, 50, 50])
    assert faster_layout(mask, home, WORK, Machine()) != home
    assert faster_layout(mask, home, WORK, Machine(bytes_per_second=1e3)) is home


def test_slow_k_and_v_are_not_worth_it() -> None:
    """A document that would have to be cut stays; one that moves whole is not asked for its K/V."""
    slow = replace(WORK, kv_bytes=1e8)
    cut, whole = batch_of([[4000], []]), batch_of([[2000, 2000], []])
    assert faster_layout(*cut, WORK, Machine()) != cut[1]
    assert faster_layout(*cut, slow, Machine()) is cut[1]
    assert faster_layout(*whole, slow, Machine()) != whole[1]


def test_balanced_ranks_spare_themselves_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rows, and one rank alone: nothing can be gained, which is seen before a layout is sought."""
    monkeypatch.setattr(homing, "balanced_layout", None)
    for counts, borders in (([800, 800, 800], [0, 500, 800, 1100, 1600, 1900, 2400]), ([70], [0, 70])):
        home = home_layout(counts)
        assert faster_layout(Mask.causal(borders), home, WORK, CPU) == home
