"""What the linear layers refuse: before anything is sent, and on the first pack of a group on all ranks alike."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import longweave as lw
from longweave.comm.exchange import resolve
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


def messages_sent() -> int:
    return resolve(None).ledger.exchanges


def refusals() -> None:
    """On a later pack: each rank refuses by itself, without a message."""
    lw.Pack(CU, layout="contiguous")
    pack = lw.Pack(CU, layout="contiguous")
    q, k, v, g, beta = inputs()
    x, weight = torch.randn(8, 4), torch.randn(4, 4)
    rule, conv = lw.gated_delta_rule, lw.causal_conv1d
    rule(q, k, v, g, beta, pack)
    conv(x, weight, None, pack)
    lw.gather_recompute(torch.tanh, x, pack)
    cases = [
        (lambda: rule(q[0], k, v, g, beta, pack), "(2, 6) came in, but rank"),
        (lambda: rule(q[:, 0], k, v, g, beta, pack), "it must be (tokens, heads, dim)"),
        (lambda: rule(q, k, v[:, :3], g[:, :3], beta[:, :3], pack), "no multiple of the 2 heads"),
        (lambda: rule(q, k, v, g[:, :3], beta, pack), "g has shape (8, 3)"),
        (lambda: rule(q, k, v, g, beta[:7], pack), "(7, 4) came in, but rank"),
        (lambda: rule(*inputs(7), pack), "(7, 2, 6) came in, but rank"),
        (lambda: rule(q, k, v, g, beta, "zigzag"), "pack is a str"),
        (lambda: rule(q, k, v, g, beta, pack, method="magic"), "method is 'magic'"),
        (lambda: rule(q, k, v, g, beta, pack, backend="cuda"), 'backend is "cuda"'),
        (lambda: rule(q, k, v, g, beta, pack, backend="recurrent"), "cannot take documents that the layout cuts"),
        (lambda: rule(q, k, v, g, beta, pack, backend="fla"), "inputs are on cpu; it runs on CUDA"),
        (lambda: rule(q.double(), k, v, g, beta, pack), "cast them to one dtype"),
        (lambda: rule([1], k, v, g, beta, pack), "give a tensor"),
        (lambda: rule(q, k, v, [g], beta, pack), "give a tensor"),
        (lambda: conv(x, weight[:, :1], None, pack), "width 1;"),
        (lambda: conv(x, torch.randn(4, 9), None, pack), "width 9;"),
        (lambda: conv(x, weight[:3], None, pack), "weight (3, 4)"),
        (lambda: conv(x, weight, weight[0, :3], pack), "bias has shape (3,)"),
        (lambda: conv(x[:7], weight, None, pack), "(7, 4) came in, but rank"),
        (lambda: conv(x, weight, None, pack, activation="relu"), "'relu'"),
        (lambda: conv([x, x], [weight], None, pack), "2 tensors, 1 weights"),
        (lambda: conv([x, x], [weight, weight[:, 1:]], None, pack), "one width and one dtype"),
        (lambda: conv([x, x.double()], [weight, weight], None, pack), "one width and one dtype"),
        (lambda: conv([x, 1], [weight, weight], None, pack), "give a tensor"),
        (lambda: conv(x, weight, None, CU), "pack is a list"),
        (lambda: lw.kimi_delta_attention(q, k, v, g, beta, pack), "g has shape (8, 4)"),
        (lambda: lw.gated_linear_attention(q, k, v, g, pack), "g has shape (8, 4)"),
        (lambda: lw.lightning_attention(q, k, v, g, pack), "log_decay has shape (8, 4)"),
        (lambda: lw.ssd(v, beta, g, k, q, pack), "A has shape (8, 4)"),
        (lambda: lw.gather_recompute(torch.tanh, [], pack), "x_local is empty"),
        (lambda: lw.gather_recompute(torch.tanh, 3, pack), "give a tensor"),
        (lambda: lw.gather_recompute(torch.tanh, x[0, 0], pack), "() came in, but rank"),
    ]
    for call, message in cases:
        before = messages_sent()
        with pytest.raises(lw.LongweaveError, match=re.escape(message)):
            call()
        assert messages_sent() == before, message
    nan = g.clone()
    nan[3, 1] = torch.nan
    rule(q, k, v, nan, beta, pack)  # not looked at unless asked
    with pytest.raises(lw.InputError, match=r"g is not finite in document \d, at its token \d, on rank 0"):
        rule(q, k, v, nan, beta, pack, check_finite=True)


def test_refusals(ranks: Ranks) -> None:
    ranks.run(refusals, size=2)


# -- the first pack of a group: one rank differs, and all of them raise before anything is sent -------------


def one_odd_rank(what: str) -> tuple[str, str, int]:
    """The error of this rank, and how many messages the call took."""
    odd = dist.get_rank() == 1
    if what == "documents":
        call: Callable[[], object] = lambda: lw.Pack([0, 9, 16] if odd else CU, layout="contiguous")  # noqa: E731
    else:
        call = odd_calls(lw.Pack([0, 10, 12], layout="contiguous"), odd)[what]
    before = messages_sent()
    try:
        call()
    except lw.LongweaveError as error:
        return type(error).__name__, str(error), messages_sent() - before
    return "", "nothing raised", 0


def odd_calls(pack: lw.Pack, odd: bool) -> dict[str, Callable[[], object]]:
    q, k, v, g, beta = given = inputs(4)
    x, weight, bias = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    rule, conv = lw.gated_delta_rule, lw.causal_conv1d
    infinite = g.clone()
    infinite[0, 0] = torch.inf

    def finite() -> None:
        rule(*given, pack, check_finite=True)
        rule(q, k, v, infinite if odd else g, beta, pack, check_finite=True)

    return {
        "heads": lambda: rule(*inputs(4, Hv=6 if odd else 4), pack),
        "method": lambda: rule(*given, pack, method="reshard" if odd else "affine"),
        "scale": lambda: rule(*given, pack, scale=0.5 if odd else 0.25),
        "qk_l2norm": lambda: rule(*given, pack, qk_l2norm=odd),
        "backend": lambda: rule(*given, pack, backend="torch" if odd else "auto"),
        "decay": lambda: rule(q, k, v, None if odd else g, beta, pack),
        "dtype": lambda: rule(*(y.double() if odd else y for y in given), pack),
        "operator": lambda: conv(x, weight, None, pack) if odd else rule(*given, pack),
        "conv channels": lambda: conv(x[:, :3] if odd else x, weight[:3] if odd else weight, None, pack),
        "conv width": lambda: conv(x, weight[:, 1:] if odd else weight, None, pack),
        "conv activation": lambda: conv(x, weight, None, pack, activation="silu" if odd else None),
        "conv bias": lambda: conv(x, weight, bias if odd else None, pack),
        "conv weight dtype": lambda: conv(x, weight.bfloat16() if odd else weight, None, pack),
        "conv list": lambda: conv([x, x] if odd else [x], [weight] * (1 + odd), None, pack),
        "gather shape": lambda: lw.gather_recompute(torch.tanh, x[:, :2] if odd else x, pack),
        "param_grads": lambda: lw.gather_recompute(torch.tanh, x, pack, param_grads="full" if odd else "part"),
        "shift by": lambda: lw.shift(x, pack, by=2 if odd else 1),
        "sum shape": lambda: lw.document_sum(x[:, :2] if odd else x, pack),
        # a call that one rank refuses by itself
        "shape": lambda: rule(q, k, v, g[:, :2] if odd else g, beta, pack),
        "tokens": lambda: rule(*(inputs(3) if odd else given), pack),
        "no tensor": lambda: rule([1] if odd else q, k, v, g, beta, pack),
        "no decay tensor": lambda: rule(q, k, v, [g] if odd else g, beta, pack),
        "conv tokens": lambda: conv(x[:3] if odd else x, weight, None, pack),
        "conv no tensor": lambda: conv([1] if odd else [x], [weight], None, pack),
        "conv count": lambda: conv([x, x] if odd else [x], [weight], None, pack),
        "gather no tensor": lambda: lw.gather_recompute(torch.tanh, 3 if odd else x, pack),
        "finite": finite,
    }


BY_ITSELF = {
    "shape": r"g has shape \(4, 2\)",
    "tokens": r"\(3, 2, 6\) came in",
    "no tensor": "give a tensor",
    "no decay tensor": "give a tensor",
    "conv tokens": r"\(3, 4\) came in",
    "conv no tensor": "give a tensor",
    "conv count": "2 tensors, 1 weights",
    "gather no tensor": "give a tensor",
}


@pytest.mark.parametrize(
    "what",
    [
        *("heads", "method", "scale", "qk_l2norm", "backend", "decay", "dtype", "operator"),
        *("conv channels", "conv width", "conv activation", "conv bias", "conv weight dtype", "conv list"),
        *("gather shape", "param_grads", "shift by", "sum shape"),
    ],
)
def test_a_call_that_differs_on_one_rank_raises_on_all(ranks: Ranks, what: str) -> None:
    for kind, said, messages in ranks.run(one_odd_rank, what, size=3, timeout=30):
        assert kind == "GroupError"
        assert re.search("rank 1 .*another call", said), said
        assert messages == 1, "the comparison and nothing else"


@pytest.mark.parametrize("what", BY_ITSELF)
def test_what_one_rank_refuses_all_refuse(ranks: Ranks, what: str) -> None:
    for rank, (kind, said, _) in enumerate(ranks.run(one_odd_rank, what, size=3, timeout=30)):
        assert kind == ("InputError" if rank == 1 else "GroupError")
        assert re.search(BY_ITSELF[what] if rank == 1 else "rank 1 of the group refused", said), said


def test_other_documents_on_one_rank_raise_on_all(ranks: Ranks) -> None:
    for kind, said, _ in ranks.run(one_odd_rank, "documents", size=3, timeout=30):
        assert kind == "GroupError"
        assert re.search("rank 1 .*another pack", said), said


# -- masks ------------------------------------------------------------------------------------------------


def masks() -> None:
    rank, prefix = dist.get_rank(), lw.Mask.shared_prefix(6, [4, 6])
    x, weight = torch.randn(8, 4), torch.randn(4, 4)
    for mask, cu in ((prefix, prefix.cu_seqlens), (lw.Mask.full([0, 16]), CU)):
        for later in (False, True):
            pack = lw.Pack(cu, None if later else dist.new_group([0, 1]), "contiguous", mask=mask)
            q, k, v, _, beta = given = inputs()
            calls = {
                "gated_delta_rule": lambda: lw.gated_delta_rule(*given, pack),  # noqa: B023
                "kimi_delta_attention": lambda: lw.kimi_delta_attention(q, k, v, torch.zeros(8, 4, 6), beta, pack),  # noqa: B023
                "gated_linear_attention": lambda: lw.gated_linear_attention(q, k, v, torch.zeros(8, 4, 6), pack),  # noqa: B023
                "lightning_attention": lambda: lw.lightning_attention(q, k, v, None, pack),  # noqa: B023
                "ssd": lambda: lw.ssd(v, beta, -beta[0], k, q, pack),  # noqa: B023
                "causal_conv1d": lambda: lw.causal_conv1d(x, weight, None, pack),  # noqa: B023
            }
            for name, call in calls.items():
                message = f"lets document (1|0) see document (0|1), but {name} runs along each document"
                with pytest.raises(lw.InputError, match=message):
                    call()
    # A mask says what softmax attention sees. Linear layers run along each document, whatever it is.
    whole = [torch.randn(16, *y.shape[1:]) for y in given]
    results = []
    for mask in ("causal", "full", lw.Mask.prefix_causal(CU, [3, 2]), lw.Mask.sliding_window(CU, 2)):
        pack = lw.Pack(CU, layout="contiguous", mask=mask)
        conv = lw.causal_conv1d(pack.shard(whole[0].flatten(1)), torch.ones(12, 4), None, pack)
        results.append((lw.gated_delta_rule(*(pack.shard(y) for y in whole), pack), conv))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True)), rank


def test_masks_that_join_documents_are_refused_and_others_change_nothing(ranks: Ranks) -> None:
    ranks.run(masks, size=2)


def test_a_value_that_is_not_finite_is_named_on_all(ranks: Ranks) -> None:
    for kind, said, _ in ranks.run(one_odd_rank, "finite", size=3, timeout=30):
        assert kind == "InputError"
        assert re.match(r"g is not finite in document 0, at its token 4, on rank 1", said), said
