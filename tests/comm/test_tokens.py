"""shard, unshard and reshard on real ranks, against plain indexing in one process."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import longweave as lw
from longweave.comm.exchange import resolve
from longweave.launch import Ranks

CASES = {
    "three ragged": [0, 137, 178, 267],
    "one token": [0, 1],
    "shorter than the ranks": [0, 2, 3, 3, 5],
    "one giant": [0, 1, 3, 200, 201, 203, 203, 205],
    "nothing": [0, 0],
}


def layouts(cu: list[int], world: int) -> dict[str, lw.Layout]:
    total = cu[-1]
    rng = np.random.default_rng(world)
    cuts = sorted({0, total, *rng.integers(0, total + 1, 9).tolist()})
    spans: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for i in rng.permutation(len(cuts) - 1):
        spans[int(rng.integers(world))].append((cuts[i], cuts[i + 1]))
    return {
        "contiguous": lw.Layout.contiguous(total, world),
        "zigzag": lw.Layout.zigzag(cu, world),
        "shuffled": lw.Layout.from_spans(total, spans),
        "all on the last": lw.Layout.from_spans(total, [*[[]] * (world - 1), [(0, total)]]),
    }


def full(total: int, *trailing: int) -> Tensor:
    generator = torch.Generator().manual_seed(total)
    return torch.randn(total, *trailing, generator=generator, dtype=torch.float64)


def round_trips(cu: list[int]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = full(cu[-1], 3, 2)
    weight = full(cu[-1], 2, 3).movedim(1, 2)
    table = layouts(cu, world)
    for a, src in table.items():
        local = lw.shard(x, src).requires_grad_()
        assert torch.equal(local, x[src.indices(rank)]), a
        assert torch.equal(lw.unshard(local, src), x), a
        for b, dst in table.items():
            moved = lw.reshard(local, src, dst)
            assert torch.equal(moved, x[dst.indices(rank)]), (a, b)
            (grad,) = torch.autograd.grad(moved, local, weight[dst.indices(rank)])
            assert torch.equal(grad, weight[src.indices(rank)]), (a, b)
            back = lw.reshard(moved, dst, src)
            assert torch.equal(back, local), "there and back, bit for bit"


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_any_layout_any_world(ranks: Ranks, world: int, case: str) -> None:
    ranks.run(round_trips, CASES[case], size=world)


def any_tensor() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    cu = [0, 13, 14, 31]
    src, dst = lw.Layout.zigzag(cu, world), lw.Layout.contiguous(31, world)
    dtypes = [torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.complex64, torch.uint8]
    dtypes += [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.int8]
    for dtype in dtypes:
        x = (full(31, 4) * 3).abs().to(dtype)
        moved = lw.reshard(lw.shard(x, src), src, dst)
        assert moved.dtype == dtype
        plain = x.view(torch.uint8).view(31, -1)
        assert torch.equal(moved.view(torch.uint8).view(len(moved), -1), plain[dst.indices(rank)]), dtype
        assert torch.equal(lw.unshard(lw.shard(x, src), src).view(torch.uint8).view(31, -1), plain), dtype
    conjugate = torch.complex(full(31), full(31).flip(0)).conj()
    local = lw.shard(conjugate, src)
    assert torch.equal(lw.reshard(local.resolve_conj().conj(), src, dst).conj(), conjugate[dst.indices(rank)])
    flat = full(31)
    assert torch.equal(lw.reshard(lw.shard(flat, src), src, dst), flat[dst.indices(rank)])
    x = full(31, 2, 5).movedim(0, 1)  # (2, 31, 5), not contiguous
    for dim in (1, -2):
        local = lw.shard(x, src, dim=dim)
        assert torch.equal(local, x[:, src.indices(rank)])
        view = torch.stack([local, local], dim=3)[..., 0].requires_grad_()
        moved = lw.reshard(view, src, dst, dim=dim)
        assert torch.equal(moved, x[:, dst.indices(rank)])
        assert torch.equal(lw.unshard(view, src, dim=dim), x)
        (grad,) = torch.autograd.grad(moved, view, torch.ones(1, 1, 1).double().expand_as(moved))
        assert torch.equal(grad, torch.ones_like(view))
    empty = torch.empty(src.counts[rank], 0)
    assert lw.reshard(empty, src, dst).shape == (dst.counts[rank], 0)
    assert lw.unshard(empty, src).shape == (31, 0)


def test_any_dtype_shape_dim_and_stride(ranks: Ranks) -> None:
    ranks.run(any_tensor, size=3)


def one_token_with_any_stride() -> None:
    """A column of a wide tensor: with one entry it counts as contiguous, whatever its stride."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wide = full(2 * world - 1, 4)
    for layout in (lw.Layout.contiguous(world, world), lw.Layout.contiguous(2 * world - 1, world)):
        x = wide[: layout.total]
        column = x[layout.indices(rank)][:, 2]
        assert torch.equal(lw.unshard(column, layout), x[:, 2])
        turned = lw.Layout.from_spans(layout.total, layout.spans[::-1])
        assert torch.equal(lw.reshard(column, layout, turned), x[turned.indices(rank)][:, 2])
        pack = lw.Pack([0, layout.total], layout=layout)
        assert torch.equal(lw.shift(column, pack), torch.cat([x[1:, 2], torch.zeros(1).double()])[layout.indices(rank)])


def test_one_token_with_any_stride(ranks: Ranks) -> None:
    ranks.run(one_token_with_any_stride, size=3)


def gradient_of_parts(kind: str) -> None:
    """Rank r's loss weighs the full tensor with w_r: the gradient of a token is the sum of all ranks' weights."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = layouts([0, 40, 47], world)[kind]
    x = full(47, 3)
    weights = [full(47, 3).roll(r, 0) for r in range(world)]
    local = lw.shard(x, layout).requires_grad_()
    (lw.unshard(local, layout) * weights[rank]).sum().backward()
    assert local.grad is not None
    torch.testing.assert_close(local.grad, sum(weights)[layout.indices(rank)], rtol=0, atol=1e-12)
    whole = x.clone().requires_grad_()
    (lw.shard(whole, layout) * weights[rank][layout.indices(rank)]).sum().backward()
    mine = torch.zeros(47, 1, dtype=torch.float64)
    mine[layout.indices(rank)] = 1
    assert whole.grad is not None
    assert torch.equal(whole.grad, weights[rank] * mine)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "shuffled", "all on the last"])
def test_unshard_sums_the_gradients_of_all_ranks(ranks: Ranks, kind: str) -> None:
    ranks.run(gradient_of_parts, kind, size=3)
    ranks.run(gradient_of_parts, kind, size=4)


def low_precision_sum() -> list[float]:
    """bf16 gradients 1, 2^-9, 2^-9, …: a bf16 sum loses every small one, a float32 sum does not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = lw.Layout.contiguous(world, world)
    local = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.full((world,), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    lw.unshard(local, layout).backward(upstream)
    assert local.grad is not None
    return local.grad.float().tolist()


def test_gradients_are_summed_in_float32(ranks: Ranks) -> None:
    expected = torch.tensor(1 + 7 * 2.0**-9).bfloat16().item()
    assert expected != 1.0
    assert ranks.run(low_precision_sum) == [[expected]] * 8


def on_a_subgroup(members: list[int]) -> None:
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    rank = members.index(dist.get_rank())
    assert dist.get_rank(group) == rank
    cu = [0, 17, 40]
    x = full(40, 2)
    for src in layouts(cu, len(members)).values():
        for dst in layouts(cu, len(members)).values():
            local = lw.shard(x, src, group).requires_grad_()
            moved = lw.reshard(local, src, dst, group)
            assert torch.equal(moved, x[dst.indices(rank)])
            assert torch.equal(lw.unshard(moved, dst, group), x)
            (grad,) = torch.autograd.grad(moved, local, x[dst.indices(rank)])
            assert torch.equal(grad, x[src.indices(rank)])


@pytest.mark.parametrize("members", [[1, 3], [3], [0, 2, 3]])
def test_group_rank_is_not_global_rank(ranks: Ranks, members: list[int]) -> None:
    ranks.run(on_a_subgroup, members, size=4)


def on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    layout = lw.Layout.contiguous(9, 2)
    x = full(9)
    assert torch.equal(lw.unshard(lw.shard(x, layout, mesh["cp"]), layout, mesh["cp"]), x)
    with pytest.raises(lw.InputError, match=r"dimensions \('dp', 'cp'\).*mesh\[\"cp\"\]"):
        lw.shard(x, layout, mesh)


def test_a_mesh_dimension_is_a_group(ranks: Ranks) -> None:
    ranks.run(on_a_mesh, size=4)


def calls(what: str) -> list[int]:
    """Collectives of a reshard, with and without comparing the ranks."""
    cu, world = [0, 50], dist.get_world_size()
    src = lw.Layout.zigzag(cu, world)
    dst = {"same": lw.Layout.zigzag(cu, world), "other": lw.Layout.contiguous(50, world)}[what]
    local = lw.shard(full(50), src)
    made = []
    for _ in range(2):
        before = _sequence_number()
        out = lw.reshard(local, src, dst)
        made.append(_sequence_number() - before)
    before = _sequence_number()
    with lw.unchecked():
        out = lw.reshard(local, src, dst)
    if what == "same":
        assert out is local
    return [*made, _sequence_number() - before]


def _sequence_number() -> int:
    return int(resolve(None).ledger.exchanges)


def test_nothing_is_sent_when_nothing_moves(ranks: Ranks) -> None:
    """On a bare layout the ranks are compared in every call: one message more."""
    assert ranks.run(calls, "same", size=2) == [[1, 1, 0]] * 2
    assert ranks.run(calls, "other", size=2) == [[2, 2, 1]] * 2


def collectives_of_a_pack() -> list[int]:
    """pack.unshard, twice on the first pack of a group and once on the second; then pack.shard."""
    x = full(50, 2)
    made = []
    for times in (2, 1):
        pack = lw.Pack([0, 20, 50], layout="zigzag")
        local = pack.shard(x)
        for _ in range(times):
            before = _sequence_number()
            assert torch.equal(pack.unshard(local), x)
            made.append(_sequence_number() - before)
    before = _sequence_number()
    pack.shard(x)
    return [*made, _sequence_number() - before]


def test_a_pack_was_compared_when_it_was_made(ranks: Ranks) -> None:
    assert ranks.run(collectives_of_a_pack, size=2) == [[2, 2, 1, 0]] * 2


def on_a_pack(members: list[int]) -> None:
    """pack.shard and pack.unshard, with their gradients, are lw.shard and lw.unshard on the pack's layout."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    cu = [0, 17, 17, 40]
    x = full(40, 2, 3)
    weight = full(40, 3, 2).movedim(1, 2)
    for layout in layouts(cu, len(members)).values():
        pack = lw.Pack(cu, group, layout)
        mine = layout.indices(members.index(dist.get_rank()))
        local = pack.shard(x).requires_grad_()
        assert torch.equal(local, x[mine])
        whole = pack.unshard(local)
        assert torch.equal(whole, x)
        (grad,) = torch.autograd.grad(whole, local, weight)
        torch.testing.assert_close(grad, weight[mine] * len(members))
        there = x.movedim(0, 1)
        assert torch.equal(pack.unshard(pack.shard(there, dim=1), dim=-2), there)


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [1, 3], [3]])
def test_shards_of_a_pack(ranks: Ranks, members: list[int]) -> None:
    ranks.run(on_a_pack, members, size=4)


def test_one_process_needs_no_group() -> None:
    layout = lw.Layout.from_spans(6, [[(4, 6), (0, 4)]])
    x = full(6, 2).requires_grad_()
    local = lw.shard(x, layout)
    assert torch.equal(local, x[[4, 5, 0, 1, 2, 3]])
    assert torch.equal(lw.unshard(local, layout), x)
    assert torch.equal(lw.reshard(local, layout, lw.Layout.contiguous(6, 1)), x)
    assert torch.autograd.gradcheck(lambda t: lw.reshard(t, layout, lw.Layout.contiguous(6, 1)), (x,))


def second_order() -> None:
    """Gradients of gradients cross ranks, too: the Hessian-vector product of a sum of cubes."""
    world = dist.get_world_size()
    cu = [0, 5, 9]
    src, dst = lw.Layout.zigzag(cu, world), lw.Layout.contiguous(9, world)
    x = full(9)
    for move in (lambda t: lw.reshard(t, src, dst), lambda t: lw.unshard(t, src)):
        local = lw.shard(x, src).requires_grad_()
        (grad,) = torch.autograd.grad((move(local) ** 3).sum(), local, create_graph=True)
        (hessian,) = torch.autograd.grad(grad.sum(), local)
        times = 1 if move(local).shape == (dst.counts[dist.get_rank()],) else world  # unshard: every rank has a loss
        torch.testing.assert_close(hessian, 6 * times * local)


def test_gradients_of_gradients(ranks: Ranks) -> None:
    ranks.run(second_order, size=2)


def fake_then_real() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    layout = lw.Layout.zigzag([0, 61], dist.get_world_size())
    with FakeTensorMode():
        assert lw.shard(torch.empty(61), layout).shape == (layout.counts[dist.get_rank()],)
    x = full(61)
    assert torch.equal(lw.shard(x, layout), x[layout.indices(dist.get_rank())])


def test_a_fake_run_leaves_nothing_behind(ranks: Ranks) -> None:
    ranks.run(fake_then_real, size=2)


def rank_order_sum() -> bool:
    """Float sums depend on their order: it is the order of the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = lw.Layout.contiguous(64 * world, world)
    parts = [torch.randn(64 * world, generator=torch.Generator().manual_seed(r)) * 10.0**r for r in range(world)]
    local = torch.zeros(64, requires_grad=True)
    lw.unshard(local, layout).backward(parts[rank])
    total = torch.zeros(64 * world)
    for part in parts:
        total += part
    return torch.equal(local.grad, lw.shard(total, layout))


def test_sums_are_in_rank_order(ranks: Ranks) -> None:
    assert ranks.run(rank_order_sum, size=4) == [True] * 4


def not_a_member() -> str:
    group = dist.new_group([0])
    return "member" if dist.get_rank() == 0 else catch(lambda: lw.shard(full(4), lw.Layout.contiguous(4, 1), group))


def test_a_rank_outside_the_group_is_told_so(ranks: Ranks) -> None:
    assert "not a member of the group" in ranks.run(not_a_member, size=2)[1]


# -- bad input --------------------------------------------------------------------------------------


def refused(call, kind: type[Exception], message: str) -> None:
    before = _sequence_number()
    with pytest.raises(kind, match=message):
        call()
    assert _sequence_number() == before, "raised before any communication"


def bad_inputs() -> None:
    world = dist.get_world_size()
    layout = lw.Layout.contiguous(10, world)
    x = full(10, 2)
    refused(lambda: lw.shard(x[:9], layout), lw.InputError, "has 9 tokens .* is 10")
    refused(lambda: lw.shard(x, layout, dim=2), lw.InputError, r"dim is 2 .* \(10, 2\)")
    refused(lambda: lw.shard([1], layout), lw.InputError, "a list; give a tensor")
    refused(lambda: lw.shard(x, lw.Layout.contiguous(10, 5)), lw.GroupError, "has 2 ranks but the layout is for 5")
    refused(lambda: lw.shard(x, layout, "cp"), lw.InputError, "group is a str")
    other = lw.Layout.contiguous(11, world)
    with lw.unchecked():
        refused(lambda: lw.reshard(x[:5], layout, other), lw.InputError, "hold 10 and 11 tokens")
        refused(lambda: lw.unshard(x[:4], layout), lw.InputError, "has 4 tokens .* is 5")
        refused(lambda: lw.unshard(x[:5], "zigzag"), lw.InputError, "layout is a str")
        refused(lambda: lw.unshard([1], layout), lw.InputError, "a list; give a tensor")
    # With comparison, one message, and it says the same.
    for call, message in (
        (lambda: lw.reshard(x[:5], layout, other), "hold 10 and 11 tokens"),
        (lambda: lw.unshard(x[:4], layout), "has 4 tokens .* is 5"),
    ):
        before = _sequence_number()
        with pytest.raises(lw.InputError, match=message):
            call()
        assert _sequence_number() == before + 1
    assert issubclass(lw.InputError, lw.LongweaveError)
    assert issubclass(lw.InputError, ValueError)


def test_bad_input_raises_before_communication(ranks: Ranks) -> None:
    ranks.run(bad_inputs, size=2)


def catch(call) -> str:
    try:
        call()
    except lw.LongweaveError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def other_documents(odd: list[int]) -> list[str]:
    """Twice: also after layouts that all ranks have used before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    said = []
    for _ in range(2):
        good, bad = [0, 7, 20], [0, 8, 20]
        for known in (good, bad):
            layout = lw.Layout.zigzag(known, world)
            lw.unshard(lw.shard(full(20), layout), layout)
        layout = lw.Layout.zigzag(bad if rank in odd else good, world)
        said.append(catch(lambda: lw.unshard(lw.shard(full(20), layout), layout)))  # noqa: B023
    return said


def test_a_rank_with_another_layout_is_named_on_every_rank(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks.run(other_documents, [2], size=4, timeout=30)):
        assert len(said) == 2
        start = (
            f"GroupError: rank 2 of the group holds another layout than the rest (I am rank {rank}); give every rank"
        )
        assert all(s.startswith(start) for s in said), said
    for said in ranks.run(other_documents, [1, 2], size=5, timeout=30):
        assert all("ranks 1, 2 of the group hold another layout" in s for s in said), said
    for said in ranks.run(other_documents, [1], size=2, timeout=30):
        assert all("disagree: rank 0 / rank 1 each holds another layout" in s for s in said), said


def one_bad_tensor(kind: str) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = lw.Layout.contiguous(4 * world, world)
    x = full(4, 3)
    if rank == 1:
        x = {"length": x[:3], "dtype": x.float(), "trailing": x[:, :2]}[kind]
    return catch(lambda: lw.unshard(x, layout))


def test_one_bad_tensor_raises_on_every_rank(ranks: Ranks) -> None:
    said = ranks.run(one_bad_tensor, "length", size=3, timeout=30)
    assert "has 3 tokens" in said[1]
    assert all("rank 1 of the group refused" in said[r] for r in (0, 2))
    for kind in ("dtype", "trailing"):
        said = ranks.run(one_bad_tensor, kind, size=3, timeout=30)
        assert all("rank 1 of the group makes another call" in s for s in said), said


def checks_switched_off() -> int:
    world = dist.get_world_size()
    layout = lw.Layout.zigzag([0, 50], world)
    local = lw.shard(full(50), layout)
    before = _sequence_number()
    with lw.unchecked():
        lw.unshard(local, layout)
    return _sequence_number() - before


def test_the_check_can_be_switched_off(ranks: Ranks) -> None:
    assert ranks.run(checks_switched_off, size=2) == [1, 1]


def deterministic(seed: int) -> list[bytes]:
    world = dist.get_world_size()
    layout = lw.Layout.zigzag([0, 33, 50], world)
    torch.manual_seed(seed)
    local = torch.zeros(layout.counts[dist.get_rank()], 3, requires_grad=True)
    upstream = torch.randn(50, 3) * (dist.get_rank() + 1)
    lw.unshard(local, layout).backward(upstream)
    assert local.grad is not None
    return [local.grad.numpy().tobytes()]


def test_the_same_bits_every_run(ranks: Ranks) -> None:
    first = ranks.run(partial(deterministic, 3), size=4)
    assert all(ranks.run(partial(deterministic, 3), size=4) == first for _ in range(3))
