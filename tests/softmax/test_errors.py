"""What lw.attention and lw.make_plan refuse, before anything is sent."""

import pytest
import torch
import torch.distributed as dist

import longweave as lw
from longweave.launch import Ranks

CU = [0, 10, 16]


def refusals() -> None:
    layout = lw.Layout.contiguous(16, 2)
    plan = lw.make_plan(lw.Mask.causal(CU), layout, "ring")
    gather = lw.make_plan(lw.Mask.causal(CU), layout, "allgather")
    x = torch.randn(8, 4, 16)
    kv = torch.randn(8, 2, 16)
    cases = [
        (lambda: lw.attention(x[0], x, x, plan), "each must be"),
        (lambda: lw.attention(x[:7], x, x, plan), "rank . has 8 tokens"),
        (lambda: lw.attention(x, x[:, :3], x[:, :3], plan), "a multiple of it"),
        (lambda: lw.attention(x, kv, x, plan), "same number of heads"),
        (lambda: lw.attention(x, x[..., :8], x, plan), "same head dim"),
        (lambda: lw.attention(x.double(), x, x, plan), "one floating dtype"),
        (lambda: lw.attention(x.long(), x.long(), x.long(), plan), "one floating dtype"),
        (lambda: lw.attention(x, kv, kv, plan, sinks=torch.zeros(2)), r"\(4,\)"),
        (lambda: lw.attention(x, kv, kv, plan, softcap=-1.0), "softcap is -1.0"),
        (lambda: lw.attention(x, kv, kv, plan, dropout_p=0.1), "no dropout"),
        (lambda: lw.attention(x, kv, kv, plan, sinks=[0.0] * 4), "sinks is a list"),
        (lambda: lw.attention(x, kv, kv, plan, scale="a"), "scale is 'a'"),
        (lambda: lw.attention(x, kv, kv, plan, backend=None), "backend is None"),
        (lambda: lw.attention(*[t.to(torch.float8_e4m3fn) for t in (x, kv, kv)], plan), "one floating dtype of"),
        (lambda: lw.attention(x, kv, kv, plan, heads_k_stride=1), "ring takes .*not heads_k_stride"),
        (lambda: lw.attention(x, kv, kv, plan, ulysses_size=3), "ulysses_size is 3"),
        (lambda: lw.attention(x, kv, kv, plan, backend="magic"), "backend is 'magic'"),
        (lambda: lw.attention(x, kv, kv, plan, backend="flex"), "cannot serve.*on cpu"),
        (lambda: lw.attention(x, kv, kv, gather, heads_k_stride=3), "there are 2 K/V heads"),
        (lambda: lw.attention(x, kv, kv, gather, heads_k_stride=0), "heads_k_stride is 0"),
        (lambda: lw.attention(x, kv, kv, gather, heads_k_stride=1, bwd_head_first_stride=2), "heads_k_stride is 1"),
        (
            lambda: lw.attention(x, x, x, gather, heads_k_stride=4, bwd_head_first_stride=3, bwd_head_last_stride=2),
            "together exceed heads_k_stride 4",
        ),
        (lambda: lw.attention(x, kv, kv, "plan"), "plan is a str"),
        (lambda: lw.attention([1], kv, kv, plan), "must be tensors"),
        (lambda: lw.attention(x, kv, kv, plan, "group"), "group is a str"),
    ]
    # Both plans are known to all ranks then: from here on nothing needs to be sent.
    lw.attention(x, kv, kv, plan)
    lw.attention(x, kv, kv, gather, dropout_p=0.0)
    for call, message in cases:
        before = dist.group.WORLD._get_sequence_number_for_group()
        with pytest.raises(lw.LongweaveError, match=message):
            call()
        assert dist.group.WORLD._get_sequence_number_for_group() == before, message
    other = lw.make_plan(lw.Mask.causal(CU), lw.Layout.contiguous(16, 4), "ring")
    with pytest.raises(lw.GroupError, match="has 2 ranks but the plan is for 4"):
        lw.attention(x, kv, kv, other)


def test_refusals(ranks: Ranks) -> None:
    ranks.run(refusals, size=2)


def one_rank_differs(what: str) -> str:
    rank = dist.get_rank()
    odd = rank == 1
    cu = [0, 9, 16] if odd and what == "documents" else CU
    plan = lw.make_plan(lw.Mask.causal(cu), lw.Layout.contiguous(16, 4), "ring")
    x = torch.randn(4, 6 if odd and what == "heads" else 2, 8)
    if odd and what == "tokens":
        x = x[:3]
    options = {"options": {"ulysses_size": 2}, "softcap": {"softcap": 5.0}, "scale": {"scale": 0.5}}
    try:
        lw.attention(x, x, x, plan, **(options.get(what, {}) if odd else {}))
    except lw.LongweaveError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("documents", "rank 1 .*another plan"),
        ("heads", "rank 1 .*another call"),
        ("tokens", "rank 1 "),
        ("options", "rank 1 .*another call"),
        ("softcap", "rank 1 .*another call"),
        ("scale", "rank 1 .*another call"),
    ],
)
def test_one_odd_rank_raises_on_all(ranks: Ranks, what: str, message: str) -> None:
    import re

    for said in ranks.run(one_rank_differs, what, size=4, timeout=30):
        assert re.search(message, said), said


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, y: lw.make_plan("mask", y), "mask is a str"),
        (lambda m, y: lw.make_plan(m, "layout"), "layout is a str"),
        (lambda m, y: lw.make_plan(m, lw.Layout.contiguous(9, 2)), "16 tokens and the layout 9"),
        (lambda m, y: lw.make_plan(m, y, "teleport"), "strategy is 'teleport'"),
        (lambda m, y: lw.make_plan(m, y, "ring", ulysses_size=3), "ulysses_size is 3"),
        (lambda m, y: lw.make_plan(m, y, "allgather", ulysses_size=2), "goes with the strategies ring"),
        (lambda m, y: lw.make_plan(m, y, heads=6, kv_heads=4), "heads is 6 and kv_heads 4"),
        (lambda m, y: lw.make_plan(m, y, heads=0), "heads is 0"),
        (lambda m, y: lw.make_plan(m, y, v_dim=-5), "v_dim is -5"),
    ],
)
def test_plans_that_make_no_sense(call, message: str) -> None:
    with pytest.raises(lw.InputError, match=message):
        call(lw.Mask.causal(CU), lw.Layout.contiguous(16, 4))
