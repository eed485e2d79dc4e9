"""Bad input to masks, layouts and plans: integers only."""

import numpy as np
import pytest
import torch
from bad_values import INF, INTS, NAN, SCALARS, Question, Row, ask_all

import longweave as lw
from longweave.plan import Machine, Shape, cost, route

CU = [0, 3, 8]
MASK, LAYOUT = lw.Mask.causal(CU), lw.Layout.zigzag(CU, 2)
PLAN = lw.make_plan(MASK, LAYOUT)

SLICES = {
    **SCALARS,
    "[1]": [1],
    "['abc']": ["abc"],
    "[(0, 1)]": [(0, 1)],
    "huge span": [((0, 2**70), (0, 4), "causal")],
    "unknown kind": [((0, 4), (0, 4), "x")],
    "kind None": [((0, 4), (0, 4), None)],
    "kind 3": [((0, 4), (0, 4), 3)],
    "float limits": [((0, 4), (0, 4), (1.5, 2))],
    "nan limits": [((0, 4), (0, 4), (NAN, NAN))],
    "one limit": [((0, 4), (0, 4), [0])],
    "huge limits": [((0, 4), (0, 4), (-(2**70), 2**70))],
    "no pair": [((0, 4), (0, 4), (2**70, 2**71))],
    "bools": [((False, True), (0, 4), "full")],
    "set of kinds": [((0, 4), (0, 4), {"full"})],
    "slice of strings": [lw.Slice((0, 4), (0, 4), "x", "y")],  # type: ignore[arg-type]
    "slice of ints": [lw.Slice(1, 2)],  # type: ignore[arg-type]
    "array": np.zeros((2, 3)),
    "tensor": torch.zeros(2, 3, dtype=torch.int64),
}
SPANS = {
    **SCALARS,
    "[3]": [3],
    "[[3]]": [[3]],
    "huge": [[(0, 2**70)]],
    "huge and empty": [[(0, 8), (2**70, 2**70)]],
    "beyond the total": [[(0, 2**63 - 1)]],
    "negative": [[(-1, 8)]],
    "bools": [[(False, 8)]],
    "floats": [[(0.0, 8.0)]],
    "strings": [["ab"]],
    "three": [[(0, 4, 8)]],
    "by rank": {0: [(0, 8)]},
    "set": {((0, 8),)},
    "tensor": [torch.tensor([[0, 8]])],
    "float tensor": [torch.tensor([[0.0, 8.0]])],
    "meta": [torch.empty(1, 2, device="meta")],
}
MACHINES = {
    **SCALARS,
    "no speed": Machine(flops=0),
    "a string": Machine(flops="x"),  # type: ignore[arg-type]
    "nan speed": Machine(flops=NAN),
    "endless speed": Machine(bytes_per_second=INF),
    "negative latency": Machine(latency=-1),
    "a shape": Shape(),
}
SHAPES = {
    **SCALARS,
    "no heads": Shape(heads=0),
    "a string": Shape(heads="x"),  # type: ignore[arg-type]
    "3 : 2 heads": Shape(heads=3, kv_heads=2),
    "a machine": Machine(),
}
OPTIONS = (SCALARS, "None | int64")
SIZES = (SCALARS, "int64")
BORDERS = (INTS, "")

ROWS = [
    Row("Mask.causal", lw.Mask.causal, {"cu_seqlens": CU}, cu_seqlens=BORDERS),
    Row("Mask.full", lw.Mask.full, {"cu_seqlens": CU}, cu_seqlens=BORDERS),
    Row(
        "Mask.sliding_window",
        lw.Mask.sliding_window,
        {"cu_seqlens": CU, "window": 2},
        cu_seqlens=BORDERS,
        window=(SCALARS, "2**40 | 2**70 | 10**400 | int64"),
    ),
    Row(
        "Mask.prefix_causal",
        lw.Mask.prefix_causal,
        {"cu_seqlens": CU, "prefix_lens": [1, 2]},
        cu_seqlens=BORDERS,
        prefix_lens=(INTS, "0 | int64 | tensor(2) | [1, 2]"),
    ),
    Row(
        "Mask.shared_prefix",
        lw.Mask.shared_prefix,
        {"prefix_len": 3, "branch_lens": [1, 2]},
        prefix_len=(SCALARS, "0 | int64"),
        branch_lens=(INTS, "[] | [1, 2] | [0, 5, 2]"),
    ),
    Row(
        "Mask.from_slices",
        lw.Mask.from_slices,
        {"total": 8, "slices": [((0, 4), (0, 4), "causal")]},
        total=(SCALARS, ""),
        slices=(SLICES, "[] | huge limits | no pair"),
    ),
    Row(
        "Mask",
        lw.Mask,
        {"total": 8, "rows": MASK.rows, "cu_seqlens": CU},
        total=(SCALARS, ""),
        rows=(INTS, ""),
        cu_seqlens=BORDERS,
        position_offsets=(INTS, "None | [1, 2] | [0, -1] | [0, 2**33]"),
    ),
    Row("mask.windowed", MASK.windowed, {"window": 2}, window=(SCALARS, "2**40 | 2**70 | 10**400 | int64")),
    Row("mask.crosses_documents", MASK.crosses_documents, {"cu_seqlens": CU}, cu_seqlens=BORDERS),
    Row(
        "Layout.contiguous",
        lw.Layout.contiguous,
        {"total": 8, "world_size": 2},
        total=(SCALARS, "0 | int64"),
        world_size=SIZES,
    ),
    Row(
        "Layout.zigzag",
        lw.Layout.zigzag,
        {"cu_seqlens": CU, "world_size": 2},
        cu_seqlens=(INTS, "[0, 2**33]"),
        world_size=SIZES,
    ),
    Row(
        "Layout.balanced",
        lw.Layout.balanced,
        {"mask": MASK, "world_size": 2},
        mask=(SCALARS, ""),
        world_size=SIZES,
        chunk_size=(SCALARS, "int64"),
        imbalance=(SCALARS, "0 | 2**40 | 2**70 | inf | 1.5 | 1e30 | float64 | int64"),
        token_slack=(SCALARS, "None | 0 | int64"),
        node_size=(SCALARS, "None | int64"),
        shape=(SHAPES, "None"),
        machine=(MACHINES, "None"),
    ),
    Row(
        "Layout.from_spans",
        lw.Layout.from_spans,
        {"total": 8, "spans": [[(0, 4)], [(4, 8)]]},
        total=(SCALARS, ""),
        spans=(SPANS, "tensor"),
    ),
    Row(
        "Layout",
        lw.Layout,
        {"total": 8, "world_size": 2, "starts": LAYOUT.starts, "stops": LAYOUT.stops, "ranks": LAYOUT.ranks},
        total=(SCALARS, ""),
        world_size=(SCALARS, "int64"),
        starts=(INTS, ""),
        stops=(INTS, ""),
        ranks=(INTS, ""),
    ),
    *(
        Row(f"layout.{name}", getattr(LAYOUT, name), {"rank": 1}, rank=(SCALARS, "0"))
        for name in ("spans_of", "span_arrays", "indices", "local_spans", "rows_of")
    ),
    Row(
        "layout.positions",
        LAYOUT.positions,
        {"rank": 1, "cu_seqlens": CU},
        rank=({**SCALARS, "'0'": "0"}, "0"),
        cu_seqlens=BORDERS,
        offsets=(INTS, "None | [1, 2] | [0, -1] | [0, 2**33]"),
    ),
    Row(
        "layout.owner",
        LAYOUT.owner,
        {"token": 3},
        token=(INTS, "0 | [] | int64 | tensor(2) | [1, 2] | [0, 5, 2] | [[0, 0], [0, 0]]"),
    ),
    Row("layout.joined", LAYOUT.joined, {"size": 1}, size=(SCALARS, "int64")),
    Row(
        "make_plan",
        lw.make_plan,
        {"mask": MASK, "layout": LAYOUT},
        mask=(SCALARS, ""),
        layout=(SCALARS, ""),
        strategy=(SCALARS, ""),
        heads=(SCALARS, ""),
        kv_heads=SIZES,
        head_dim=SIZES,
        v_dim=OPTIONS,
        itemsize=SIZES,
        machine=(MACHINES, "None"),
        ulysses_size=OPTIONS,
        stages=OPTIONS,
        keep_kv=(SCALARS, "None | 0 | True"),
        heads_k_stride=OPTIONS,
        bwd_head_first_stride=OPTIONS,
        bwd_head_last_stride=OPTIONS,
        nonsense=(SCALARS, ""),
    ),
    Row(
        "plan.route",
        route,
        {"src": LAYOUT, "dst": LAYOUT, "rank": 1},
        src=(SCALARS, ""),
        dst=({**SCALARS, "of other tokens": lw.Layout.contiguous(9, 2)}, ""),
        rank=(SCALARS, "0"),
    ),
    Row("plan.head_groups", PLAN.head_groups, {"backward": True}, backward=(SCALARS, "True")),
]


@ask_all(ROWS)
def test_bad_values_are_refused(question: Question) -> None:
    question.ask()


# -- many tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [2**27 + 5, 2**31, 3_000_000_000])
def test_pairs_of_long_documents_are_counted_exactly(tokens: int) -> None:
    for mask, pairs in (
        (lw.Mask.causal([0, tokens]), tokens * (tokens + 1) // 2),
        (lw.Mask.full([0, tokens]), tokens**2),
    ):
        layout = lw.Layout.zigzag([0, tokens], 3)
        assert mask.area == pairs
        assert sum(rank.area for rank in lw.make_plan(mask, layout).report().ranks) == pairs
        assert 1 <= cost.cost(mask, layout).imbalance < 1.01


def test_the_cost_model_does_not_overflow() -> None:
    mask, layout = lw.Mask.causal([0, 2**30]), lw.Layout.zigzag([0, 2**30], 2)
    shape, machine = Shape(heads=128, kv_heads=8), Machine()
    found = cost.estimates(cost.cost(mask, layout), layout, shape, machine)
    assert all(one.compute == pytest.approx(mask.area / 2 * shape.flops_per_pair / machine.flops) for one in found)


@pytest.mark.parametrize("tokens", [2**32, 2**33, 2**40, 2**41, 2**62])
def test_documents_beyond_64_bits_of_pairs_are_refused(tokens: int) -> None:
    for make in (lw.Mask.causal, lw.Mask.full, lambda cu: lw.Mask.sliding_window(cu, 4)):
        with pytest.raises(lw.InputError, match="at most"):
            make([0, tokens])


def test_many_documents_of_ordinary_length_are_not() -> None:
    cu = np.arange(4097) * 2**21  # 2^33 tokens
    mask = lw.Mask.causal(cu)
    assert mask.area == 4096 * (2**21 * (2**21 + 1) // 2)
    assert sum(lw.Layout.contiguous(2**33, 64).counts) == 2**33


def test_a_mask_that_no_memory_holds_is_not_made_dense() -> None:
    with pytest.raises(lw.InputError, match="131072 tokens"):
        lw.Mask.causal([0, 2**17]).dense()


def test_ints_of_numpy_make_the_same_plan() -> None:
    same = lw.make_plan(MASK, LAYOUT, heads=np.int64(8), kv_heads=np.int64(2))  # type: ignore[arg-type]
    assert same.fingerprint == lw.make_plan(MASK, LAYOUT, heads=8, kv_heads=2).fingerprint
