"""The work of a rank, pair by pair, and fusing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_routing import layouts

from longweave import Layout, Mask
from longweave.plan.cost import areas
from longweave.plan.work import fuse, work_by_source, work_on_all

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
        for source, rows in enumerate(work_by_source(mask, layout.table, rank)):
            found = pairs(rows)
            expected = dense[np.ix_(mine, layout.indices(source))]
            assert found == [*zip(*(x.tolist() for x in np.nonzero(expected)), strict=True)]
        found = pairs(work_on_all(mask, layout.table, rank))
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
            work = work_by_source(Mask.causal(cu), layout.table, rank)
            assert len(work[rank]) == 2
            assert all(len(work[source]) == 2 for source in range(world)), "one rectangle per document and source"


def test_tasks_of_a_pack_do_not_multiply() -> None:
    cu = np.arange(0, 2001, 20)
    layout = Layout.contiguous(2000, 4)
    assert len(work_by_source(Mask.causal(cu), layout.table, 1)[1]) == 25
    assert len(work_by_source(Mask.causal(cu), layout.table, 1)[0]) == 0
