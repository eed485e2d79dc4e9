"""Every strategy, mask, layout and world size against one process: outputs and all gradients."""

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from reference import Problem, solve, worst

import longweave as lw
from longweave.launch import Ranks

CU = [0, 37, 38, 38, 41, 100, 107]
GIANT = [0, 1, 3, 150, 151, 153, 153]

MASKS = {
    "causal": lw.Mask.causal(CU),
    "full": lw.Mask.full(CU),
    "window": lw.Mask.sliding_window(CU, 9),
    "prefix": lw.Mask.prefix_causal(CU, [10, 1, 0, 0, 30, 7]),
    "shared": lw.Mask.shared_prefix(40, [20, 1, 30, 16]),
    "slices": lw.Mask.from_slices(
        107, [((0, 50), (10, 60), (-20, 7)), ((60, 107), (0, 107), "causal"), ((3, 9), (90, 107), "full")]
    ),
    "giant": lw.Mask.causal(GIANT),
    "few": lw.Mask.causal([0, 2, 3]),
    "one": lw.Mask.causal([0, 1]),
    "none": lw.Mask.causal([0, 0]),
}

FULL = bool(os.environ.get("LONGWEAVE_FULL"))

STRATEGIES = {
    "ring": ("ring", {}),
    "allgather": ("allgather", {}),
    "ulysses": ("ulysses", {}),
    "ring x ulysses": ("ring", {"ulysses_size": 2}),
    "groupcast": ("groupcast", {}),
}


def layout_of(kind: str, mask: lw.Mask, world: int) -> lw.Layout:
    if kind == "zigzag":
        return lw.Layout.zigzag(mask.cu_seqlens, world)
    if kind == "contiguous":
        return lw.Layout.contiguous(mask.total, world)
    total = mask.total  # uneven, backwards, the last rank empty
    cuts = [0, total // 3, total // 2, total]
    spans = [[] for _ in range(world)]
    for i, span in enumerate(itertools.pairwise(cuts)):
        spans[i % max(1, world - 1)].insert(0, span)
    return lw.Layout.from_spans(total, spans)


def compare(
    mask: lw.Mask,
    layout: lw.Layout,
    strategy: str,
    options: dict,
    problem: Problem,
    tolerance: float,
    group=None,
    call_options: dict | None = None,
    **extra,
) -> None:
    """Run it on this rank's part, with a pack that has this strategy, and hold everything against one process."""
    pack = lw.Pack(mask.cu_seqlens, group, layout, mask=mask, strategy=strategy, **options)
    compare_on(pack, mask, problem, tolerance, call_options, **extra)
    (plan,) = pack.plans
    assert plan.strategy == strategy
    assert plan.mask == mask


def compare_on(
    pack: lw.Pack,
    mask: lw.Mask,
    problem: Problem,
    tolerance: float,
    call_options: dict | None = None,
    expected: dict | None = None,
    **extra,
) -> None:
    rank, group = pack.rank, pack.group
    expected = expected or solve(problem, mask, **extra)
    mine = pack.layout.indices(rank)
    q, k, v = (getattr(problem, n)[mine].requires_grad_() for n in "qkv")
    sinks = None if problem.sinks is None else problem.sinks.clone().requires_grad_()
    out, lse = lw.attention(q, k, v, pack, sinks=sinks, return_lse=True, **extra, **(call_options or {}))
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    assert not lse.requires_grad
    leaves = [q, k, v, *([sinks] if sinks is not None else [])]
    grads = torch.autograd.grad(out, leaves, problem.grad[mine])
    found = {"out": out, "lse": lse, "dq": grads[0], "dk": grads[1], "dv": grads[2]}
    for name, value in found.items():
        assert value.shape == expected[name][mine].shape, name
        # relative to the largest value of the whole tensor
        whole = expected[name].clone()
        whole[mine] = value.detach().to(whole.dtype)
        assert worst(whole, expected[name]) < tolerance, (name, rank, worst(whole, expected[name]))
    if sinks is not None:
        total = grads[3].double()
        dist.all_reduce(total, group=group)
        assert worst(total, expected["dsinks"]) < tolerance


def every_mask(strategy: str, options: dict, layout: str) -> None:
    for name, mask in MASKS.items():
        problem = Problem.random(mask.total, sinks=name in ("causal", "window", "slices"))
        try:
            compare(mask, layout_of(layout, mask, dist.get_world_size()), strategy, options, problem, 1e-10)
        except Exception as error:
            raise AssertionError(f"mask {name}") from error


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "odd"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8] if FULL else [1, 2, 3, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_mask_and_layout(ranks: Ranks, strategy: str, world: int, layout: str) -> None:
    name, options = STRATEGIES[strategy]
    if world % options.get("ulysses_size", 1) == 0:
        ranks.run(every_mask, name, options, layout, size=world)


CALL_MASKS = ["causal", "full", "window", "prefix", "slices"]  # of the same 107 tokens


def masks_of_calls(layout: str) -> None:
    """One pack, many masks and strategies: each call says which."""
    problem = Problem.random(CU[-1], sinks=True)
    pack = lw.Pack(CU, layout=layout_of(layout, MASKS["causal"], dist.get_world_size()))
    for strategy, options in STRATEGIES.values():
        if dist.get_world_size() % options.get("ulysses_size", 1):
            continue
        way = {"strategy": strategy, **options}
        for name in CALL_MASKS:
            try:
                given = {"mask": name if name in ("causal", "full") else MASKS[name]}
                compare_on(pack, MASKS[name], problem, 1e-10, {**given, **way})
            except Exception as error:
                raise AssertionError(f"mask {name}, {strategy}") from error
        compare_on(pack, MASKS["window"], problem, 1e-10, {"window": 9, **way})
        compare_on(pack, MASKS["causal"], problem, 1e-10, {"window": 1000, **way})
    windowed = lw.Pack(CU, layout=pack.layout, window=9)
    compare_on(windowed, MASKS["window"], problem, 1e-10)
    compare_on(windowed, MASKS["causal"], problem, 1e-10, {"mask": "causal"})
    assert {plan.mask for plan in windowed.plans} == {MASKS["window"], MASKS["causal"]}


@pytest.mark.parametrize(("world", "layout"), [(1, "zigzag"), (3, "odd"), (4, "zigzag")])
def test_masks_windows_and_strategies_of_a_call(ranks: Ranks, world: int, layout: str) -> None:
    ranks.run(masks_of_calls, layout, size=world)


HEADS = [
    {"heads": 8, "kv_heads": 8, "dim": 16},
    {"heads": 8, "kv_heads": 2, "dim": 64},
    {"heads": 6, "kv_heads": 3, "dim": 32, "sinks": True},
    {"heads": 5, "kv_heads": 1, "dim": 24},
    {"heads": 2, "kv_heads": 2, "dim": 256},
    {"heads": 4, "kv_heads": 2, "dim": 192, "v_dim": 128, "sinks": True},
    {"heads": 4, "kv_heads": 2, "dim": 16, "v_dim": 48},
    {"heads": 1, "kv_heads": 1, "dim": 17},
]


def every_head_count(strategy: str, options: dict) -> None:
    mask = MASKS["causal"]
    layout = lw.Layout.zigzag(CU, dist.get_world_size())
    for heads in HEADS:
        try:
            compare(mask, layout, strategy, options, Problem.random(mask.total, **heads), 1e-10)
            single = Problem.random(mask.total, dtype=torch.float32, **heads)
            compare(mask, layout, strategy, options, single, 1e-5)
        except Exception as error:
            raise AssertionError(f"heads {heads}") from error


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_head_count(ranks: Ranks, strategy: str, world: int) -> None:
    name, options = STRATEGIES[strategy]
    if world % options.get("ulysses_size", 1) == 0:
        ranks.run(every_head_count, name, options, size=world)


def options_of_the_call(strategy: str, options: dict) -> None:
    mask = MASKS["causal"]
    layout = lw.Layout.zigzag(CU, dist.get_world_size())
    problem = Problem.random(mask.total, sinks=True)
    compare(mask, layout, strategy, options, problem, 1e-10, softcap=2.0)
    for scale in (0.7, -0.7, 0.0):
        compare(mask, layout, strategy, options, problem, 1e-10, scale=scale)
    compare(mask, layout, strategy, options, problem, 1e-10, call_options={"backend": "reference"})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_softcap_scale_and_backend(ranks: Ranks, strategy: str) -> None:
    ranks.run(options_of_the_call, *STRATEGIES[strategy], size=4)


def longer_documents(strategy: str, options: dict) -> None:
    """Long enough for strips, rectangles and the kernel's own causal mode."""
    cu = [0, 1500, 1501, 1990]
    for mask in (lw.Mask.causal(cu), lw.Mask.sliding_window(cu, 300)):
        problem = Problem.random(1990, heads=2, kv_heads=1, dtype=torch.float32)
        expected = solve(problem, mask)
        for layout in ("zigzag", "contiguous"):
            pack = lw.Pack(cu, layout=layout, mask=mask, strategy=strategy, **options)
            compare_on(pack, mask, problem, 1e-5, expected=expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_longer_documents(ranks: Ranks, strategy: str) -> None:
    ranks.run(longer_documents, *STRATEGIES[strategy], size=2)


def half_precision(strategy: str, options: dict, dtype: torch.dtype) -> None:
    """No worse than twice the error of one process in the same precision."""
    mask = MASKS["causal"]
    problem = Problem.random(mask.total, dtype=dtype, heads=4, kv_heads=2, dim=32)
    exact = solve(problem, mask)
    leaves = [getattr(problem, n).clone().requires_grad_() for n in "qkv"]
    dense = torch.from_numpy(mask.dense())
    one = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in leaves), attn_mask=dense, enable_gqa=True
    )[0].transpose(0, 1)
    grads = torch.autograd.grad(one, leaves, problem.grad)
    bars = {"out": one, "dq": grads[0], "dk": grads[1], "dv": grads[2]}
    layout = lw.Layout.zigzag(CU, dist.get_world_size())
    pack = lw.Pack(CU, layout=layout)
    local = [pack.shard(x.detach()).requires_grad_() for x in leaves]
    out = lw.attention(*local, pack, strategy=strategy, **options)
    mine = torch.autograd.grad(out, local, pack.shard(problem.grad))
    for name, value in {"out": out, "dq": mine[0], "dk": mine[1], "dv": mine[2]}.items():
        error = worst(pack.unshard(value.detach()), exact[name])
        assert error < 2 * worst(bars[name], exact[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_precision(ranks: Ranks, strategy: str, dtype: torch.dtype) -> None:
    ranks.run(half_precision, *STRATEGIES[strategy], dtype, size=4)


def on_a_subgroup(members: list[int], strategy: str, options: dict) -> None:
    group = dist.new_group(members)
    if dist.get_rank() in members:
        mask = MASKS["causal"]
        layout = layout_of("zigzag", mask, len(members))
        compare(mask, layout, strategy, options, Problem.random(mask.total), 1e-10, group=group)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_group_rank_is_not_global_rank(ranks: Ranks, strategy: str) -> None:
    ranks.run(on_a_subgroup, [1, 3], *STRATEGIES[strategy], size=4)


def views(strategy: str, options: dict) -> None:
    """q, k, v as strided views of one projection, and a gradient that is an expanded scalar."""
    mask = MASKS["causal"]
    rank = dist.get_rank()
    pack = lw.Pack(CU, layout="zigzag")
    fused = torch.randn(mask.total, 16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    problem = Problem(
        fused[..., :4].mT[..., :16], fused[..., 4:6].mT, fused[..., 6:].mT, torch.ones(mask.total, 4, 16), None
    )
    expected = solve(problem, mask)
    local = pack.shard(fused).requires_grad_()
    views = (local[..., :4].mT, local[..., 4:6].mT, local[..., 6:].mT)
    assert not any(view.is_contiguous() for view in views)
    out = lw.attention(*views, pack, strategy=strategy, **options)
    out.sum().backward()
    whole = torch.cat([expected["dq"].mT, expected["dk"].mT, expected["dv"].mT], -1)
    assert worst(local.grad, whole[pack.layout.indices(rank)]) < 1e-10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inputs_that_are_views(ranks: Ranks, strategy: str) -> None:
    ranks.run(views, *STRATEGIES[strategy], size=4)


STRIDES = [
    {"heads_k_stride": 8},
    {"heads_k_stride": 8, "bwd_head_first_stride": 1, "bwd_head_last_stride": 2},
    {"heads_k_stride": 3, "bwd_head_first_stride": 1},
    {"heads_k_stride": 3, "bwd_head_last_stride": 1},
    {"heads_k_stride": 3, "bwd_head_last_stride": 2, "bwd_head_first_stride": 1},
    {"heads_k_stride": 4, "bwd_head_first_stride": 4, "bwd_head_last_stride": 4},
    {"heads_k_stride": 1},
]


def every_stride() -> None:
    mask = MASKS["causal"]
    for kind in ("zigzag", "odd"):
        layout = layout_of(kind, mask, dist.get_world_size())
        problem = Problem.random(mask.total, heads=8, kv_heads=8, dim=8, v_dim=4)
        for strides in STRIDES:
            compare(mask, layout, "allgather", {}, problem, 1e-10, call_options=strides)


@pytest.mark.parametrize("world", [1, 3])
def test_allgather_strides(ranks: Ranks, world: int) -> None:
    ranks.run(every_stride, size=world)
