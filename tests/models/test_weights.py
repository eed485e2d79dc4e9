"""Ranks whose weights part are named, and those that train alike never are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from families import build
from test_agreement import catch

import longweave as lw
from longweave.launch import Ranks
from longweave.models.weights import _is_due, checksum

CU = [0, 7, 24]


def train(fault: str, lr: float = 1e-3, steps: int = 10) -> str:
    """What is raised, and in which step."""
    model = build("llama", torch.float32, seed=1 if fault == "seed" and dist.get_rank() == 1 else 0)
    lw.parallelize(model, compare_weights=fault != "not compared")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    draw = torch.Generator().manual_seed(5)

    def step() -> None:
        batch = lw.shard_batch(torch.randint(50, (24,), generator=draw), CU)
        batch.loss(model(**batch.inputs).logits).backward()
        if fault not in ("no reduction", "not compared"):
            lw.reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(steps):
        said = catch(step)
        if said != "nothing raised":
            return f"step {number}: {said}"
    return "nothing raised"


@pytest.mark.parametrize(("fault", "step"), [("no reduction", 2), ("seed", 2)])
def test_ranks_whose_weights_part_are_named(ranks: Ranks, fault: str, step: int) -> None:
    for said in ranks.run(train, fault, size=3, timeout=90):
        assert said.startswith(f"step {step}: GroupError: "), said
        assert "other weights of the model" in said
        assert "lw.reduce_gradients(model, group)" in said
    assert fault != "seed" or "rank 1 of the group holds other weights" in said


def test_ranks_that_train_alike_are_not(ranks: Ranks) -> None:
    assert ranks.run(train, "none", 0.05, 20, size=3, timeout=90) == ["nothing raised"] * 3
    assert ranks.run(train, "not compared", size=2, timeout=90) == ["nothing raised"] * 2


def test_when_and_what_is_compared() -> None:
    assert [packs for packs in range(200) if _is_due(packs)] == [2, 4, 8, 16, 32, 64, 128, 192]
    model = build("llama")
    before = checksum(model)
    assert torch.equal(before, checksum(model))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-3 * torch.randn_like(p))
    assert abs(float(checksum(model) / before) - 1) > 1e-5
    assert checksum(torch.nn.Identity()) is None
