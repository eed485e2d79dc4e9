"""Values that are not finite: they stay in their document, and `pack.check_finite` names where they came in."""

import re

import numpy as np
import pytest
import torch

import longweave as lw
from longweave.launch import Ranks


def not_finite(value: float) -> tuple[list[int], str]:
    """Token 9 of the pack, in its second document, is not finite: which outputs are not? And who says so?"""
    cu = [0, 5, 5, 17, 30]
    bad = torch.zeros(30, 2, 4)
    bad[9] = value
    pack = lw.Pack(cu, layout="zigzag")
    x = torch.randn(30, 2, 4, generator=torch.Generator().manual_seed(3)) + bad
    local = pack.shard(x).requires_grad_()
    g = torch.zeros(pack.tokens, 2)
    outs = [lw.attention(local, local, local, pack, strategy=s) for s in ("ring", "groupcast", "allgather", "ulysses")]
    outs += [lw.gated_delta_rule(local, local, local, g, g, pack, method=m) for m in ("affine", "reshard", "gather")]
    outs += [lw.causal_conv1d(local.flatten(1), torch.ones(8, 3), None, pack).view_as(local)]
    documents = set()
    for y in (*outs, *(torch.autograd.grad(out.sum(), local, retain_graph=True)[0] for out in outs)):
        tokens = (~torch.isfinite(pack.unshard(y))).flatten(1).any(1).nonzero()[:, 0]
        documents |= {int(np.searchsorted(cu, token, side="right")) - 1 for token in tokens}
    with pytest.raises(lw.InputError) as caught:
        pack.check_finite(fine=torch.ones(pack.tokens), q=local)
    pack.check_finite(fine=torch.ones(pack.tokens))
    return sorted(documents), str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_document_and_is_named(ranks: Ranks, value: float) -> None:
    for documents, said in ranks.run(not_finite, value, size=4, timeout=60):
        assert documents == [2]
        assert re.match(r"q is not finite in document 2, at its token 4, on rank \d", said)
