"""Masks of `lw.shard_batch` in Hugging Face models, against one process that is given the dense mask."""

from functools import lru_cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from families import CU, Expected, build, data, exact
from reference import worst
from torch import Tensor

import longweave as lw
from longweave.launch import Ranks

TOTAL = CU[-1]
PREFIXES = [10, 1, 0, 3, 20, 1, 4]
SLICES = [
    ((0, 30), (0, 30), "causal"),
    ((30, 60), (0, 10), "full"),
    ((30, 60), (30, 60), "causal"),
    ((60, 85), (20, 50), "full"),
    ((60, 85), (60, 85), (-12, 4)),
]

# mask as given, cu_seqlens as given, documents as they should be
CASES: dict[str, tuple[str | lw.Mask, list[int] | None, list[int]]] = {
    "full": ("full", CU, CU),
    "prefix": (lw.Mask.prefix_causal(CU, PREFIXES), None, CU),
    "shared_prefix": (lw.Mask.shared_prefix(31, [17, 1, 0, 36]), None, [0, 31, 48, 49, 49, 85]),
    "slices": (lw.Mask.from_slices(TOTAL, SLICES), [0, 30, 60, 85], [0, 30, 60, 85]),
    "window": (lw.Mask.sliding_window(CU, 4), None, CU),
}


def positions(name: str) -> Tensor:
    """In a shared prefix, every answer goes on where the prompt ends."""
    *_, cu = CASES[name]
    starts = [31 if name == "shared_prefix" and a > 0 else 0 for a, _ in pairwise(cu)]
    return torch.cat([torch.arange(b - a) + start for (a, b), start in zip(pairwise(cu), starts, strict=True)])


def dense(name: str, window: int | None = None) -> Tensor:
    """(total, total) bools; a window is counted in positions."""
    mask = CASES[name][0]
    if isinstance(mask, str):
        allowed = torch.zeros(TOTAL, TOTAL, dtype=torch.bool)
        for a, b in pairwise(CU):
            allowed[a:b, a:b] = True
    else:
        allowed = torch.from_numpy(mask.dense())
    at = positions(name)
    return allowed if window is None else allowed & (at[:, None] - at < window)


def as_floats(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -1e300)[None, None]


@lru_cache(maxsize=2)
def expected(family: str, name: str) -> Expected:
    """Attention-only models see everything in one call, hybrids one document at a time."""
    model, full = build(family), data()
    *_, cu = CASES[name]
    window = getattr(model.config, "sliding_window", None)
    at = positions(name)
    pieces = []
    with exact(torch.float64, family):
        for a, b in pairwise(cu if family == "qwen3_5" else [0, TOTAL]):
            masks = {"full_attention": dense(name), "sliding_attention": dense(name, window)}
            given = {kind: as_floats(mask[a:b, a:b]) for kind, mask in masks.items()}
            mask = given if family in ("gemma2", "gpt_oss") else given["sliding_attention"]
            call = {"input_ids": full.ids[None, a:b], "position_ids": at[None, a:b], "attention_mask": mask}
            pieces.append(model(**call, use_cache=False).logits[0])
        logits = torch.cat(pieces)
        targets = torch.full_like(full.labels, -100)
        for a, b in pairwise(cu):
            if b > a:
                targets[a : b - 1] = full.labels[a + 1 : b]
        loss = F.cross_entropy(logits, targets, ignore_index=-100)
        loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return Expected(logits.detach(), loss.detach(), grads, logits.new_zeros(0))


def train_step(family: str, name: str, want: Expected, layout: str, strategy: str) -> None:
    mask, cu, documents = CASES[name]
    full, model = data(), lw.parallelize(build(family))
    batch = lw.shard_batch(full.ids, cu, labels=full.labels, mask=mask, layout=layout, strategy=strategy)
    assert batch.pack.cu_seqlens.tolist() == documents
    assert batch.pack.unshard(batch.position_ids).equal(positions(name))
    with exact(torch.float64, family):
        logits = model(**batch.inputs).logits
        loss = batch.loss(logits)
        loss.backward()
    lw.reduce_gradients(model)
    assert worst(batch.unshard(logits)[0], want.logits) < 1e-9
    assert worst(batch.reduce_loss(loss), want.loss) < 1e-9
    for key, p in model.named_parameters():
        assert worst(p.grad, want.grads[key]) < 1e-9, key


WAYS = {2: ("auto", "auto"), 3: ("contiguous", "groupcast"), 4: ("balanced", "allgather")}


@pytest.mark.parametrize("size", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_llama(ranks: Ranks, name: str, size: int) -> None:
    ranks.run(train_step, "llama", name, expected("llama", name), *WAYS[size], size=size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["full", "prefix", "window"])
def test_a_hybrid(ranks: Ranks, name: str, size: int) -> None:
    ranks.run(train_step, "qwen3_5", name, expected("qwen3_5", name), *WAYS[size], size=size)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_windows_of_a_shared_prefix_are_counted_in_positions(ranks: Ranks, family: str) -> None:
    want = expected(family, "shared_prefix")
    for size in (2, 3):
        ranks.run(train_step, family, "shared_prefix", want, *WAYS[size], size=size)


def crossing() -> None:
    model, full = lw.parallelize(build("qwen3_5")), data()
    for name in ("shared_prefix", "slices"):
        mask, cu, _ = CASES[name]
        batch = lw.shard_batch(full.ids, cu, mask=mask)
        with pytest.raises(lw.InputError, match="runs along each document by itself"):
            model(**batch.inputs)


def test_hybrids_refuse_masks_that_cross_documents(ranks: Ranks) -> None:
    ranks.run(crossing, size=2)


def not_causal(want: Expected) -> None:
    model, full = lw.parallelize(build("llama")), data()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    causal = lw.shard_batch(full.ids, CU)
    with pytest.raises(lw.InputError, match=r'is not causal.*mask="full"'):
        model(**causal.inputs)
    batch = lw.shard_batch(full.ids, CU, mask="full")
    with exact(torch.float64, "llama"):
        assert worst(batch.unshard(model(**batch.inputs).logits)[0], want.logits) < 1e-9


def test_attention_that_is_not_causal_needs_a_full_mask(ranks: Ranks) -> None:
    ranks.run(not_causal, expected("llama", "full"), size=2)


def test_given_positions_win_and_masks_must_fit() -> None:
    ids, mask = data().ids, CASES["shared_prefix"][0]
    at = torch.arange(TOTAL) * 2
    batch = lw.shard_batch(ids, mask=mask, position_ids=at)
    assert batch.position_ids.equal(at)
    assert batch.pack.cu_seqlens.tolist() == CASES["shared_prefix"][2]
    with pytest.raises(lw.InputError, match="the mask has 85 tokens but input_ids has 84"):
        lw.shard_batch(ids[:-1], mask=mask)
    with pytest.raises(lw.InputError, match=r"give cu_seqlens=mask\.cu_seqlens"):
        lw.shard_batch(ids, CU, mask=mask)
    with pytest.raises(lw.InputError, match="mask is 'casual'"):
        lw.shard_batch(ids, CU, mask="casual")
    narrow, direct = (lw.shard_batch(ids, CU, **how).pack for how in ({"window": 4}, {"mask": CASES["window"][0]}))
    assert narrow.mask == direct.mask
