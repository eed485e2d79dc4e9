"""What the linear layers refuse, before anything is sent, and on all ranks."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import longweave as lw
from longweave.linear import mixers
from longweave.launch import Ranks

CU = [0, 10, 16]


def inputs(tokens: int = 8, Hk: int = 2, Hv: int = 4):
    return [
        torch.randn(tokens, Hk, 6),
        torch.randn(tokens, Hk, 6),
        torch.randn(tokens, Hv, 5),
        -torch.rand(tokens, Hv),
        torch.rand(tokens, Hv),
    ]


def refusals() -> None:
    layout = lw.Layout.contiguous(16, 2)
    q, k, v, g, beta = inputs()
    x, weight = torch.randn(8, 4), torch.randn(4, 4)
    lw.gated_delta_rule(q, k, v, g, beta, layout, CU)
    lw.causal_conv1d(x, weight, None, layout, CU)
    rule, conv = lw.gated_delta_rule, lw.causal_conv1d
    nan = g.clone()
    nan[3, 1] = torch.nan
    cases = [
        (lambda: rule(q[0], k, v, g, beta, layout, CU), "it must be (tokens, heads, dim)"),
        (lambda: rule(q, k, v[:, :3], g[:, :3], beta[:, :3], layout, CU), "no multiple of the 2 heads"),
        (lambda: rule(q, k, v, g[:, :3], beta, layout, CU), "g has shape (8, 3)"),
        (lambda: rule(q, k, v, g, beta[:7], layout, CU), "beta has shape (7, 4)"),
        (lambda: rule(*inputs(7), layout, CU), "(7, 2, 6) but rank"),
        (lambda: rule(q, k, v, g, beta, layout, [0, 10, 17]), "ends at 17 but the layout has 16"),
        (lambda: rule(q, k, v, g, beta, layout, [0, 12, 10, 16]), "falls from 12 to 10"),
        (lambda: rule(q, k, v, g, beta, "zigzag", CU), "layout is a str"),
        (lambda: rule(q, k, v, g, beta, layout, CU, method="magic"), "method is 'magic'"),
        (lambda: rule(q, k, v, g, beta, layout, CU, backend="cuda"), 'backend is "cuda"'),
        (lambda: rule(q, k, v, g, beta, layout, CU, backend="fla"), "cannot take documents that the layout cuts"),
        (lambda: rule(q.double(), k, v, g, beta, layout, CU), "cast them to one dtype"),
        (lambda: rule([1], k, v, g, beta, layout, CU), "must be tensors; got"),
        (lambda: rule(q, k, v, g, beta, lw.Layout.contiguous(16, 3), CU), "2 ranks but the layout is for 3"),
        (lambda: conv(x, weight[:, :1], None, layout, CU), "width 1;"),
        (lambda: conv(x, torch.randn(4, 9), None, layout, CU), "width 9;"),
        (lambda: conv(x, weight[:3], None, layout, CU), "weight (3, 4)"),
        (lambda: conv(x[:7], weight, None, layout, CU), "x has 7 tokens but rank"),
        (lambda: conv(x, weight, None, layout, CU, activation="relu"), "'relu'"),
        (lambda: conv([x, x], [weight], None, layout, CU), "2 tensors, 1 weights"),
        (lambda: conv([x, x], [weight, weight[:, 1:]], None, layout, CU), "one width and one dtype"),
        (lambda: conv([x, x.double()], [weight, weight], None, layout, CU), "one width and one dtype"),
        (lambda: conv(x, weight, None, layout, [0, 15]), "ends at 15"),
        (lambda: mixers.kimi_delta_attention(q, k, v, g, beta, layout, CU), "g has shape (8, 4)"),
        (lambda: mixers.gated_linear_attention(q, k, v, g, layout, CU), "g has shape (8, 4)"),
        (lambda: mixers.lightning_attention(q, k, v, g, layout, CU), "log_decay has shape (8, 4)"),
        (lambda: mixers.ssd(v, beta, g, k, q, layout, CU), "A has shape (8, 4)"),
    ]
    for call, message in cases:
        before = dist.group.WORLD._get_sequence_number_for_group()
        with pytest.raises(lw.LongweaveError, match=re.escape(message)):
            call()
        assert dist.group.WORLD._get_sequence_number_for_group() == before, message
    rule(q, k, v, nan, beta, layout, CU)  # not looked at unless asked
    with pytest.raises(lw.InputError, match="g has 1 values that are not finite"):
        rule(q, k, v, nan, beta, layout, CU, check_finite=True)


def test_refusals(ranks: Ranks) -> None:
    ranks.run(refusals, size=2)


def one_rank_differs(what: str) -> str:
    layout = lw.Layout.contiguous(16, 4)
    odd = dist.get_rank() == 1
    given = inputs(4, Hv=6 if odd and what == "heads" else 4)
    cu = [0, 9, 16] if odd and what == "documents" else CU
    if odd and what == "shape":
        given[3] = given[3][:, :2]
    try:
        if what == "finite":
            lw.gated_delta_rule(*given, layout, cu)  # the plan is agreed on
            if odd:
                given[3][0, 0] = torch.inf
        if what == "method":
            lw.gated_delta_rule(*given, layout, cu, method="reshard" if odd else "affine")
        elif what == "conv":
            lw.causal_conv1d(torch.randn(4, 3 if odd else 4), torch.randn(3 if odd else 4, 4), None, layout, cu)
        else:
            lw.gated_delta_rule(*given, layout, cu, check_finite=what == "finite")
    except lw.LongweaveError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("documents", "rank 1 .*another plan"),
        ("heads", "rank 1 .*another call"),
        ("method", "rank 1 .*another call"),
        ("conv", "rank 1 .*another call"),
        ("shape", r"rank 1 |g has shape"),
        ("finite", "rank 1 |not finite"),
    ],
)
def test_one_odd_rank_raises_on_all(ranks: Ranks, what: str, message: str) -> None:
    for said in ranks.run(one_rank_differs, what, size=4, timeout=30):
        assert re.search(message, said), said
