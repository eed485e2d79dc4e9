"""Group-cast schedules, walked by hand: received = needed, token for token, each once, and every pair computed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_routing import layouts
from test_work import MASKS, pairs

from longweave import Layout, Mask
from longweave.plan.cast import cast
from longweave.plan.cost import traffic
from longweave.plan.schedule import make_plan


@pytest.mark.parametrize("name", MASKS)
@given(layout=layouts(22, 4), stages=st.integers(1, 3))
def test_received_is_needed_and_all_work_is_done(name: str, layout: Layout, stages: int) -> None:
    mask = MASKS[name]
    dense = mask.dense()
    world = layout.world_size
    schedules = [cast(mask, layout.table, rank, stages) for rank in range(world)]
    sent, received = traffic(mask, layout)
    for rank, schedule in enumerate(schedules):
        mine = layout.indices(rank)
        needed = set(np.flatnonzero(dense[mine].any(0)).tolist()) - set(mine.tolist())
        arrived: list[int] = []
        done = [(int(mine[q]), int(mine[k])) for q, k in pairs(schedule.own)]
        for number, stage in enumerate(schedule.stages):
            mail = []
            for peer in range(world):
                theirs = schedules[peer].stages[number]
                tokens = layout.indices(peer)[theirs.send_index]
                parts = np.split(tokens, np.cumsum(theirs.send_splits)[:-1])
                assert len(parts[rank]) == stage.recv_splits[peer]
                mail.append(parts[rank])
            in_order = np.concatenate(mail)[stage.order]
            assert (np.diff(in_order) > 0).all(), "in token order"
            arrived += in_order.tolist()
            done += [(int(mine[q]), int(in_order[k])) for q, k in pairs(stage.rows)]
        assert len(arrived) == len(set(arrived)), "each token once"
        assert set(arrived) == needed, "exactly what is needed"
        assert len(arrived) == received[rank]
        assert sum(len(stage.send_index) for stage in schedule.stages) == sent[rank]
        sizes = [sum(stage.recv_splits) for stage in schedule.stages]
        assert not sizes or max(sizes) - min(sizes) <= 1, "stages of equal size"
        assert len(sizes) == len(schedules[0].stages), "the same exchanges on every rank"
        assert sorted(done) == sorted((int(q), int(k)) for q in mine for k in np.flatnonzero(dense[q]))


def test_documents_on_one_rank_cost_nothing() -> None:
    cu = [0, 50, 100, 150, 200]
    layout = Layout.contiguous(200, 4)
    for rank in range(4):
        assert cast(Mask.causal(cu), layout.table, rank, 2).stages == (), "no exchange at all"


def test_auto_takes_groupcast_for_short_documents_and_says_why() -> None:
    cu = np.arange(0, 65537, 512)
    mask = Mask.causal(cu)
    plan = make_plan(mask, Layout.balanced(mask, 8))
    assert plan.strategy == "groupcast"
    assert "cost model" in plan.why
    assert "ring" in plan.why
    assert plan.stages == 1
    assert plan.keep_kv


@pytest.mark.parametrize(("kv_heads", "expected"), [(8, {"ring", "ulysses"}), (1, {"ring", "ulysses"})])
def test_auto_takes_ring_or_ulysses_for_one_giant_document(kv_heads: int, expected: set[str]) -> None:
    mask = Mask.causal([0, 65536])
    plan = make_plan(mask, Layout.zigzag([0, 65536], 8), kv_heads=kv_heads)
    assert plan.strategy in expected
    assert make_plan(mask, Layout.contiguous(65536, 8), kv_heads=kv_heads).strategy == "ulysses", "balances by heads"


def test_more_traffic_more_stages_and_nothing_kept() -> None:
    mask = Mask.full([0, 4096])
    plan = make_plan(mask, Layout.contiguous(4096, 8), "groupcast", heads=1, kv_heads=1, head_dim=8)
    assert plan.stages == 4
    assert not plan.keep_kv, "seven times a rank's own block"


def test_a_plan_is_made_once() -> None:
    mask = Mask.causal([0, 700, 1000])
    layout = Layout.balanced(mask, 4)
    a, b = make_plan(mask, layout), make_plan(Mask.causal([0, 700, 1000]), Layout.balanced(mask, 4))
    assert a == b
    assert hash(a) == hash(b)
    assert a is not b, "each batch asks for agreement anew"
    assert a.decision is b.decision, "but decides nothing twice"
    assert make_plan(mask, layout, "ring") != a


def test_plans_that_run_differently_are_different() -> None:
    """Ranks with such plans would exchange other messages: the fingerprint must tell."""
    mask, layout = Mask.causal([0, 700, 1000]), Layout.zigzag([0, 700, 1000], 4)
    plans = [make_plan(mask, layout, "ring", ulysses_size=size) for size in (1, 2, 4)]
    plans += [make_plan(mask, layout, "groupcast", heads=heads, kv_heads=1, head_dim=8) for heads in (1, 512)]
    assert plans[-1].stages != plans[-2].stages
    assert len({plan.fingerprint for plan in plans}) == len(plans)


def test_a_plan_keeps_the_documents_it_was_made_for() -> None:
    """Masks that allow the same pairs are equal, also if their documents differ; their plans must not be mixed up."""
    layout = Layout.contiguous(9, 3)
    first, second = Mask.causal([0, 5, 5, 9]), Mask.causal([0, 5, 9])
    assert first == second
    assert make_plan(first, layout).mask.cu_seqlens.tolist() == [0, 5, 5, 9]
    assert make_plan(second, layout).mask.cu_seqlens.tolist() == [0, 5, 9]


def test_report_of_every_rank_on_an_uneven_layout() -> None:
    layout = Layout.from_spans(12, [[(0, 6)], [(6, 8)], [(8, 9)], [(9, 12)]])
    mask = Mask.full([0, 12])
    ring = make_plan(mask, layout, "ring").report().ranks
    assert [(r.tokens_received, r.tokens_sent) for r in ring] == [(6, 10), (10, 11), (11, 9), (9, 6)]
    gather = make_plan(mask, layout, "allgather").report().ranks
    assert [(r.tokens_received, r.tokens_sent) for r in gather] == [(6, 18), (10, 6), (11, 3), (9, 9)]
    ulysses = make_plan(mask, layout, "ulysses", heads=4, kv_heads=4, head_dim=1, itemsize=1).report().ranks
    # A rank sends q, k, v of its tokens for three heads, and the output of its head for all other tokens.
    assert [r.bytes_sent for r in ulysses] == [3 * 3 * n + (12 - n) for n in (6, 2, 1, 3)]
    assert [r.bytes_received for r in ulysses] == [3 * (12 - n) + 3 * n for n in (6, 2, 1, 3)]


def test_plans_pickle() -> None:
    import pickle

    mask = Mask.causal([0, 700, 1000])
    plan = make_plan(mask, Layout.balanced(mask, 4))
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert again.layout == plan.layout
    assert again.report() == plan.report()


@pytest.mark.parametrize("strategy", ["groupcast", "ring", "allgather", "ulysses"])
def test_report(strategy: str) -> None:
    cu = [0, 300, 301, 900]
    mask = Mask.causal(cu)
    plan = make_plan(mask, Layout.zigzag(cu, 4), strategy)
    report = plan.report()
    assert report.strategy == strategy
    assert [r.tokens for r in report.ranks] == list(plan.layout.counts)
    assert abs(sum(r.area for r in report.ranks) - mask.area) <= 4
    assert 1.0 <= report.imbalance < 1.02
    assert sum(r.tokens_received for r in report.ranks) == sum(r.tokens_sent for r in report.ranks)
    assert sum(r.bytes_received for r in report.ranks) == sum(r.bytes_sent for r in report.ranks)
    if strategy != "ulysses":
        assert report.ranks[0].tokens_received == 900 - plan.layout.counts[0], "a zigzag needs every key everywhere"
        assert report.ranks[0].kernel_tasks > 0
    text = str(report)
    assert strategy in text
    assert "imbalance" in text
    assert "bound" in text
    assert len(text.splitlines()) >= 8


def test_report_shows_what_groupcast_saves() -> None:
    cu = np.arange(0, 8193, 256)
    mask = Mask.causal(cu)
    report = make_plan(mask, Layout.balanced(mask, 8), "groupcast").report()
    assert report.bytes_if_gathered > 0
    assert sum(r.bytes_received for r in report.ranks) == 0
    assert report.receive_bound == 0
    assert report.load_bound == -(-mask.area // 8)
