"""The tasks of a rank, pair by pair; fusing; group-cast schedules, walked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_routing import layouts

from longweave import Layout, Mask
from longweave.plan import slices as sl
from longweave.plan.cost import areas, traffic
from longweave.plan.tasks import GroupCast, fuse, fuse_each, tasks_by_source, tasks_on_all

CU = [0, 3, 3, 14, 15, 22]

MASKS = {
    "causal": Mask.causal(CU),
    "full": Mask.full(CU),
    "window": Mask.sliding_window(CU, 4),
    "prefix": Mask.prefix_causal(CU, [2, 0, 5, 1, 0]),
    "shared": Mask.shared_prefix(6, [4, 1, 5, 6]),
    "slices": Mask.from_slices(
        22, [((0, 9), (3, 12), (-4, 2)), ((9, 22), (0, 22), "causal"), ((3, 5), (20, 22), "full")]
    ),
}


def pairs(rows: np.ndarray) -> list[tuple[int, int]]:
    return sorted(
        (q, k)
        for q0, q1, k0, k1, lo, hi in rows.tolist()
        for q in range(q0, q1)
        for k in range(k0, k1)
        if lo <= k - q <= hi
    )


@pytest.mark.parametrize("name", MASKS)
@given(layout=layouts(22, 3))
def test_every_pair_is_computed_once_by_the_rank_of_its_query(name: str, layout: Layout) -> None:
    mask = MASKS[name]
    dense = mask.dense()
    for rank in range(3):
        mine = layout.indices(rank)
        for source, rows in enumerate(tasks_by_source(mask, layout, rank)):
            found = pairs(rows)
            expected = dense[np.ix_(mine, layout.indices(source))]
            assert found == [*zip(*(x.tolist() for x in np.nonzero(expected)), strict=True)]
        found = pairs(tasks_on_all(mask, layout, rank))
        assert found == [*zip(*(x.tolist() for x in np.nonzero(dense[mine])), strict=True)]
    assert areas(mask, layout).tolist() == [dense[layout.indices(rank)].sum() for rank in range(3)]


spans = st.tuples(st.integers(0, 8), st.integers(1, 4)).map(lambda t: (t[0], t[0] + t[1]))
limits = st.tuples(st.none() | st.integers(-6, 6), st.none() | st.integers(-6, 6))


@given(st.lists(st.tuples(spans, spans, limits), max_size=6))
def test_fuse_keeps_the_pairs(items) -> None:
    kept: list = []
    for item in items:
        try:
            Mask.from_slices(12, [*kept, item])
            kept.append(item)
        except ValueError:
            continue
    rows = Mask.from_slices(12, kept).rows
    fused = fuse(rows)
    assert pairs(fused) == pairs(rows)
    assert len(fused) <= len(rows)


def test_the_local_part_of_a_zigzag_is_one_causal_task_per_document() -> None:
    cu = [0, 1000, 1703]
    for world in (2, 3, 8):
        layout = Layout.zigzag(cu, world)
        for rank in range(world):
            tasks = tasks_by_source(Mask.causal(cu), layout, rank)
            assert len(tasks[rank]) == 2
            assert all(len(tasks[source]) == 2 for source in range(world)), "one rectangle per document and source"


def test_tasks_of_a_pack_do_not_multiply() -> None:
    cu = np.arange(0, 2001, 20)
    layout = Layout.contiguous(2000, 4)
    assert len(tasks_by_source(Mask.causal(cu), layout, 1)[1]) == 25
    assert len(tasks_by_source(Mask.causal(cu), layout, 1)[0]) == 0


@pytest.mark.parametrize("name", MASKS)
@given(st.lists(layouts(22, 2), max_size=3))
def test_fusing_several_sets_at_once_keeps_them_apart(name: str, cuts: list[Layout]) -> None:
    parts = [sl.cut_q(MASKS[name].rows, *layout.sorted[:2])[0] for layout in cuts] + [np.empty((0, 6), dtype=np.int64)]
    assert [part.tolist() for part in fuse_each(parts)] == [fuse(part).tolist() for part in parts]


# -- group-cast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
@given(layout=layouts(22, 4), stages=st.integers(1, 3))
def test_received_is_needed_and_all_work_is_done(name: str, layout: Layout, stages: int) -> None:
    check_group_cast(MASKS[name], layout, stages)


def check_group_cast(mask: Mask, layout: Layout, stages: int) -> None:
    dense = mask.dense()
    world = layout.world_size
    schedules = [*map(GroupCast(mask, layout, stages).of, range(world))]
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
            done += [(int(mine[q]), int(in_order[k])) for q, k in pairs(stage.tasks)]
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
        assert GroupCast(Mask.causal(cu), layout, 2).of(rank).stages == (), "no exchange at all"
