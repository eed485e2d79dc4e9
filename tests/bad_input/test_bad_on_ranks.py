"""Bad input on one rank only: on the first pack of a group all ranks refuse, and nobody waits.

Nothing here makes a pack while it is imported: on the ranks that would be the first one.
"""

import re
from typing import Any

import pytest
import torch

import longweave as lw
from longweave.launch import Ranks


def one_odd_rank(what: str) -> tuple[str, str]:
    pack = lw.Pack([0, 5, 12])
    n = pack.tokens
    q, x = torch.randn(n, 2, 4), torch.randn(n, 4)
    g = -torch.randn(n, 2).abs()
    if pack.rank == 1:
        if what.startswith("meta"):
            q, x = q.to("meta"), x.to("meta")
        if what == "ints in conv":
            x = x.long()
        if what == "sparse gate":
            g = g.to_sparse()
    params: Any = ["a"] if pack.rank == 1 and what == "params" else []
    calls = {
        "meta in attention": lambda: lw.attention(q, q, q, pack),
        "meta in document_sum": lambda: lw.document_sum(x, pack),
        "ints in conv": lambda: lw.causal_conv1d(x, torch.randn(4, 3), None, pack),
        "sparse gate": lambda: lw.gated_delta_rule(q, q, q, g, g.to_dense().sigmoid(), pack),
        "params": lambda: lw.gather_recompute(torch.tanh, x, pack, params),
        "meta in unshard": lambda: pack.unshard(x),
    }
    try:
        calls[what]()
    except lw.LongweaveError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("meta in attention", "q is a tensor on the meta device"),
        ("meta in document_sum", "meta device, without values"),
        ("meta in unshard", "meta device, without values"),
        ("ints in conv", "x is torch.int64; give float16"),
        ("sparse gate", "g is a sparse_coo tensor"),
        ("params", "params is \\['a'\\]"),
    ],
)
def test_what_one_rank_is_given_all_refuse(ranks: Ranks, what: str, said: str) -> None:
    for rank, (kind, text) in enumerate(ranks.run(one_odd_rank, what, size=2, timeout=30)):
        assert kind == ("InputError" if rank == 1 else "GroupError"), text
        assert re.search(said if rank == 1 else "rank 1 of the group refused", text), text
