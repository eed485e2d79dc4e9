"""Losses of one rank's tokens, normalised by the whole batch, and log-probabilities of all tokens.

    loss of a rank = Σ over its valid tokens of weight · −log p(label)  /  number of valid tokens on all ranks

The SUM over ranks is the mean over the batch, and the SUM of the gradients is its gradient. A rank without valid tokens
has the loss 0, which still takes part in backward: the other ranks wait for its share of every exchange.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longweave.comm.groups import Group
from longweave.errors import InputError
from longweave.plan.layout import Layout
from longweave.tokens import shard, unshard


def nll(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """−log p of each target in at least float32, 0 for ignored ones. logits (n, V), targets (n,)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")


def weighted_sum(logits: Tensor, targets: Tensor, weights: Tensor | None, ignore_index: int) -> Tensor:
    losses = nll(logits, targets, ignore_index)
    return losses.sum() if weights is None else (losses * weights.to(losses.dtype)).sum()


def chunked_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor | None,
    ignore_index: int,
    chunk: int,
) -> Tensor:
    """As `weighted_sum` of the logits `hidden @ weight.T + bias`, of which only `chunk` tokens exist at a time.

    Backward computes the logits of each chunk again.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise InputError(f"chunk is {chunk!r}; give the number of tokens whose logits may exist at once, at least 1")
    if hasattr(weight, "placements"):
        raise InputError(
            "the weight of the output layer is sharded (a DTensor); give fully_shard a model without its output layer, "
            "or call batch.loss(model(**batch.inputs).logits)"
        )
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise InputError(
            f"hidden has {hidden.shape[-1]} features and the weight the shape {tuple(weight.shape)}; "
            "give hidden states and the (vocabulary, features) weight of the output layer"
        )

    def part(h: Tensor, w: Tensor, b: Tensor | None, t: Tensor, by: Tensor | None) -> Tensor:
        return weighted_sum(F.linear(h, w, b), t, by, ignore_index)

    total: Tensor | None = None
    for start in range(0, len(hidden), chunk):
        at = slice(start, start + chunk)
        by = None if weights is None else weights[at]
        one: Tensor = checkpoint(part, hidden[at], weight, bias, targets[at], by, use_reentrant=False)
        total = one if total is None else total + one
    assert total is not None
    return total


class GatherSame(torch.autograd.Function):
    """The full tensor on every rank, for a loss that every rank computes alike from it.

    Each rank's own gradient then already is that of the whole loss with respect to its tokens, so backward keeps its
    part and sends nothing. (`lw.unshard` is for ranks that go on with different parts of the loss: it adds them up.)
    """

    @staticmethod
    def forward(ctx: Any, x_local: Tensor, layout: Layout, group: Group) -> Tensor:
        ctx.layout, ctx.group = layout, group
        return unshard(x_local, layout, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return shard(grads[0], ctx.layout, ctx.group), None, None
