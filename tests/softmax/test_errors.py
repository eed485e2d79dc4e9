"""What lw.attention and lw.make_plan refuse, before anything is sent. Ranks that differ: tests/test_agreement.py."""

import pytest
import torch

import longweave as lw
from longweave.comm.exchange import resolve
from longweave.launch import Ranks

CU = [0, 10, 16]


def refusals() -> None:
    pack = lw.Pack(CU, layout="contiguous", strategy="ring")
    gather = lw.Pack(CU, layout="contiguous", strategy="allgather")
    x = torch.randn(8, 4, 16)
    kv = torch.randn(8, 2, 16)
    other = lw.Mask.causal([0, 17])
    cases = [
        (lambda p: lw.attention(x[0], x, x, p), "each must be"),
        (lambda p: lw.attention(x[:7], x, x, p), "rank . has 8 tokens"),
        (lambda p: lw.attention(x, x[:, :3], x[:, :3], p), "a multiple of it"),
        (lambda p: lw.attention(x, kv, x, p), "same number of heads"),
        (lambda p: lw.attention(x, x[..., :8], x, p), "same head dim"),
        (lambda p: lw.attention(x.double(), x, x, p), "one floating dtype"),
        (lambda p: lw.attention(x.long(), x.long(), x.long(), p), "one floating dtype"),
        (lambda p: lw.attention(x, kv, kv, p, sinks=torch.zeros(2)), r"\(4,\)"),
        (lambda p: lw.attention(x, kv, kv, p, softcap=-1.0), "softcap is -1.0"),
        (lambda p: lw.attention(x, kv, kv, p, softcap=float("inf")), "softcap is inf"),
        (lambda p: lw.attention(x, kv, kv, p, scale=float("nan")), "scale is nan"),
        (lambda p: lw.attention(x, kv, kv, p, scale=-1.0, backend="cpu_flash"), "cannot serve.*scale is -1.0"),
        (lambda p: lw.attention(x, kv, kv, p, dropout_p=0.1), "no dropout"),
        (lambda p: lw.attention(x, kv, kv, p, sinks=[0.0] * 4), "sinks is a list"),
        (lambda p: lw.attention(x, kv, kv, p, scale="a"), "scale is 'a'"),
        (lambda p: lw.attention(x, kv, kv, p, backend=None), "backend is None"),
        (lambda p: lw.attention(*[t.to(torch.float8_e4m3fn) for t in (x, kv, kv)], p), "one floating dtype of"),
        (lambda p: lw.attention(x, kv, kv, p, heads_k_stride=1), "heads_k_stride goes with allgather; strategy ring"),
        (lambda p: lw.attention(x, kv, kv, p, ulysses_size=3), "ulysses_size is 3"),
        (lambda p: lw.attention(x, kv, kv, p, flavour=3), "there is no option 'flavour'"),
        (lambda p: lw.attention(x, kv, kv, p, ulysses_size="two"), "ulysses_size is 'two'; options are ints"),
        (lambda p: lw.attention(x, kv, kv, p, backend="magic"), "backend is 'magic'"),
        (lambda p: lw.attention(x, kv, kv, p, backend="flex"), "cannot serve.*on cpu"),
        (lambda p: lw.attention(x, kv, kv, p, strategy="teleport"), "strategy is 'teleport'"),
        (lambda p: lw.attention(x, kv, kv, p, strategy=None), "strategy is None"),
        (lambda p: lw.attention(x, kv, kv, p, mask="windows"), "mask is 'windows'"),
        (lambda p: lw.attention(x, kv, kv, p, mask=other), "the mask has 17 tokens but the documents have 16"),
        (lambda p: lw.attention(x, kv, kv, p, window=0), "window is 0"),
        (lambda p: lw.attention(x, kv, kv, p, window=2.5), "window is 2.5"),
        (lambda p: lw.attention(x, kv, kv, p, mask="full", window=3), "a window of 3 .*see ahead"),
        (lambda p: lw.attention([1], kv, kv, p), "must be tensors"),
    ]
    strides = [
        (lambda p: lw.attention(x, kv, kv, p, heads_k_stride=3), "there are 2 K/V heads"),
        (lambda p: lw.attention(x, kv, kv, p, heads_k_stride=0), "heads_k_stride is 0"),
        (lambda p: lw.attention(x, kv, kv, p, heads_k_stride=1, bwd_head_first_stride=2), "heads_k_stride is 1"),
        (
            lambda p: lw.attention(x, x, x, p, heads_k_stride=4, bwd_head_first_stride=3, bwd_head_last_stride=2),
            "together exceed heads_k_stride 4",
        ),
    ]
    no_pack = [
        (lambda p: lw.attention(x, kv, kv, "pack"), "pack is a str"),
        (lambda p: lw.attention(x, kv, kv, lw.make_plan(lw.Mask.causal(CU), p.layout)), "pack is a Plan"),
    ]
    # Nothing is sent: neither by the call nor to ask the others, for these are not the first packs of the group.
    lw.attention(x, kv, kv, gather, dropout_p=0.0)
    for on, table in ((gather, strides), (lw.Pack(CU, layout="contiguous", strategy="ring"), [*cases, *no_pack])):
        for call, message in table:
            before = resolve(None).ledger.exchanges
            with pytest.raises(lw.LongweaveError, match=message):
                call(on)
            assert resolve(None).ledger.exchanges == before, message
    # On the first pack of a group a refusal is shared: one question, and that is all.
    for call, message in cases:
        before = resolve(None).ledger.exchanges
        with pytest.raises(lw.LongweaveError, match=message):
            call(pack)
        assert resolve(None).ledger.exchanges <= before + 1, message


def test_refusals(ranks: Ranks) -> None:
    ranks.run(refusals, size=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, y: lw.make_plan("mask", y), "mask is a str"),
        (lambda m, y: lw.make_plan(m, "layout"), "layout is a str"),
        (lambda m, y: lw.make_plan(m, lw.Layout.contiguous(9, 2)), "16 tokens and the layout 9"),
        (lambda m, y: lw.make_plan(m, y, "teleport"), "strategy is 'teleport'"),
        (lambda m, y: lw.make_plan(m, y, "ring", ulysses_size=3), "ulysses_size is 3"),
        (lambda m, y: lw.make_plan(m, y, "allgather", ulysses_size=2), "ulysses_size goes with ring and ulysses"),
        (lambda m, y: lw.make_plan(m, y, heads=6, kv_heads=4), "heads is 6 and kv_heads 4"),
        (lambda m, y: lw.make_plan(m, y, heads=0), "heads is 0"),
        (lambda m, y: lw.make_plan(m, y, v_dim=-5), "v_dim is -5"),
    ],
)
def test_plans_that_make_no_sense(call, message: str) -> None:
    with pytest.raises(lw.InputError, match=message):
        call(lw.Mask.causal(CU), lw.Layout.contiguous(16, 4))
