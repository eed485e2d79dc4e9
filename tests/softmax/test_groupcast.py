"""What is special about group-cast: stages, kept K/V, exact traffic, one schedule for all layers."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from reference import Problem
from test_attention import GIANT, compare, layout_of

import longweave as lw
from longweave.comm.exchange import resolve
from longweave.launch import Ranks
from longweave.plan.cost import traffic

LENGTHS = [40, 1, 1, 3, 25, 0, 60, 7, 7, 13]
CU = [0, *np.cumsum(LENGTHS).tolist()]


def stages_and_keeping() -> None:
    world = dist.get_world_size()
    for cu in (CU, GIANT):
        mask = lw.Mask.causal(cu)
        problem = Problem.random(mask.total, heads=4, kv_heads=2, dim=16, v_dim=8, sinks=True)
        for layout in (lw.Layout.balanced(mask, world), layout_of("odd", mask, world)):
            for options in ({"stages": 1}, {"stages": 3}, {"keep_kv": True}, {"keep_kv": False, "stages": 2}):
                compare(mask, layout, "groupcast", {}, problem, 1e-10, call_options=options)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_stages_and_kept_kv(ranks: Ranks, world: int) -> None:
    ranks.run(stages_and_keeping, size=world)


def every_strategy_on_a_balanced_layout() -> None:
    world = dist.get_world_size()
    for mask in (lw.Mask.causal(CU), lw.Mask.sliding_window(CU, 11), lw.Mask.shared_prefix(40, [30, 1, 50, 26])):
        problem = Problem.random(mask.total)
        for strategy in ("groupcast", "ring", "allgather", "ulysses"):
            compare(mask, lw.Layout.balanced(mask, world, chunk_size=8), strategy, {}, problem, 1e-10)


def test_balanced_layouts(ranks: Ranks) -> None:
    ranks.run(every_strategy_on_a_balanced_layout, size=4)


def traffic_of(keep_kv: bool) -> list[int]:
    """Bytes to other ranks, forward and backward, and the tokens that the plan says."""
    from longweave.comm import exchange
    from longweave.softmax import groupcast

    rank, world = dist.get_rank(), dist.get_world_size()
    mask = lw.Mask.causal(CU)
    layout = lw.Layout.balanced(mask, world, chunk_size=8)
    pack = lw.Pack(CU, layout=layout, strategy="groupcast")
    p = Problem.random(mask.total, heads=4, kv_heads=2, dim=16, v_dim=8, dtype=torch.bfloat16)
    mine = layout.indices(rank)
    q, k, v = (getattr(p, n)[mine].requires_grad_() for n in "qkv")
    sent = []

    def counting(x, send_splits, recv_splits, comm, into=None):
        assert send_splits[rank] == recv_splits[rank] == 0, "nothing to itself"
        sent.append(x.numel() * x.element_size())
        return exchange.all_to_all_v(x, send_splits, recv_splits, comm, into)

    groupcast.all_to_all_v = counting
    try:
        out = lw.attention(q, k, v, pack, keep_kv=keep_kv)
        forward = sum(sent)
        torch.autograd.grad(out, (q, k, v), p.grad[mine])
        backward = sum(sent) - forward
    finally:
        groupcast.all_to_all_v = exchange.all_to_all_v
    tokens_sent, tokens_received = traffic(mask, layout)
    return [forward, backward, int(tokens_sent[rank]), int(tokens_received[rank])]


@pytest.mark.parametrize("keep_kv", [True, False])
def test_bytes_are_what_is_needed(ranks: Ranks, keep_kv: bool) -> None:
    per_token = 2 * (16 + 8)
    found = ranks.run(traffic_of, keep_kv, size=4)
    assert sum(tokens_sent for _, _, tokens_sent, _ in found) > 0
    for forward, backward, tokens_sent, tokens_received in found:
        assert forward == tokens_sent * per_token * 2
        again = 0 if keep_kv else tokens_sent * per_token * 2
        assert backward == again + tokens_received * per_token * 4, "gradients go home in float32"


def received_tokens() -> None:
    """Token for token: what arrives on each rank is what its queries look at and it does not hold, once."""
    from longweave.comm import exchange
    from longweave.softmax import groupcast

    rank, world = dist.get_rank(), dist.get_world_size()
    masks = [lw.Mask.causal(CU), lw.Mask.sliding_window(CU, 11), lw.Mask.shared_prefix(40, [30, 1, 50, 26])]
    for mask in masks:
        for layout in ("zigzag", "balanced"):
            pack = lw.Pack(mask.cu_seqlens, layout=layout, mask=mask, strategy="groupcast")
            own = pack.layout.indices(rank)
            arrived: list[torch.Tensor] = []

            def noting(x, send_splits, recv_splits, comm, into=None):
                pending = exchange.all_to_all_v(x, send_splits, recv_splits, comm, into)
                arrived.append(pending.wait()[:, 0, 0])  # noqa: B023
                return pending

            groupcast.all_to_all_v = noting
            try:
                number = torch.from_numpy(own).double().view(-1, 1, 1).expand(-1, 2, 4)  # a key is its own number
                lw.attention(torch.zeros_like(number), number, number, pack, stages=2)
            finally:
                groupcast.all_to_all_v = exchange.all_to_all_v
            seen = np.flatnonzero(mask.dense()[own].any(0))
            found = torch.cat(arrived).long().tolist() if arrived else []
            assert sorted(found) == sorted(set(seen.tolist()) - set(own.tolist())), (layout, rank, world)


def test_what_is_received_is_what_is_needed(ranks: Ranks) -> None:
    ranks.run(received_tokens, size=4)
    ranks.run(received_tokens, size=3)


def many_layers() -> tuple[int, int]:
    """How often a group-cast is scheduled while 96 layers run forward and backward, and collectives a layer."""
    from longweave.plan.tasks import GroupCast

    calls = [0]
    original = GroupCast.of

    def counting(self, rank):
        calls[0] += 1
        return original(self, rank)

    GroupCast.of = counting
    try:
        lw.Pack([0, 4])  # the first pack of a group asks about each kind of call; later ones do not
        pack = lw.Pack([0, 97, 111], layout="zigzag", strategy="groupcast")
        x = torch.randn(pack.tokens, 2, 8, requires_grad=True)
        y = x
        before = resolve(None).ledger.exchanges
        for _ in range(96):
            y = lw.attention(y, y, y, pack)
        collectives = resolve(None).ledger.exchanges - before
        y.sum().backward()
    finally:
        GroupCast.of = original
    (plan,) = pack.plans
    assert collectives == 96 * plan.stages, "one exchange a stage, and no question whether all ranks agree"
    return calls[0], collectives


def test_ninety_six_layers_schedule_once(ranks: Ranks) -> None:
    for scheduled, collectives in ranks.run(many_layers, size=2):
        assert scheduled == 1
        assert collectives >= 96


def no_exchange() -> int:
    lw.Pack([0, 4])
    pack = lw.Pack([0, 50, 100], layout="contiguous", strategy="groupcast")
    x = torch.randn(50, 2, 8, requires_grad=True)
    before = resolve(None).ledger.exchanges
    lw.attention(x, x, x, pack).sum().backward()
    return resolve(None).ledger.exchanges - before


def test_documents_on_one_rank_cost_no_communication(ranks: Ranks) -> None:
    assert ranks.run(no_exchange, size=2) == [0, 0]


def test_bad_options() -> None:
    pack = lw.Pack([0, 4], strategy="groupcast")
    x = torch.randn(4, 2, 8)
    with pytest.raises(lw.InputError, match="stages is 0"):
        lw.attention(x, x, x, pack, stages=0)
    with pytest.raises(lw.InputError, match="keep_kv is 2"):
        lw.attention(x, x, x, pack, keep_kv=2)
