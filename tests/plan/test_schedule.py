"""Plans: which strategy and why, identity, and what a report says."""

import pickle

import numpy as np
import pytest

from longweave import InputError, Layout, Mask
from longweave.plan.cost import CPU, Machine, Shape
from longweave.plan.schedule import make_plan


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


def test_equal_plans() -> None:
    mask = Mask.causal([0, 700, 1000])
    layout = Layout.balanced(mask, 4)
    a, b = make_plan(mask, layout), make_plan(Mask.causal([0, 700, 1000]), Layout.balanced(mask, 4))
    assert a == b
    assert hash(a) == hash(b)
    assert a.fingerprint == b.fingerprint
    assert make_plan(mask, layout, "ring") != a
    with pytest.raises(AttributeError):
        a.strategy = "ring"


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
    # Blocks of 8 and 4 tokens; each rank carries the K/V heads that it reads: one of two, or the only one.
    halves, whole = (
        make_plan(mask, layout, "ring", ulysses_size=2, heads=4, kv_heads=kv_heads, head_dim=8).report().ranks
        for kv_heads in (2, 1)
    )
    assert [(r.tokens_received, r.tokens_sent) for r in halves] == [(2, 4), (2, 4), (4, 2), (4, 2)]
    assert [(r.tokens_received, r.tokens_sent) for r in whole] == [(4, 8), (4, 8), (8, 4), (8, 4)]
    gather = make_plan(mask, layout, "allgather").report().ranks
    assert [(r.tokens_received, r.tokens_sent) for r in gather] == [(6, 18), (10, 6), (11, 3), (9, 9)]
    ulysses = make_plan(mask, layout, "ulysses", heads=4, kv_heads=4, head_dim=1, itemsize=1).report().ranks
    # A rank sends q, k, v of its tokens for three heads, and the output of its head for all other tokens.
    assert [r.bytes_sent for r in ulysses] == [3 * 3 * n + (12 - n) for n in (6, 2, 1, 3)]
    assert [r.bytes_received for r in ulysses] == [3 * (12 - n) + 3 * n for n in (6, 2, 1, 3)]


def test_plans_pickle() -> None:
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
    header, *rows = text.splitlines()[-5:]
    assert " ".join(header.split()) == "rank tokens pairs tokens received tokens sent MB received tasks"
    moved = (
        [["–"] * 2] * 4
        if strategy == "ulysses"
        else [[f"{r.tokens_received}", f"{r.tokens_sent}"] for r in report.ranks]
    )
    assert [row.split()[3:5] for row in rows] == moved, "Ulysses moves heads"
    assert ("heads move, not K/V tokens" in text) == (strategy == "ulysses")


def test_report_shows_what_groupcast_saves() -> None:
    cu = np.arange(0, 8193, 256)
    mask = Mask.causal(cu)
    report = make_plan(mask, Layout.balanced(mask, 8), "groupcast").report()
    assert report.bytes_if_gathered > 0
    assert sum(r.bytes_received for r in report.ranks) == 0
    assert report.receive_bound == 0
    assert report.load_bound == -(-mask.area // 8)


def test_the_shape_and_the_machine_of_a_plan() -> None:
    mask, layout = Mask.causal([0, 700, 1000]), Layout.zigzag([0, 700, 1000], 4)
    plan = make_plan(mask, layout)
    assert (plan.shape, plan.machine) == (Shape(), Machine())
    plan = make_plan(mask, layout, heads=8, kv_heads=2, head_dim=64, v_dim=32, itemsize=4, machine=CPU)
    assert (plan.shape, plan.machine) == (Shape(8, 2, 64, 32, 4), CPU)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": [0, 9]}, r"mask is a list"),
        ({"layout": [[(0, 9)]]}, r"layout is a list"),
        ({"layout": Layout.contiguous(8, 2)}, r"mask has 9 tokens and the layout 8"),
        ({"strategy": "magic"}, r"strategy is 'magic'"),
        ({"heads": 0}, r"heads is 0"),
        ({"heads": 6, "kv_heads": 4}, r"must be a multiple"),
        ({"v_dim": 0}, r"v_dim is 0"),
        ({"strategy": "ring", "ulysses_size": 3}, r"ulysses_size is 3; give a divisor of the 2 ranks"),
        (
            {"strategy": "groupcast", "ulysses_size": 2},
            r"ulysses_size goes with ring and ulysses; strategy groupcast takes stages, keep_kv",
        ),
        ({"stages": 0}, r"stages is 0; give a positive int"),
        ({"stages": True}, r"stages is True"),
        ({"keep_kv": 2}, r"keep_kv is 2; give True or False"),
        ({"loss_weight": 1}, r"there is no option 'loss_weight'; attention across ranks has stages, keep_kv, ulysses_"),
        ({"strategy": "allgather", "heads_k_stride": 9}, r"heads_k_stride is 9 but there are 8 K/V heads"),
        ({"strategy": "allgather", "heads_k_stride": 2, "bwd_head_first_stride": 3}, r"heads_k_stride is 2"),
        (
            {"strategy": "allgather", "heads_k_stride": 4, "bwd_head_first_stride": 3, "bwd_head_last_stride": 2},
            r"together exceed heads_k_stride 4",
        ),
    ],
)
def test_bad_plans(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_plan(**{"mask": Mask.causal([0, 9]), "layout": Layout.contiguous(9, 2), **options})


def test_ulysses_size() -> None:
    mask, layout = Mask.causal([0, 100]), Layout.zigzag([0, 100], 6)
    assert make_plan(mask, layout, "ulysses").ulysses_size == 6
    assert make_plan(mask, layout, "ring").ulysses_size == 1
    assert make_plan(mask, layout, "ring", ulysses_size=3).ulysses_size == 3


def test_with_auto_an_option_holds_if_the_strategy_that_is_taken_has_it() -> None:
    mask = Mask.causal(np.arange(0, 65537, 512))
    plan = make_plan(mask, Layout.balanced(mask, 8), stages=3, keep_kv=False, ulysses_size=5, heads_k_stride=99)
    assert (plan.strategy, plan.stages, plan.keep_kv, plan.ulysses_size) == ("groupcast", 3, False, 1)


def test_head_groups_of_a_plan() -> None:
    mask, layout = Mask.causal([0, 100]), Layout.zigzag([0, 100], 2)
    plan = make_plan(mask, layout, "allgather", heads_k_stride=4, bwd_head_first_stride=1, bwd_head_last_stride=1)
    assert plan.head_groups(backward=False) == ((0, 4), (4, 8))
    assert plan.head_groups(backward=True) == ((0, 1), (1, 4), (4, 7), (7, 8))
    assert plan != make_plan(mask, layout, "allgather", heads_k_stride=2)


def test_report_counts_the_tasks_of_blocks() -> None:
    """Ranks that exchange heads compute the same tasks; alone, a rank of a long document has one or two per source."""
    mask, layout = Mask.causal([0, 64]), Layout.zigzag([0, 64], 4)
    assert [r.kernel_tasks for r in make_plan(mask, layout, "ulysses").report().ranks] == [1, 1, 1, 1]
    assert [r.kernel_tasks for r in make_plan(mask, layout, "ring").report().ranks] == [4, 4, 4, 4]
    assert [r.kernel_tasks for r in make_plan(mask, layout, "allgather").report().ranks] == [2, 2, 2, 1]


def test_a_report_says_how_group_cast_goes() -> None:
    mask, layout = Mask.causal([0, 64]), Layout.zigzag([0, 64], 2)
    for options, said in (
        ({"stages": 1, "keep_kv": True}, "1 stage, received K/V kept for backward"),
        ({"stages": 3, "keep_kv": False}, "3 stages, K/V received again for backward"),
    ):
        assert said in str(make_plan(mask, layout, "groupcast", **options).report()).splitlines()
    assert "2 ranks exchange heads" in str(make_plan(mask, layout, "ulysses").report())
    assert "stage" not in str(make_plan(mask, layout, "ring").report())
