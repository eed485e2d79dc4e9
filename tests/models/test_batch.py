"""Losses, log-probabilities and gradients over ranks, without any model library."""

import multiprocessing
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import CU, VOCAB, data
from reference import worst
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import longweave as lw
from longweave.comm import agreement
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
    for wrong in (right, right[None, None], torch.zeros(2, len(right), VOCAB), torch.zeros(1, 90, VOCAB)):
        with pytest.raises(lw.InputError, match=r"batch\.pack\.unshard\(x, dim\)"):
            batch.unshard(wrong)


def test_bad_batches_are_refused_on_every_rank(ranks: Ranks) -> None:
    ranks.run(differing_batches, size=3)


def one_rank_is_wrong() -> None:
    """Whatever one rank raises, all raise, and the next batch works."""
    full, rank = data(), dist.get_rank()
    last = rank == dist.get_world_size() - 1
    meta = torch.empty(CU[-1], dtype=torch.long, device="meta")
    cases: list[tuple[dict, str]] = [
        ({"loss_weight": full.weights}, r"no argument 'loss_weight'; did you mean loss_weights\?"),
        ({"heads": 3}, "no argument 'heads'; options of attention are stages"),
        ({"strategy": "ring", "stages": 2}, "stages goes with groupcast"),
        ({"ignore_index": None}, "ignore_index is None"),
        ({"input_ids": meta}, "meta device"),
        ({"input_ids": None}, "neither of input_ids and inputs_embeds"),
        ({"method": "magic"}, "method is 'magic'"),
        ({"loss_weights": ExplodingTensor(full.weights)}, "boom"),
    ]
    for change, message in cases:
        arguments = {"input_ids": full.ids, "cu_seqlens": CU, **(change if last else {})}
        with pytest.raises(Exception, match=message if last else "of the group refused") as caught:
            lw.shard_batch(**arguments)
        assert isinstance(caught.value, lw.LongweaveError) or message == "boom"
    assert lw.shard_batch(full.ids, CU).pack.layout.total == CU[-1]


def one_message() -> None:
    """Pack and batch are compared together, in a single small message."""
    lw.shard_batch(data().ids, CU)
    with pytest.MonkeyPatch.context() as patch:
        sent = []
        gather = agreement.all_gather_v
        patch.setattr(agreement, "all_gather_v", lambda x, *rest: (sent.append(x.numel()), gather(x, *rest))[1])
        lw.shard_batch(data().ids, CU, labels=data().labels, mask="full")
    assert len(sent) == 1
    assert sent[0] < 10  # numbers


def test_a_batch_costs_one_message(ranks: Ranks) -> None:
    ranks.run(one_message, size=2)


class ExplodingTensor(Tensor):
    """Raises something that nobody expects."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("boom")


def test_whatever_one_rank_raises_all_raise(ranks: Ranks) -> None:
    ranks.run(one_rank_is_wrong, size=3)


def test_weights_of_any_dtype() -> None:
    full = data()
    batch = lw.shard_batch(full.ids, CU, loss_weights=full.weights.bfloat16())
    assert batch.weights is not None
    assert batch.weights.dtype == torch.bfloat16


# -- embeddings ----------------------------------------------------------------------------------------


def embeddings(form: str, frozen: bool) -> None:
    """A model whose first layer is outside: gradients reach the full table, summed over ranks."""
    full, rank = data(), dist.get_rank()
    g = torch.Generator().manual_seed(4)
    table = torch.randn(VOCAB, FEATURES, generator=g, dtype=torch.float64).requires_grad_()
    head = torch.randn(VOCAB, FEATURES, generator=g, dtype=torch.float64, requires_grad=not frozen)
    logits = table[full.ids] @ head.T
    targets = torch.full_like(full.labels, -100)
    for a, b in pairwise(CU):
        targets[a : b - 1] = full.labels[a + 1 : b]
    want_loss = F.cross_entropy(logits, targets)
    (want,) = torch.autograd.grad(want_loss, [table])
    embeds = table[full.ids]
    if form == "rows":
        longest = max(b - a for a, b in pairwise(CU))
        places = torch.cat([torch.arange(b - a) + row * longest for row, (a, b) in enumerate(pairwise(CU))])
        shape = (len(CU) - 1, longest)

        def rows(x: Tensor) -> Tensor:
            flat = x.new_zeros((shape[0] * shape[1], *x.shape[1:])).index_copy(0, places, x)
            return flat.view(*shape, *x.shape[1:])

        given = {"attention_mask": rows(torch.ones(CU[-1])), "labels": rows(full.labels)}
        batch = lw.shard_batch(inputs_embeds=rows(embeds), **given)
    else:
        batch = lw.shard_batch(
            None, CU, labels=full.labels, inputs_embeds=embeds[None] if form == "one row" else embeds
        )
    assert "input_ids" not in batch.inputs
    assert batch.input_ids is None
    shown = batch.inputs["inputs_embeds"]
    assert shown.shape == (1, max(batch.pack.tokens, 1), FEATURES)
    assert batch.unshard(shown).equal(embeds[None])
    loss = batch.loss(shown @ head.T)
    loss.backward()
    lw.reduce_gradients([table])
    assert worst(batch.reduce_loss(loss), want_loss) < 1e-12
    assert worst(table.grad, want) < 1e-12
    with pytest.raises(lw.GroupError, match="another batch"):
        lw.shard_batch(None, CU, inputs_embeds=embeds.float() if rank else embeds)
    noise = embeds.detach() * (1 + rank * 1e-12)  # sums may differ in their last bits
    lw.shard_batch(None, CU, inputs_embeds=noise)


@pytest.mark.parametrize(("form", "frozen"), [("flat", False), ("one row", True), ("rows", False)])
def test_embeddings_in_the_place_of_ids(ranks: Ranks, form: str, frozen: bool) -> None:
    ranks.run(embeddings, form, frozen, size=3)


def few_embeddings() -> None:
    """A rank without tokens takes part in backward though nothing but the embeddings needs a gradient."""
    embeds = torch.ones(2, 1, 3).view(1, 2, 3).requires_grad_()
    batch = lw.shard_batch(inputs_embeds=embeds, labels=[1, 2])
    shown = batch.inputs["inputs_embeds"]
    assert shown.shape == (1, 1, 3)
    assert shown.requires_grad
    batch.loss(shown).backward()
    assert embeds.grad is not None


def test_fewer_embeddings_than_ranks(ranks: Ranks) -> None:
    ranks.run(few_embeddings, size=3)


def test_embeddings_without_labels_have_no_loss() -> None:
    embeds = torch.ones(5, 3)
    batch = lw.shard_batch(inputs_embeds=embeds)
    assert batch.num_valid == 0
    assert "labels" not in batch.inputs
    for call in (batch.loss, batch.logprobs, batch.local_logprobs):
        with pytest.raises(lw.InputError, match="inputs_embeds without labels"):
            call(embeds)
    with pytest.raises(lw.InputError, match="inputs_embeds without labels"):
        batch.chunked_loss(embeds, torch.ones(7, 3))
    assert lw.shard_batch(inputs_embeds=embeds, labels=[-100] * 5).loss(embeds) == 0  # given, and none of them counts
    for wrong, message in (
        ({"inputs_embeds": embeds, "input_ids": torch.arange(5)}, "both of input_ids and inputs_embeds"),
        ({"inputs_embeds": embeds.long()}, "give a floating dtype"),
        ({"inputs_embeds": embeds[0]}, r"inputs_embeds has the shape \(3,\)"),
        ({"inputs_embeds": embeds, "labels": [1, 2]}, r"labels has the shape \(2,\) for inputs_embeds of \(5,\)"),
    ):
        with pytest.raises(lw.InputError, match=message):
            lw.shard_batch(**wrong)


# -- data loaders --------------------------------------------------------------------------------------


class Sharding(torch.utils.data.Dataset):
    """Shards where it must not: in a worker."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Tensor:
        return lw.shard_batch(data().ids, CU).input_ids


def load() -> None:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", False)  # else a rank may have no children
    loader = torch.utils.data.DataLoader(Sharding(), num_workers=1, multiprocessing_context="fork", timeout=30)
    with pytest.raises(lw.InputError, match=r"inside a DataLoader worker.*lw\.shard_batch .*on what the loader yields"):
        next(iter(loader))
    monkeypatch.undo()


def test_a_loader_worker_is_told_where_to_shard(ranks: Ranks) -> None:
    ranks.run(load, size=2)


# -- gradients -----------------------------------------------------------------------------------------


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
    with pytest.raises(lw.GroupError, match="rank 1 of the group holds other parameters"):
        lw.reduce_gradients([nn.Parameter(torch.ones(2 + (rank == 1)))])
    with pytest.raises(lw.GroupError, match="rank 1 of the group holds other parameters"):
        lw.reduce_gradients([nn.Parameter(torch.ones(2, dtype=torch.float64 if rank == 1 else torch.float32))])
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "cp"))
    assert lw.loss_scale(mesh) == lw.loss_scale(mesh["cp"]) == lw.loss_scale() == 3
    assert lw.loss_scale(mesh["dp"]) == 1
    assert lw.reduce_sum(rank + 1, mesh["cp"]) == 6


def test_reduce_gradients(ranks: Ranks) -> None:
    ranks.run(some_gradients, size=3)


def tensor_parallel() -> None:
    """tp × cp: the other cp ranks hold the same shards, so that shards are summed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    cp = mesh["cp"].get_local_rank()
    weight = torch.arange(12.0).view(4, 3)
    parameters = []
    for placement in (Shard(0), Replicate()):
        p = nn.Parameter(distribute_tensor(weight, mesh["tp"], [placement]))
        p.grad = distribute_tensor(weight * (1 + 10 * cp), mesh["tp"], [placement])
        parameters.append(p)
    partial = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Replicate()]))
    share = weight * (1 + 10 * cp) * (0.25, 0.75)[mesh["tp"].get_local_rank()]
    partial.grad = DTensor.from_local(share, mesh["tp"], [Partial()])
    missing = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(1)]))
    if cp:
        missing.grad = distribute_tensor(weight * 12, mesh["tp"], [Shard(1)])
    plain = nn.Parameter(weight.clone())
    plain.grad = weight * (1 + 10 * cp)
    lw.reduce_gradients([*parameters, partial, missing, plain], mesh["cp"])
    for p in (*parameters, partial, missing):
        assert p.grad.full_tensor().equal(weight * 12)
        assert p.grad.placements == p.placements
    assert plain.grad.equal(weight * 12)
    with pytest.raises(lw.InputError, match="FSDP reduces"):
        lw.reduce_gradients(parameters, mesh["tp"])
    whole = nn.Parameter(distribute_tensor(weight, mesh, [Replicate(), Replicate()]))
    with pytest.raises(lw.InputError, match="FSDP reduces"):
        lw.reduce_gradients([whole], mesh["cp"])


def test_gradients_of_tensor_parallel_models(ranks: Ranks) -> None:
    ranks.run(tensor_parallel, size=4)


def not_parallel() -> None:
    """A model that is not parallel takes the inputs, too: its tokens see only those of their own rank."""
    batch = lw.shard_batch(data().ids, CU)
    logits = torch.randn(1, max(batch.pack.tokens, 1), VOCAB)
    with pytest.warns(UserWarning, match="no operator across ranks was called"):
        batch.loss(logits)
    lw.shift(batch.input_ids, batch.pack)
    batch.loss(logits)  # a warning would be an error here


def test_a_model_that_is_not_parallel_is_noticed(ranks: Ranks) -> None:
    ranks.run(not_parallel, size=2)
