"""The stages of a plan add up to its report."""

import numpy as np
import pytest

from longweave.plan import Layout, Mask, make_plan
from longweave.plan.chains import sent_bytes
from longweave.plan.fragments import fragments
from longweave.plan.stages import areas_by_source, chain_stages, exchange_matrix, plan_stages
from longweave.plan.tasks import GroupCast

PACKS = {"one": [101], "holes": [5, 0, 70, 33], "many": list(range(1, 40))}
MASKS = {"causal": Mask.causal, "full": Mask.full, "window": lambda cu: Mask.sliding_window(cu, 7)}
WAYS = [
    ("ring", {}),
    ("ring", {"ulysses_size": 2}),
    ("allgather", {}),
    ("allgather", {"heads_k_stride": 1}),
    ("groupcast", {}),
    ("groupcast", {"stages": 4}),
    ("ulysses", {}),
]


def layouts(mask: Mask, world: int) -> list[Layout]:
    cu = mask.cu_seqlens
    return [Layout.contiguous(int(cu[-1]), world), Layout.zigzag(cu, world), Layout.balanced(mask, world)]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(("strategy", "options"), WAYS)
@pytest.mark.parametrize("heads", [(8, 8), (6, 2)])
def test_stages_add_up_to_the_report(
    kind: str, pack: str, strategy: str, options: dict[str, int], heads: tuple[int, int]
) -> None:
    mask = MASKS[kind](np.append(0, np.cumsum(PACKS[pack])))
    for world in (1, 4, 6):
        for layout in layouts(mask, world):
            given = {} if world == 1 else options
            plan = make_plan(mask, layout, strategy, heads=heads[0], kv_heads=heads[1], head_dim=16, **given)
            report, stages = plan.report(), plan_stages(plan)
            matrix = exchange_matrix(stages)
            assert [rank.area for rank in report.ranks] == sum(stage.work for stage in stages).tolist()
            assert [rank.bytes_received for rank in report.ranks] == matrix.sum(axis=0).tolist()
            assert [rank.bytes_sent for rank in report.ranks] == matrix.sum(axis=1).tolist()
            assert not matrix.diagonal().any()


def test_a_ring_computes_what_has_arrived() -> None:
    """Step s of rank r is on the K/V of rank r - s; of a causal document in a row, later ranks' are not looked at."""
    mask = Mask.causal([0, 8])
    stages = plan_stages(make_plan(mask, Layout.contiguous(8, 4), "ring", heads=2, kv_heads=1, head_dim=4))
    assert [stage.work.tolist() for stage in stages] == [[3, 3, 3, 3], [0, 4, 4, 4], [0, 0, 4, 4], [0, 0, 0, 4]]
    assert np.count_nonzero(stages[0].messages) == 4
    assert stages[0].messages[3, 0] == 2 * 1 * 8 * 2  # two tokens, one head, K and V of 4, two bytes each
    assert not stages[3].messages.any()


def test_areas_by_source_are_those_of_the_dense_mask() -> None:
    mask = Mask.causal([0, 9, 9, 30])
    layout = Layout.zigzag(mask.cu_seqlens, 3)
    dense = mask.dense()
    for q, row in enumerate(areas_by_source(mask, layout).tolist()):
        assert row == [int(dense[np.ix_(layout.indices(q), layout.indices(k))].sum()) for k in range(3)]


def test_stage_starts_tell_which_stage_brings_a_token() -> None:
    mask = Mask.causal([0, 64])
    layout = Layout.contiguous(64, 4)
    cast = GroupCast(mask, layout, 2)
    assert cast.stage_starts(0) == (-1, -1)
    assert cast.stage_starts(3) == (0, 24)
    assert cast.stage_starts(1) == (0, 8)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_chains_send_what_they_are_counted_for(pack: str, world: int) -> None:
    mask = Mask.causal(np.append(0, np.cumsum(PACKS[pack])))
    for layout in layouts(mask, world):
        cut = fragments(layout, mask.cu_seqlens)
        stages = chain_stages(cut, 7, 5)
        assert exchange_matrix(stages).sum(axis=1).tolist() == sent_bytes(cut, 7, 5, itemsize=1)[0].tolist()
        assert sum(int(stage.work.sum()) for stage in stages) >= layout.total
        assert sum(int(stage.work.sum()) for stage in stages[1:]) <= layout.total
