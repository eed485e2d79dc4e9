"""Every family, on 2 and 4 ranks, against the unmodified model in one process: logits and all gradients."""

from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from families import CU, FAMILIES, Expected, build, data, exact, one_process
from reference import worst
from torch import nn

import longweave as lw
from longweave.launch import Ranks

# One process in float32 is itself up to 1.1e-5 away from one in float64 (Qwen3.5), so float64 is the reference of both.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@lru_cache(maxsize=4)
def expected(family: str) -> Expected:
    return one_process(build(family), family, data())


def check(model: nn.Module, batch: lw.Batch, logits: torch.Tensor, loss: torch.Tensor, want: Expected) -> None:
    tolerance = TOLERANCE[logits.dtype]
    assert worst(batch.unshard(logits)[0], want.logits) < tolerance
    assert worst(batch.reduce_loss(loss), want.loss) < tolerance
    lw.reduce_gradients(model)
    for name, p in model.named_parameters():
        assert worst(p.grad, want.grads[name]) < tolerance, name


def train_step(family: str, want: Expected, dtype: torch.dtype, layout: str, checkpointing: str | None) -> None:
    model = build(family, dtype)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    lw.parallelize(model, None)
    full = data()
    batch = lw.shard_batch(full.ids, CU, None, labels=full.labels, layout=layout)
    with exact(dtype, family):
        out = model(**batch.inputs)
        loss = batch.loss(out.logits)
        loss.backward()
    assert worst(out.loss, loss) < 1e-5
    check(model, batch, out.logits, loss, want)


def variants(family: str, want: Expected, cases: list[tuple[torch.dtype, str, str | None]]) -> None:
    for case in cases:
        train_step(family, want, *case)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_one_process(ranks: Ranks, family: str, size: int) -> None:
    cases = [
        (torch.float64, "auto" if size == 2 else "zigzag", None),
        (torch.float64, "zigzag" if size == 2 else "contiguous", "plain"),
        (torch.float32, "auto", "reentrant" if size == 2 else None),
    ]
    ranks.run(variants, family, expected(family), cases, size=size)


def empty_rank(want: Expected) -> None:
    family, dtype = "qwen3_next", torch.float64
    model = lw.parallelize(build(family, dtype))
    full = data()
    spans = [[(0, 40)], [], [(40, 85)], []][: dist.get_world_size()]
    batch = lw.shard_batch(full.ids, CU, labels=full.labels, layout=lw.Layout.from_spans(CU[-1], spans))
    with exact(dtype, family):
        out = model(**batch.inputs)
        loss = batch.loss(out.logits)
        loss.backward()
    check(model, batch, out.logits, loss, want)


def test_ranks_without_tokens_take_part(ranks: Ranks) -> None:
    ranks.run(empty_rank, expected("qwen3_next"), size=4)


def from_embeddings(family: str, want: Expected) -> None:
    """The embedding layer is called outside, on the full batch: its gradient is each rank's part all the same."""
    model = lw.parallelize(build(family))
    full = data()
    embeds = model.model.embed_tokens(full.ids)
    batch = lw.shard_batch(None, CU, labels=full.labels, inputs_embeds=embeds)
    with exact(torch.float64, family):
        out = model(**batch.inputs)
        loss = batch.loss(out.logits)
        loss.backward()
    check(model, batch, out.logits, loss, want)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_embeddings_in_the_place_of_ids(ranks: Ranks, family: str, size: int) -> None:
    ranks.run(from_embeddings, family, expected(family), size=size)
