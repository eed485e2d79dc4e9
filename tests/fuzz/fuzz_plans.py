"""Random plans, walked by hand: masks, layouts, tasks, schedules, routes and bytes, from integers alone.

    mask     area, work and traffic of every rank          against `mask.dense()`
    layout   every token once; the balance it promises
    cover    every allowed pair is computed once           by the rank (or block of ranks) that holds its query
    routes   what is sent is what is received and needed   group-cast, reshard, shift, halo, chains
    bytes    the report's                                  against the messages of the schedule, one by one

Small and middling packs are compared pair by pair; large ones by sampled queries and closed forms.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import test_chains
import test_dispatch
import test_fragments
import test_layout
import test_mask
import test_routing
from hypothesis import strategies as st
from plan_walk import PlanWalk
from test_cost import borders, check_cost, masks
from test_routing import layouts
from test_tasks import check_group_cast

from longweave import Layout, Mask, Plan, make_plan
from longweave.plan import slices as sl
from longweave.plan.cost import CPU, Machine, Shape, areas, load_bound, receive_bound, traffic
from longweave.plan.dispatch.grid import auto_chunk_size
from longweave.plan.homing import home_layout

SIZES = {"small": (14, 9), "middling": (70, 16), "large": (4000, 64)}  # tokens of a document, ranks
LAYOUTS = ("any", "contiguous", "zigzag", "balanced", "home")
SAMPLES = 6  # queries of a rank of a large plan


@dataclass(frozen=True)
class PlanCase:
    size: str
    mask: Mask
    layout_kind: str
    layout: Layout
    other: Layout  # to reshard to
    strategy: str
    options: dict[str, int]
    shape: Shape
    machine: Machine
    chunk: int | str
    node: int | None
    by: int  # of a shift
    width: int  # of a convolution
    seed: int  # of the samples
    plan: Plan = field(init=False, repr=False)

    def __post_init__(self) -> None:
        of_shape = {name: getattr(self.shape, name) for name in ("heads", "kv_heads", "head_dim", "v_dim", "itemsize")}
        plan = make_plan(self.mask, self.layout, self.strategy, machine=self.machine, **of_shape, **self.options)
        object.__setattr__(self, "plan", plan)

    def __str__(self) -> str:
        small = self.mask.total <= 500
        mask = f"slices {self.mask.rows.tolist()}" if small else repr(self.mask)
        spans = [[tuple(span) for span in own] for own in self.layout.spans] if small else repr(self.layout)
        return (
            f"cu_seqlens {self.mask.cu_seqlens.tolist()}, {mask}, layout {self.layout_kind} {spans}, "
            f"{self.strategy} {self.options}, {self.shape}, chunk {self.chunk}, node {self.node}, by {self.by}, "
            f"width {self.width}"
        )


# -- drawing -------------------------------------------------------------------------------------------


@st.composite
def large_masks(draw: st.DrawFn, longest: int) -> Mask:
    """Documents of very different lengths, many of them."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 40)))
    count = draw(st.integers(1, 40))
    lengths = np.minimum(rng.lognormal(draw(st.integers(0, 7)), draw(st.integers(0, 2)), count).astype(int), longest)
    cu = borders(lengths.tolist())
    kind = draw(st.sampled_from(["causal", "full", "window", "prefix", "shared"]))
    if kind == "window":
        return Mask.sliding_window(cu, draw(st.integers(1, longest)))
    if kind == "prefix":
        return Mask.prefix_causal(cu, (lengths * rng.random(count)).astype(int).tolist())
    if kind == "shared":
        return Mask.shared_prefix(int(lengths[0]), lengths[1:].tolist())
    return Mask.causal(cu) if kind == "causal" else Mask.full(cu)


@st.composite
def options_of(draw: st.DrawFn, strategy: str, world: int, kv_heads: int) -> dict[str, int]:
    """Some of the options that a strategy takes."""
    if strategy == "groupcast":
        return draw(
            st.fixed_dictionaries({}, optional={"stages": st.integers(1, 5), "keep_kv": st.sampled_from([0, 1])})
        )
    if strategy in ("ring", "ulysses"):
        divisors = [size for size in range(1, world + 1) if world % size == 0]
        return draw(st.fixed_dictionaries({}, optional={"ulysses_size": st.sampled_from(divisors)}))
    if strategy == "allgather":
        stride = draw(st.integers(1, kv_heads))
        first = draw(st.integers(1, stride))
        ends = {"bwd_head_first_stride": first, "bwd_head_last_stride": stride - first}
        return {"heads_k_stride": stride, **(ends if first < stride and draw(st.booleans()) else {})}
    return {}


@st.composite
def plans(draw: st.DrawFn) -> PlanCase:
    size = draw(st.sampled_from(["small"] * 6 + ["middling"] * 3 + ["large"]))
    longest, most_ranks = SIZES[size]
    mask = draw(large_masks(longest) if size == "large" else masks(largest=longest))
    total, world = mask.total, draw(st.integers(1, most_ranks))
    kind, chunk = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(["auto", 1, 3, 16]))
    node = draw(st.sampled_from([None, 1, 2, 4]))
    machine = draw(st.sampled_from([Machine(), CPU]))
    if kind == "contiguous":
        layout = Layout.contiguous(total, world)
    elif kind == "zigzag":
        layout = Layout.zigzag(mask.cu_seqlens, world)
    elif kind == "balanced":
        chunk = chunk if size == "small" else "auto"
        layout = Layout.balanced(mask, world, chunk_size=chunk, node_size=node)
    elif kind == "home":
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=world - 1, max_size=world - 1)))
        layout = home_layout(np.diff([0, *cuts, total]).tolist())
    else:
        layout = draw(layouts(total, world))
    kv_heads = draw(st.integers(1, 6))
    shape = Shape(
        kv_heads * draw(st.integers(1, 4)),
        kv_heads,
        draw(st.integers(1, 9)),
        draw(st.sampled_from([None, 5])),
        draw(st.sampled_from([2, 4, 8])),
    )
    strategy = draw(st.sampled_from(["groupcast", "ring", "allgather", "ulysses", "auto"]))
    return PlanCase(
        size,
        mask,
        kind,
        layout,
        draw(layouts(total, world)),
        strategy,
        draw(options_of(strategy, world, kv_heads)),
        shape,
        machine,
        chunk,
        node,
        draw(st.integers(-5, 5) | st.sampled_from([-(2**70), 40, 2**70])),
        draw(st.integers(2, 8)),
        draw(st.integers(0, 1 << 40)),
    )


# -- checking ------------------------------------------------------------------------------------------


def check_plan(case: PlanCase) -> None:
    """Raises AssertionError where a plan is not what it says."""
    check_balance(case)
    walk = PlanWalk(case.plan)
    if case.size == "large":
        check_samples(case, walk)
    else:
        check_mask(case)
        check_routes(case)
        check_cover(walk)
    check_report(walk)


def _run(test: object, *args: object) -> None:
    """The body of a test that is `given` its arguments."""
    test.hypothesis.inner_test(*args)  # type: ignore[attr-defined]


def check_balance(case: PlanCase) -> None:
    mask, layout = case.mask, case.layout
    counts, work = layout.counts, areas(mask, layout)
    world, cu = layout.world_size, mask.cu_seqlens
    assert work.sum() == mask.area
    assert work.max() >= load_bound(mask, world)
    if mask == Mask.causal(cu):
        received = traffic(mask, layout)[1]
        largest, together = receive_bound(mask, world, max(1, *counts))
        assert received.max() >= largest
        assert received.sum() >= together
    if case.layout_kind in ("contiguous", "zigzag"):
        assert max(counts) - min(counts) <= 1
    if case.layout_kind == "zigzag" and mask == Mask.causal(cu):
        # Two pieces a rank, each within a token of its share and begun within 2P tokens of where it would.
        off = 4 * (np.diff(cu) + 2 * world).sum()
        assert np.abs(work - mask.area / world).max() <= off
    if case.layout_kind == "balanced" and case.size == "small":
        _run(test_dispatch.test_every_mask_every_world, mask, world, case.chunk, case.node)
        _run(test_dispatch.test_never_worse_than_a_member, mask, world)
    elif case.layout_kind == "balanced":
        assert max(counts) <= -(-mask.total // world) + auto_chunk_size(mask.total, world)
    for rank in range(world):
        begin = np.repeat(cu[:-1], np.diff(cu))
        tokens = layout.indices(rank)
        assert np.array_equal(layout.positions(rank, cu), tokens - begin[tokens])


def check_mask(case: PlanCase) -> None:
    mask, lengths = case.mask, np.diff(case.mask.cu_seqlens).tolist()
    assert mask.area == mask.dense().sum()
    check_cost(mask, case.layout, case.node or 1)
    _run(test_mask.test_causal_and_full, lengths)
    _run(test_mask.test_sliding_window, lengths, case.width)
    _run(test_mask.test_shared_prefix, lengths[0], lengths[1:])


def check_routes(case: PlanCase) -> None:
    mask, layout, cu = case.mask, case.layout, case.mask.cu_seqlens.tolist()
    test_layout.check(layout)
    check_group_cast(mask, layout, case.plan.stages)
    _run(test_routing.test_any_layout_to_any_layout, (layout, case.other))
    _run(test_routing.test_the_way_back_is_the_reverse, (layout, case.other))
    _run(test_routing.test_shift_brings_the_neighbour_in_the_document, (layout, cu), case.by)
    _run(test_fragments.test_fragments_are_the_layout_cut_by_the_documents, (layout, cu))
    _run(test_fragments.test_halos_are_the_tokens_before_each_fragment, (layout, cu), case.width)
    _run(test_chains.test_every_fragment_learns_what_went_before, (layout, cu))
    _run(test_chains.test_rows_travel_only_to_those_who_need_them, (layout, cu))


def check_cover(walk: PlanWalk) -> None:
    """All pairs, counted."""
    plan = walk.plan
    dense = plan.mask.dense().astype(np.int64)
    found = np.zeros_like(dense)
    for rank in range(0, plan.world_size, plan.ulysses_size):
        for tasks, queries, keys in walk.tasks(rank):
            for q0, q1, k0, k1, lo, hi in tasks.tolist():
                distance = np.arange(k0, k1)[None] - np.arange(q0, q1)[:, None]
                found[np.ix_(queries[q0:q1], keys[k0:k1])] += (distance >= lo) & (distance <= hi)
    assert np.array_equal(found, dense), "every allowed pair once, and no other"


def check_samples(case: PlanCase, walk: PlanWalk) -> None:
    """A few ranks, all of their work in closed form, and all keys of a few of their queries."""
    plan, mask, layout = case.plan, case.mask, case.layout
    rng = np.random.default_rng(case.seed)
    owned = np.sort(np.concatenate([layout.indices(rank) for rank in range(layout.world_size)]))
    assert np.array_equal(owned, np.arange(mask.total)), "every token once"
    for rank in sorted({int(rng.integers(layout.world_size)) for _ in range(3)}):
        first = rank - rank % plan.ulysses_size
        work = areas(mask, layout)[first : first + plan.ulysses_size].sum()
        tasks = walk.tasks(rank)
        assert sum(int(sl.area(rows).sum()) for rows, _, _ in tasks) == work
        queries = tasks[0][1]
        for place in rng.integers(0, len(queries), SAMPLES if len(queries) else 0).tolist():
            found = [keys[_keys_of(rows, place)] for rows, _, keys in tasks]
            expected = _keys_of(mask.rows, int(queries[place]))
            assert np.array_equal(np.sort(np.concatenate(found)), np.sort(expected)), (rank, place)


def _keys_of(rows: np.ndarray, query: int) -> np.ndarray:
    """Every key that these slices let a query see, once for each slice that does."""
    near = rows[(rows[:, sl.Q0] <= query) & (query < rows[:, sl.Q1])]
    begin = np.maximum(near[:, sl.K0], query + near[:, sl.LO])
    end = np.minimum(near[:, sl.K1], query + near[:, sl.HI] + 1)
    spans = zip(begin.tolist(), end.tolist(), strict=True)
    return np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(a, max(a, b)) for a, b in spans)])


# -- bytes ---------------------------------------------------------------------------------------------


def check_report(walk: PlanWalk) -> None:
    plan, report = walk.plan, walk.plan.report()
    received, sent = walk.bytes_received_and_sent()
    assert [rank.bytes_received for rank in report.ranks] == received.tolist()
    assert [rank.bytes_sent for rank in report.ranks] == sent.tolist()
    assert received.sum() == sent.sum()
    assert [rank.tokens for rank in report.ranks] == list(plan.layout.counts)
    assert abs(sum(rank.area for rank in report.ranks) - plan.mask.area) <= plan.world_size
    assert report.imbalance >= 1 - plan.world_size / max(1, plan.mask.area)
    firsts = range(0, plan.world_size, plan.ulysses_size)
    counts = [sum(len(rows) for rows, _, _ in walk.tasks(rank)) for rank in firsts]
    assert [report.ranks[rank].kernel_tasks for rank in firsts] == counts
    assert str(report)
