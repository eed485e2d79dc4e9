"""The causal convolution across ranks against one process: halos over several owners, and gradients back to them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from linear_cases import convolution
from linear_ranks import LAYOUTS, PACKS, own_tokens, pack_of
from torch import Tensor

import longweave as lw
from longweave.comm.exchange import resolve
from longweave.kernels.recurrence.conv import conv_backward, conv_edges
from longweave.launch import Ranks

PACKS = {**PACKS, "fragments shorter than the halo": [0, 9, 11, 30]}


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def check(pack: lw.Pack, width: int, activation: str | None, with_bias: bool) -> None:
    cu, channels = pack.cu_seqlens.tolist(), 5
    x, weight, bias, d_out = draw((cu[-1], channels), (channels, width), (channels,), (cu[-1], channels))
    leaves = [x.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if with_bias else [])]
    expected = convolution(x, weight, bias if with_bias else None, cu, activation)
    whole = torch.autograd.grad(expected, leaves, d_out, materialize_grads=True)
    mine = own_tokens(pack)
    shards = [x.detach()[mine].requires_grad_(), *(p.detach().requires_grad_() for p in leaves[1:])]
    y = lw.causal_conv1d(*shards, *([] if with_bias else [None]), pack, activation=activation)
    grads = torch.autograd.grad(y, shards, d_out[mine])
    torch.testing.assert_close(y, expected[mine], atol=1e-12, rtol=0)
    torch.testing.assert_close(grads[0], whole[0][mine], atol=1e-12, rtol=0)
    for found, reference in zip(grads[1:], whole[1:], strict=True):
        dist.all_reduce(found, group=pack.group)
        torch.testing.assert_close(found, reference, atol=1e-11, rtol=0)


def every_pack(kind: str, width: int, activation: str | None, with_bias: bool) -> None:
    for name, cu in PACKS.items():
        try:
            check(pack_of(kind, cu), width, activation, with_bias)
        except Exception as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_layout(ranks: Ranks, world: int, layout: str) -> None:
    ranks.run(every_pack, layout, 4, "silu", True, size=world)


@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize("world", [3, 8])
def test_every_width(ranks: Ranks, world: int, width: int) -> None:
    ranks.run(every_pack, "zigzag", width, None, False, size=world)
    ranks.run(every_pack, "shuffled", width, None, True, size=world)


def halo_over_three_ranks() -> None:
    """One token a rank between long fragments: the halo of the last has three owners, and each token three readers."""
    layout = lw.Layout.from_spans(24, [[(0, 10), (12, 24)], [(10, 11)], [(11, 12)]])
    check(lw.Pack([0, 24], layout=layout), 4, "silu", True)
    check(lw.Pack([0, 11, 24], layout=layout), 4, "silu", True)  # the document border cuts it


def test_a_halo_spans_several_ranks(ranks: Ranks) -> None:
    ranks.run(halo_over_three_ranks, size=3)


def on_a_subgroup(members: list[int]) -> None:
    group = dist.new_group(members)
    if dist.get_rank() in members:
        check(pack_of("zigzag", PACKS["ragged"], group), 4, "silu", True)


def test_group_rank_is_not_global_rank(ranks: Ranks) -> None:
    ranks.run(on_a_subgroup, [1, 3], size=4)


def fused(dtype: torch.dtype) -> int:
    """q, k and v in one exchange; returns how many calls to others forward and backward made."""
    cu = PACKS["ragged"]
    lw.Pack([0, 8])  # on its first pack a group compares calls
    pack = pack_of("zigzag", cu)
    mine = own_tokens(pack)
    xs = [x[mine].requires_grad_() for x in draw((cu[-1], 4), (cu[-1], 4), (cu[-1], 6), dtype=dtype)]
    weights = [w.requires_grad_() for w in draw((4, 4), (4, 4), (6, 4), dtype=dtype)]
    apart = [lw.causal_conv1d(x, w, None, pack, activation="silu") for x, w in zip(xs, weights, strict=True)]
    expected = torch.autograd.grad(sum((y * y).sum() for y in apart), [*xs, *weights])
    lw.causal_conv1d(xs, weights, None, pack, activation="silu")  # all have agreed on this call
    before = resolve(None).ledger.exchanges
    together = lw.causal_conv1d(xs, weights, None, pack, activation="silu")
    grads = torch.autograd.grad(sum((y * y).sum() for y in together), [*xs, *weights])
    calls = int(resolve(None).ledger.exchanges) - before
    for found, reference in zip([*together, *grads], [*apart, *expected], strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, reference)
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_several_tensors_share_one_exchange(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks.run(fused, dtype, size=3) == [2] * 3


def no_exchange() -> int:
    lw.Pack([0, 8])  # on its first pack a group compares calls
    pack = lw.Pack([0, 10, 20, 30, 40], layout="contiguous")
    x, weight = draw((10, 4), (4, 4))
    lw.causal_conv1d(x, weight, None, pack)
    before = resolve(None).ledger.exchanges
    lw.causal_conv1d(x.requires_grad_(), weight, None, pack).sum().backward()
    return int(resolve(None).ledger.exchanges) - before


def test_documents_on_one_rank_cost_no_communication(ranks: Ranks) -> None:
    assert ranks.run(no_exchange, size=4) == [0] * 4


def test_one_process_without_a_group() -> None:
    cu = PACKS["ragged"]
    pack = pack_of("shuffled", cu)
    x, weight = draw((cu[-1], 4), (4, 3))
    y = lw.causal_conv1d(pack.shard(x), weight, None, pack)
    torch.testing.assert_close(y, pack.shard(convolution(x, weight, None, cu)))


def test_only_the_inputs_are_kept() -> None:
    x, weight = torch.randn(500, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        lw.causal_conv1d(x, weight, None, lw.Pack([0, 100, 500]), activation="silu")
    assert sorted(kept) == [32, 4000]


def strided() -> None:
    """Inputs and upstream gradients that are views give the bits of contiguous ones; also twice on one pack.

    Only the sum over tokens in the gradient of weight is made in the order of the strides.
    """
    cu = PACKS["ragged"]
    pack = pack_of("zigzag", cu)
    x, weight, d_out = draw((cu[-1], 6), (6, 4), (cu[-1], 6))
    x, d_out = pack.shard(x), pack.shard(d_out)
    results = []
    for view in (lambda y: y, lambda y: y, lambda y: y.t().contiguous().t(), lambda y: torch.stack([y, y], -1)[..., 0]):
        leaves = [view(x).requires_grad_(), view(weight).requires_grad_()]
        y = lw.causal_conv1d(*leaves, None, pack, activation="silu")
        results.append([y, *torch.autograd.grad(y, leaves, view(d_out))])
    assert not view(x).is_contiguous()
    y, dx, d_weight = results[0]
    for again in results[1:]:
        assert torch.equal(again[0], y)
        assert torch.equal(again[1], dx)
        torch.testing.assert_close(again[2], d_weight, atol=1e-12, rtol=0)
    assert torch.equal(results[1][2], d_weight)


def test_inputs_that_are_views(ranks: Ranks) -> None:
    ranks.run(strided, size=3)


# -- 16 bits --------------------------------------------------------------------------------------------------

CUT = [0, 90, 91, 200]


def bf16_case(width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, upstream gradient, and the gradient of x by the kernel of one rank, uncut."""
    x, weight, d_out = draw((CUT[-1], 64), (64, width), (CUT[-1], 64), dtype=torch.bfloat16)
    dx, *_ = conv_backward(d_out, x, weight, None, None, conv_edges(list(pairwise(CUT)), width), True)
    return x, weight, d_out, dx.to(x.dtype)


def gradient_of_cut_documents(layout: str, width: int) -> None:
    """Each rounded once: at most half a step of bfloat16 (2⁻⁸ of the value) from the exact gradient."""
    x, weight, d_out, one_rank = bf16_case(width)
    exact_x = x.double().requires_grad_()
    y = convolution(exact_x, weight.double(), None, CUT, "silu")
    (exact,) = torch.autograd.grad(y, exact_x, d_out.double())
    pack = pack_of(layout, CUT)
    leaf = pack.shard(x).requires_grad_()
    y = lw.causal_conv1d(leaf, weight, None, pack, activation="silu")
    (dx,) = torch.autograd.grad(y, leaf, pack.shard(d_out))
    error = (dx.double() - pack.shard(exact)).abs()
    float32 = 2**-20 * float(exact.abs().max())  # the sum before the cast
    assert bool((error <= 2**-8 * 1.001 * pack.shard(exact).abs() + float32).all())
    # Two float32 sums of other order lie on two sides of a border between bfloat16 values now and then.
    assert float((dx != pack.shard(one_rank)).double().mean() if len(dx) else 0) < 1e-3


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "shuffled"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_of_cut_documents_are_rounded_once(ranks: Ranks, world: int, layout: str) -> None:
    for width in (2, 4):
        ranks.run(gradient_of_cut_documents, layout, width, size=world)
