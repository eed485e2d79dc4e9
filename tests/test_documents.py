"""`lw.shift`, `lw.document_sum` and `lw.document_mean` against one process: values, gradients, bytes, refusals."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from linear_ranks import FULL, LAYOUTS, PACKS, own_tokens, pack_of
from torch import Tensor

import longweave as lw
from longweave.comm.exchange import resolve
from longweave.launch import Ranks
from longweave.plan.routing import shift_route

SHIFTS = (1, 2, -1, -3, 0, 1000, -1000)
WORLDS = [2, 3, 4, 8]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# -- shift ------------------------------------------------------------------------------------------------


def one_process(x: Tensor, cu: list[int], by: int, fill: float) -> Tensor:
    """Document by document, in plain slices."""
    out = torch.full_like(x, fill)
    for start, stop in pairwise(cu):
        if by >= 0:
            out[start : max(start, stop - by)] = x[min(start + by, stop) : stop]
        else:
            out[min(start - by, stop) : stop] = x[start : max(start, stop + by)]
    return out


def shifted(layout: str, shifts: tuple[int, ...]) -> None:
    for name, cu in PACKS.items():
        pack = pack_of(layout, cu)
        total, mine = cu[-1], own_tokens(pack)
        ids = torch.arange(10, 10 + total)
        wide, d_wide = draw(total, 2, 3), draw(total, 2, 3, seed=1)
        for by in shifts:
            where = f"{name}, by {by}"
            assert torch.equal(lw.shift(ids[mine], pack, by, fill=-100), one_process(ids, cu, by, -100)[mine]), where
            leaf, whole = wide[mine].requires_grad_(), wide.clone().requires_grad_()
            out, expected = lw.shift(leaf, pack, by, fill=0.5), one_process(whole, cu, by, 0.5)
            assert torch.equal(out, expected[mine]), where
            (grad,) = torch.autograd.grad(out, leaf, d_wide[mine])
            (reference,) = torch.autograd.grad(expected, whole, d_wide, materialize_grads=True)
            assert torch.equal(grad, reference[mine]), where


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_shift_on_every_layout(ranks: Ranks, world: int, layout: str) -> None:
    ranks.run(shifted, layout, SHIFTS if FULL or world < 4 else (1, -3), size=world)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int32, torch.int64, torch.uint16),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.complex64),
]


def any_dtype() -> None:
    cu = PACKS["ragged"]
    pack = pack_of("zigzag", cu)
    for dtype in DTYPES:
        for fill in (0, 1):
            x = (draw(cu[-1], 3) * 10).abs().to(dtype)
            as_float = x.to(torch.complex64 if dtype.is_complex else torch.float32)
            expected = one_process(as_float, cu, 2, fill).to(dtype)
            found = lw.shift(pack.shard(x), pack, 2, fill)
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), pack.shard(expected).view(torch.uint8)), (dtype, fill)
    flat = torch.arange(cu[-1])
    assert torch.equal(lw.shift(pack.shard(flat), pack), pack.shard(one_process(flat, cu, 1, 0)))
    base = draw(4, 5, cu[-1])
    strided = base.permute(2, 0, 1)[own_tokens(pack)].transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    expected = one_process(base.permute(2, 0, 1), cu, 1, 0)[own_tokens(pack)]
    assert torch.equal(lw.shift(strided.requires_grad_(), pack), expected)
    # An upstream gradient of any strides.
    (grad,) = torch.autograd.grad(lw.shift(strided, pack).sum(), strided)
    assert torch.equal(grad, lw.shift(torch.ones_like(strided), pack, -1))


def test_shift_of_any_dtype_and_strides(ranks: Ranks) -> None:
    ranks.run(any_dtype, size=3)


def gradients_of_gradients() -> None:
    """Of the sum of cubes: against one process, and along a direction against finite differences."""
    cu = PACKS["ragged"]
    pack = pack_of("shuffled", cu)
    mine = own_tokens(pack)
    x, direction = draw(cu[-1], 2), draw(cu[-1], 2, seed=1)

    def slope(local: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad((lw.shift(local, pack, 2) ** 3).sum(), local, create_graph=True)
        return grad

    leaf = x[mine].requires_grad_()
    (second,) = torch.autograd.grad(slope(leaf), leaf, direction[mine])
    whole = x.clone().requires_grad_()
    (first,) = torch.autograd.grad((one_process(whole, cu, 2, 0) ** 3).sum(), whole, create_graph=True)
    (expected,) = torch.autograd.grad(first, whole, direction)
    torch.testing.assert_close(second, expected[mine], atol=1e-12, rtol=0)
    step = 1e-5
    ahead, behind = (slope((x + s * direction)[mine].requires_grad_()) for s in (step, -step))
    torch.testing.assert_close(second, (ahead - behind).detach() / (2 * step), atol=1e-6, rtol=1e-6)


def test_gradient_of_the_gradient_of_shift(ranks: Ranks) -> None:
    ranks.run(gradients_of_gradients, size=3)


def tokens_sent(layout: str, cu: list[int], by: int) -> tuple[int, int, int, int]:
    """Tokens handed to the network forward and backward, and what the route says for each."""
    lw.Pack([0, 8])  # on its first pack a group compares calls
    pack = pack_of(layout, cu)
    x = draw(pack.tokens, 3).requires_grad_()  # 24 bytes a token
    lw.shift(x, pack, by)  # all have agreed on this call
    ledger = resolve(None).ledger
    before, exchanges = ledger.bytes_sent, ledger.exchanges
    out = lw.shift(x, pack, by)
    forward = ledger.bytes_sent - before
    out.sum().backward()
    backward = ledger.bytes_sent - before - forward
    route = shift_route(pack.layout, cu, pack.rank, by)
    assert ledger.exchanges - exchanges == (2 if route.communicates else 0)
    return forward // 24, backward // 24, sum(route.send_splits), sum(route.recv_splits)


def test_only_what_crosses_is_sent(ranks: Ranks) -> None:
    for layout in ("contiguous", "zigzag", "shuffled"):
        for forward, backward, leaving, arriving in ranks.run(tokens_sent, layout, PACKS["ragged"], 2, size=3):
            assert (forward, backward) == (leaving, arriving)
    # One document over four ranks: the first `by` tokens of a shard go to the rank before it.
    assert ranks.run(tokens_sent, "contiguous", [0, 80], 3, size=4) == [
        (0, 3, 0, 3),
        *[(3, 3, 3, 3)] * 2,
        (3, 0, 3, 0),
    ]


@pytest.mark.parametrize(
    ("layout", "cu", "by"),
    [
        ("contiguous", [0, 20, 40, 60, 80], 1),
        ("last", [0, 13, 80], -2),
        ("contiguous", [0, 80], 0),
        ("zigzag", [0, 80], 80),
        ("zigzag", [0, 0], 1),
    ],
)
def test_where_nothing_crosses_nothing_is_sent(ranks: Ranks, layout: str, cu: list[int], by: int) -> None:
    assert ranks.run(tokens_sent, layout, cu, by, size=4) == [(0, 0, 0, 0)] * 4


def refused_shifts() -> None:
    pack = pack_of("zigzag", [0, 10, 16])
    x = torch.arange(pack.tokens)
    lw.shift(x, pack, 1)  # True and 1.0 are equal to it
    cases = [
        (lambda: lw.shift(x, pack, True), "by is True"),
        (lambda: lw.shift(x, pack, 1.0), "by is 1.0"),
        (lambda: lw.shift(x, pack, "1"), "by is '1'"),
        (lambda: lw.shift(x[1:], pack), "came in, but rank"),
        (lambda: lw.shift(x[0], pack), "came in, but rank"),
        (lambda: lw.shift([1, 2], pack), "give a tensor"),
        (lambda: lw.shift(x, pack, fill=0.5), "torch.int64 cannot hold"),
        (lambda: lw.shift(x.to(torch.uint8), pack, fill=-100), "torch.uint8 cannot hold"),
        (lambda: lw.shift(x, pack, fill=None), "fill is None"),
        (lambda: lw.shift(x, pack.layout), "pack is a Layout"),
    ]
    for call, message in cases:
        with pytest.raises(lw.InputError, match=re.escape(message)):
            call()


def test_what_shift_refuses(ranks: Ranks) -> None:
    ranks.run(refused_shifts, size=2)


def one_rank_refuses(name: str) -> str:
    """On the first pack of a group all ranks hear of it."""
    pack = pack_of("contiguous", [0, 10, 18])
    odd, x = dist.get_rank() == 1, draw(pack.tokens, 2)
    calls = {
        "shift by": lambda: lw.shift(x, pack, 1.5 if odd else 1),
        "shift tokens": lambda: lw.shift(x[1:] if odd else x, pack),
        "sum of ints": lambda: lw.document_sum(x.long() if odd else x, pack),
        "mean of ints": lambda: lw.document_mean(x.long() if odd else x, pack),
        "mean of nothing": lambda: lw.document_mean(None if odd else x, pack),
    }
    try:
        calls[name]()
    except lw.LongweaveError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


@pytest.mark.parametrize("name", ["shift by", "shift tokens", "sum of ints", "mean of ints", "mean of nothing"])
def test_what_one_rank_refuses_all_refuse(ranks: Ranks, name: str) -> None:
    for rank, said in enumerate(ranks.run(one_rank_refuses, name, size=3, timeout=30)):
        assert said.startswith("InputError" if rank == 1 else "GroupError: rank 1 of the group refused"), said


# -- sums and means ---------------------------------------------------------------------------------------


def reduced(x: Tensor, cu: list[int], mean: bool) -> Tensor:
    """One process, document by document; 0 for an empty one."""
    parts = [x[start:stop].sum(0) / (max(stop - start, 1) if mean else 1) for start, stop in pairwise(cu)]
    return torch.stack(parts)


def sums(layout: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, cu in PACKS.items():
        pack = pack_of(layout, cu)
        mine = own_tokens(pack)
        x = draw(cu[-1], 2, 3)
        for operator, mean in ((lw.document_sum, False), (lw.document_mean, True)):
            leaf, whole = x[mine].requires_grad_(), x.clone().requires_grad_()
            out, expected = operator(leaf, pack), reduced(whole, cu, mean)
            torch.testing.assert_close(out, expected, atol=1e-12, rtol=0, msg=name)
            # Every rank goes on with a part of the loss of its own: the adjoint is the sum over ranks.
            upstream = [draw(*out.shape, seed=10 + peer) for peer in range(world)]
            (grad,) = torch.autograd.grad(out, leaf, upstream[rank])
            (reference,) = torch.autograd.grad(expected, whole, sum(upstream))
            torch.testing.assert_close(grad, reference[mine], atol=1e-12, rtol=0, msg=name)
            empty = torch.tensor([start == stop for start, stop in pairwise(cu)])
            assert not out.detach()[empty].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS if FULL else [2, 3])
def test_sums_and_means_of_documents(ranks: Ranks, world: int, layout: str) -> None:
    ranks.run(sums, layout, size=world)


def same_loss_everywhere() -> None:
    """The same loss on every rank, divided by the number of ranks; gradients of parameters are then summed."""
    cu = PACKS["ragged"]
    pack = pack_of("zigzag", cu)
    x, target = draw(cu[-1], 5), draw(len(cu) - 1, 4, seed=1)
    for operator, mean in ((lw.document_sum, False), (lw.document_mean, True)):
        ours, theirs = (draw(5, 4, seed=2).requires_grad_() for _ in range(2))
        features = operator(torch.tanh(pack.shard(x) @ ours), pack)
        loss = ((features - target) ** 2).sum() / pack.world_size
        (grad,) = torch.autograd.grad(loss, ours)
        dist.all_reduce(grad)
        expected = ((reduced(torch.tanh(x @ theirs), cu, mean) - target) ** 2).sum()
        (reference,) = torch.autograd.grad(expected, theirs)
        torch.testing.assert_close(grad, reference, atol=1e-10, rtol=0)


def test_one_loss_on_all_ranks(ranks: Ranks) -> None:
    ranks.run(same_loss_everywhere, size=3)


def bfloat16_sums() -> None:
    """Added in float32, rounded once. 4096 ones would stop at 256 in bfloat16."""
    cu = [0, 4096, 4099, 4099, 5000]
    pack = pack_of("zigzag", cu)
    ones = torch.ones(cu[-1], dtype=torch.bfloat16)
    assert lw.document_sum(pack.shard(ones), pack).tolist() == [4096, 3, 0, 900]  # 901 is between two values
    assert lw.document_mean(pack.shard(ones), pack).tolist() == [1, 1, 0, 1]
    x = draw(cu[-1], 8, dtype=torch.bfloat16)
    upstream = [draw(4, 8, seed=1 + peer, dtype=torch.bfloat16) for peer in range(pack.world_size)]
    for operator, mean in ((lw.document_sum, False), (lw.document_mean, True)):
        leaf = pack.shard(x).requires_grad_()
        out = operator(leaf, pack)
        assert out.dtype == torch.bfloat16
        whole = x.double().requires_grad_()
        exact = reduced(whole, cu, mean)
        rounding = 2**-8 * 1.001
        assert bool(((out.double() - exact).abs() <= rounding * exact.abs() + 1e-4 * exact.abs().max()).all())
        (grad,) = torch.autograd.grad(out, leaf, upstream[pack.rank])
        (reference,) = torch.autograd.grad(exact, whole, sum(g.double() for g in upstream))
        reference = pack.shard(reference)
        assert bool(((grad.double() - reference).abs() <= rounding * reference.abs() + 1e-9).all())


def test_sums_of_bfloat16_are_rounded_once(ranks: Ranks) -> None:
    ranks.run(bfloat16_sums, size=3)


def second_derivatives() -> None:
    cu = PACKS["ragged"]
    pack = pack_of("zigzag", cu)
    mine, x, direction = own_tokens(pack), draw(cu[-1], 2), draw(cu[-1], 2, seed=1)
    leaf, whole = x[mine].requires_grad_(), x.clone().requires_grad_()
    (ours,) = torch.autograd.grad((lw.document_mean(leaf, pack) ** 3).sum() / pack.world_size, leaf, create_graph=True)
    (theirs,) = torch.autograd.grad((reduced(whole, cu, True) ** 3).sum(), whole, create_graph=True)
    (found,) = torch.autograd.grad(ours, leaf, direction[mine])
    (expected,) = torch.autograd.grad(theirs, whole, direction)
    torch.testing.assert_close(found, expected[mine], atol=1e-12, rtol=0)


def test_gradient_of_the_gradient_of_a_mean(ranks: Ranks) -> None:
    ranks.run(second_derivatives, size=3)


def test_one_process_without_a_group() -> None:
    cu = PACKS["ragged"]
    pack = pack_of("shuffled", cu)
    x = draw(cu[-1], 3)
    torch.testing.assert_close(lw.document_sum(pack.shard(x), pack), reduced(x, cu, False))
    assert torch.equal(lw.shift(pack.shard(x), pack, -2), pack.shard(one_process(x, cu, -2, 0)))
    with pytest.raises(lw.InputError, match=r"x_local is torch.int64"):
        lw.document_sum(torch.arange(cu[-1]), pack)
    with pytest.raises(lw.InputError, match=r"x_local is torch.int64"):
        lw.document_mean(torch.arange(cu[-1]), pack)
    with pytest.raises(lw.InputError, match="came in, but rank 0"):
        lw.document_sum(x[1:], pack)
    with pytest.raises(lw.InputError, match="pack is a list"):
        lw.document_sum(x, cu)


def repeated() -> None:
    """One pack, several calls: the same bits."""
    pack = pack_of("zigzag", PACKS["ragged"])
    x = draw(PACKS["ragged"][-1], 7, dtype=torch.float32)
    results = []
    for _ in range(3):
        leaf = pack.shard(x).requires_grad_()
        out = lw.document_sum(lw.shift(leaf, pack, 2), pack)
        results.append((out, torch.autograd.grad(out.square().sum(), leaf)[0]))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


def test_the_same_bits_every_time(ranks: Ranks) -> None:
    ranks.run(repeated, size=4)
