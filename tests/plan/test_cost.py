"""The cost model: pairs and tokens counted one by one, bounds that no layout beats, seconds of a machine."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_routing import layouts

from longweave import InputError, Layout, Mask
from longweave.plan.cost import (
    CPU,
    Machine,
    Shape,
    areas,
    cost,
    estimates,
    load_bound,
    receive_bound,
    stages_for,
    traffic,
)


def borders(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths, dtype=int).tolist()]


@st.composite
def masks(draw: st.DrawFn, largest: int = 14) -> Mask:
    """Every kind of mask over small ragged packs, empty documents included."""
    lengths = draw(st.lists(st.integers(0, largest), min_size=1, max_size=6))
    cu = borders(lengths)
    kind = draw(st.sampled_from(["causal", "full", "window", "prefix", "shared", "slices"]))
    if kind == "causal":
        return Mask.causal(cu)
    if kind == "full":
        return Mask.full(cu)
    if kind == "window":
        return Mask.sliding_window(cu, draw(st.integers(1, largest)))
    if kind == "prefix":
        return Mask.prefix_causal(cu, [draw(st.integers(0, n)) for n in lengths])
    if kind == "shared":
        return Mask.shared_prefix(lengths[0], lengths[1:])
    total = cu[-1]
    slices = []
    for start, stop in itertools.pairwise(cu):
        keys = sorted((draw(st.integers(0, total)), draw(st.integers(0, total))))
        slices.append(((start, stop), keys, draw(st.sampled_from(["full", "causal", (-3, 2)]))))
    return Mask.from_slices(total, slices)


worlds = st.integers(1, 9)


@given(st.data())
def test_cost_counts_pairs_and_tokens_one_by_one(data: st.DataObject) -> None:
    mask, world = data.draw(masks()), data.draw(worlds)
    layout = data.draw(layouts(mask.total, world))
    check_cost(mask, layout, data.draw(st.integers(1, world + 1)))


def check_cost(mask: Mask, layout: Layout, node_size: int) -> None:
    world = layout.world_size
    dense = mask.dense()
    owner = np.asarray(layout.owner(np.arange(mask.total)))
    moved = np.zeros((world, world), dtype=int)  # tokens from, to
    for rank in range(world):
        seen = np.flatnonzero(dense[owner == rank].any(axis=0))
        moved[:, rank] = np.bincount(owner[seen], minlength=world)
    np.fill_diagonal(moved, 0)
    assert areas(mask, layout).tolist() == [int(dense[owner == rank].sum()) for rank in range(world)]
    sent, received = traffic(mask, layout)
    assert sent.tolist() == moved.sum(1).tolist()
    assert received.tolist() == moved.sum(0).tolist()
    node = np.arange(world) // node_size
    across = np.where(node[:, None] == node[None], 0, moved)
    result = cost(mask, layout, node_size)
    assert result.sent_across.tolist() == across.sum(1).tolist()
    assert result.received_across.tolist() == across.sum(0).tolist()
    assert (result.area.tolist(), result.sent.tolist()) == (areas(mask, layout).tolist(), sent.tolist())


@given(st.data())
def test_bounds_hold_for_every_layout(data: st.DataObject) -> None:
    cu = borders(data.draw(st.lists(st.integers(0, 14), min_size=1, max_size=6)))
    mask, world = Mask.causal(cu), data.draw(worlds)
    layout = data.draw(layouts(mask.total, world))
    largest, total = receive_bound(mask, world, tokens_per_rank=max(1, *layout.counts))
    received = traffic(mask, layout)[1]
    assert received.max() >= largest
    assert received.sum() >= total
    assert areas(mask, layout).max() >= load_bound(mask, world)


def test_receive_bound_by_hand() -> None:
    # 10 tokens, at most 4 a rank: whoever holds the end receives 6, and 10 + 6 + 2 are seen, 10 of them at home.
    assert receive_bound(Mask.causal([0, 10, 12]), 3) == (6, 8)
    assert receive_bound(Mask.causal([0, 4, 8]), 2) == (0, 0)
    assert receive_bound(Mask.causal([0]), 2) == (0, 0)


def test_cost_refuses_another_pack() -> None:
    with pytest.raises(InputError, match="mask has 5 tokens and the layout 6"):
        traffic(Mask.causal([0, 5]), Layout.contiguous(6, 2))


def test_seconds_are_those_of_the_slowest_rank() -> None:
    mask, layout = Mask.full([0, 4, 8]), Layout.from_spans(8, [[(0, 4), (4, 6)], [(6, 8)]])
    shape, machine = Shape(2, 1, 8, 4, 2), Machine(flops=1e3, bytes_per_second=1e2, within_node=0.5)
    assert shape.flops_per_pair == 2 * 2 * (8 + 4)
    assert shape.kv_bytes == (8 + 4) * 2
    found = cost(mask, layout)
    assert (found.area.tolist(), found.sent.tolist(), found.received.tolist()) == ([24, 8], [2, 2], [2, 2])
    assert found.seconds(shape, machine) == pytest.approx(24 * 48 / 1e3), "compute"
    assert found.traffic_seconds(shape, machine) == pytest.approx(2 * 24 / 1e2)
    assert found.seconds(shape, Machine(1e6, 1e2)) == pytest.approx(2 * 24 / 1e2), "traffic"
    one_node = cost(mask, layout, node_size=2)
    assert one_node.traffic_seconds(shape, machine) == pytest.approx(0.5 * 2 * 24 / 1e2)


def test_the_default_layer_and_machine() -> None:
    """Receiving a token takes as long as computing 1389 pairs: what the quality tests of the solver are tuned to."""
    shape, machine = Shape(), Machine()
    assert machine.seconds_per_token(shape) / machine.seconds_per_pair(shape) == pytest.approx(1388.9, abs=0.1)
    assert CPU.seconds_per_pair(shape) > 1000 * machine.seconds_per_pair(shape)


def test_estimates_come_fastest_first() -> None:
    mask = Mask.causal(np.arange(0, 65537, 512))
    layout = Layout.balanced(mask, 8)
    found = estimates(cost(mask, layout), layout, Shape(), Machine())
    assert {estimate.strategy for estimate in found} == {"groupcast", "ring", "allgather", "ulysses"}
    assert [e.seconds for e in found] == sorted(e.seconds for e in found)
    assert found[0].strategy == "groupcast"
    full, zigzag = Mask.full([0, 65536]), Layout.zigzag([0, 65536], 8)
    found = estimates(cost(full, zigzag), zigzag, Shape(), Machine())
    assert "groupcast" not in {estimate.strategy for estimate in found}, "every key is needed everywhere"


def test_stages_hide_traffic() -> None:
    assert [stages_for(1.0, traffic) for traffic in (0.0, 0.5, 0.6, 1.0, 1.1)] == [1, 1, 2, 2, 4]
