"""Losses, log-probabilities and gradients over ranks, without any model library."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import CU, VOCAB, data
from reference import worst
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import longweave as lw
from longweave.launch import Ranks

FEATURES = 12


class Head(nn.Module):
    """Hidden states as parameters: all tokens' gradients are seen at once."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.hidden = nn.Parameter(torch.randn(CU[-1], FEATURES, generator=g, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(VOCAB, FEATURES, generator=g, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(2))


def reference(weighted: bool, labels: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    head, full = Head(), data()
    logprobs, valid = [], 0
    for start, stop in pairwise(CU):
        logits = head.hidden[start : stop - 1] @ head.weight.T
        nll = F.cross_entropy(logits, labels[start + 1 : stop], ignore_index=-100, reduction="none")
        logprobs.append(torch.cat([nll.new_zeros(1), -nll]))
        valid += int((labels[start + 1 : stop] != -100).sum())
    each = torch.cat(logprobs)
    loss = -(each * (full.weights if weighted else 1)).sum() / max(valid, 1)
    return loss.detach(), list(torch.autograd.grad(loss, [head.hidden, head.weight])), each.detach()


def losses(layout: str, ignore_all: bool) -> None:
    full = data()
    labels = torch.full_like(full.labels, -100) if ignore_all else full.labels
    for weighted in (False, True):
        loss, grads, logprobs = reference(weighted, labels)
        batch = lw.shard_batch(
            full.ids, CU, labels=labels, layout=layout, loss_weights=full.weights if weighted else None
        )
        assert ("labels" in batch.inputs) == (not weighted)
        for kind in ("loss", "chunked"):
            head = Head()
            hidden = batch.pack.shard(head.hidden)
            if not batch.pack.tokens:
                hidden = F.pad(hidden, (0, 0, 0, 1))
            if kind == "loss":
                mine = batch.loss((hidden @ head.weight.T)[None])
            else:
                mine = batch.chunked_loss(hidden[None], head.weight, chunk=3)
            mine.backward()
            lw.reduce_gradients(head)
            assert worst(batch.reduce_loss(mine), loss) < 1e-12
            assert worst(head.hidden.grad, grads[0]) < 1e-12, (kind, weighted)
            assert worst(head.weight.grad, grads[1]) < 1e-12, (kind, weighted)
            assert head.unused.grad is None
        head = Head()
        hidden = batch.pack.shard(head.hidden)
        if not batch.pack.tokens:
            hidden = F.pad(hidden, (0, 0, 0, 1))
        each = batch.logprobs(hidden @ head.weight.T)
        assert worst(each, logprobs) < 1e-12
        # every rank computes the same loss from all log-probabilities
        (-(each * (full.weights if weighted else 1)).sum() / max(batch.num_valid, 1)).backward()
        lw.reduce_gradients([head.hidden, head.weight])
        assert worst(head.hidden.grad, grads[0]) < 1e-12
        assert worst(head.weight.grad, grads[1]) < 1e-12


@pytest.mark.parametrize("ignore_all", [False, True])
@pytest.mark.parametrize(("layout", "size"), [("auto", 2), ("zigzag", 3), ("contiguous", 4)])
def test_losses_and_gradients(ranks: Ranks, layout: str, size: int, ignore_all: bool) -> None:
    ranks.run(losses, layout, ignore_all, size=size)


def test_a_chunked_loss_keeps_no_logits() -> None:
    head, full = Head(), data()
    batch = lw.shard_batch(full.ids, CU)
    kept: list[int] = []

    def note(x: Tensor) -> Tensor:
        if x.shape[-1] == VOCAB:
            kept.append(x.shape[0])
        return x

    for chunk, largest in ((8, 8), (CU[-1], CU[-1])):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            loss = batch.chunked_loss(head.hidden, head.weight, chunk=chunk)
            assert kept == []
            loss.backward()
        assert all(rows <= largest for rows in kept)


def few_tokens() -> None:
    batch = lw.shard_batch(torch.tensor([5, 6, 7]))
    assert batch.inputs["input_ids"].shape == (1, 1)
    assert sum(batch.pack.layout.counts) == 3
    logits = torch.zeros(1, 1, VOCAB, requires_grad=True)
    loss = batch.loss(logits)
    loss.backward()
    assert worst(batch.reduce_loss(loss), torch.tensor(float(VOCAB)).log()) < 1e-6
    assert batch.unshard(batch.inputs["input_ids"]).tolist() == [[5, 6, 7]]
    assert batch.unshard(logits).shape == (1, 3, VOCAB)
    assert batch.logprobs(logits)[1:].exp().mul(VOCAB).allclose(torch.ones(2))


def test_fewer_tokens_than_ranks(ranks: Ranks) -> None:
    ranks.run(few_tokens, size=4)


def positions() -> None:
    full = data()
    expected = torch.cat([torch.arange(b - a) for a, b in pairwise(CU)])
    for layout in ("auto", "zigzag", "contiguous", "balanced"):
        batch = lw.shard_batch(full.ids[None], CU, layout=layout)
        assert batch.unshard(batch.inputs["position_ids"]).equal(expected[None])
        assert batch.pack.unshard(batch.input_ids).equal(full.ids)
        given = lw.shard_batch(full.ids, layout=layout, position_ids=expected + 3)
        assert given.pack.unshard(given.position_ids).equal(expected + 3)
        assert given.pack.cu_seqlens.tolist() == CU


def test_positions_count_from_each_document(ranks: Ranks) -> None:
    ranks.run(positions, size=3)


def differing_batches() -> None:
    full, rank = data(), dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    mine = full.ids.clone()
    if rank == 1:
        mine[7] += 1
    with pytest.raises(lw.GroupError, match="rank 1 of the group holds another batch"):
        lw.shard_batch(mine, CU, mesh["cp"])
    with pytest.raises(lw.LongweaveError, match=r"labels has the shape|rank 2 of the group refused"):
        lw.shard_batch(full.ids, CU, mesh["cp"], labels=full.ids[: CU[-1] - (rank == 2)])
    with pytest.raises(lw.GroupError, match="another"):
        lw.shard_batch(full.ids, CU, strategy="ring" if rank else "allgather")
    layout = lw.Layout.zigzag(CU, 3)
    batch = lw.shard_batch(full.ids, CU, layout=layout)
    batch.pack.unshard(batch.input_ids)  # the ranks agree on this layout, but the next batch is another one
    with pytest.raises(lw.GroupError, match="rank 1 of the group holds another batch"):
        lw.shard_batch(mine, CU, layout=layout)
    square = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    with pytest.raises(lw.InputError, match=r'mesh\["cp"\]'):
        lw.shard_batch(full.ids, CU, square)
    logits = torch.zeros(1, 9, VOCAB)
    for call in (batch.loss, batch.logprobs):
        with pytest.raises(lw.InputError, match="logits has the shape"):
            call(logits)
    right = torch.zeros(batch.pack.tokens, VOCAB)
    with pytest.raises(lw.InputError, match="num_items is 0"):
        batch.loss(right, num_items=0)
    with pytest.raises(lw.InputError, match="temperature"):
        batch.logprobs(right, temperature=0)
    with pytest.raises(lw.InputError, match="chunk is 0"):
        batch.chunked_loss(right, torch.zeros(4, VOCAB), chunk=0)
    with pytest.raises(lw.InputError, match="features"):
        batch.chunked_loss(right, torch.zeros(4, 5))
    with pytest.raises(lw.InputError, match="rows"):
        batch.to_rows(right)


def test_bad_batches_are_refused_on_every_rank(ranks: Ranks) -> None:
    ranks.run(differing_batches, size=3)


def some_gradients() -> None:
    rank = dist.get_rank()
    layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    layers.register_parameter("frozen", frozen)
    if rank == 1:
        layers[0].weight.grad = torch.ones(2, 2)
    layers[1].weight.grad = torch.full((2, 2), rank + 1.0)
    kept = layers[1].weight.grad
    lw.reduce_gradients(layers)
    assert layers[0].weight.grad.equal(torch.ones(2, 2))
    assert layers[1].weight.grad is kept
    assert kept.equal(torch.full((2, 2), 6.0))
    assert layers[2].weight.grad is None
    assert frozen.grad is None
    small = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    small.grad = torch.full((3,), [256.0, 1.0, 1.0][rank], dtype=torch.bfloat16)
    lw.reduce_gradients([small])
    assert small.grad.tolist() == [258.0] * 3  # 256 + 1 in bfloat16 is 256
    with pytest.raises(lw.GroupError, match="other parameters"):
        lw.reduce_gradients([nn.Parameter(torch.ones(2 + (rank == 1)))])
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "cp"))
    assert lw.loss_scale(mesh) == lw.loss_scale(mesh["cp"]) == lw.loss_scale() == 3
    assert lw.loss_scale(mesh["dp"]) == 1
    assert lw.reduce_sum(rank + 1, mesh["cp"]) == 6


def test_reduce_gradients(ranks: Ranks) -> None:
    ranks.run(some_gradients, size=3)
