"""The code in docs/models.md runs as it is written, and its losses are those of one process."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from longweave.launch import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
RECIPES = {
    name: (int(size), code)
    for name, size, code in re.findall(
        r"<!-- test: ([\w ]+), (\d) ranks -->\n```python\n(.*?)```", PAGE.read_text(), re.S
    )
}
CU = [0, 13, 14, 31, 40]


def config() -> object:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        attn_implementation="eager",
    )


def batches(replica: int = 0) -> list[tuple[Tensor, list[int]]]:
    g = torch.Generator().manual_seed(7 + replica)
    return [(torch.randint(0, 97, (CU[-1],), generator=g), CU) for _ in range(3)]


def recipe(name: str) -> tuple[list[float], dict[str, Tensor]]:
    size, code = RECIPES[name]
    replica = dist.get_rank() // (size // 2) if name == "fsdp2" else 0
    names = {"config": config(), "loader": batches(replica), "__name__": "recipe"}
    exec(compile(code, str(PAGE), "exec"), names)
    parameters = {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for n, p in names["model"].named_parameters()
    }
    return names["losses"], parameters


def nll(model: nn.Module, ids: Tensor) -> list[Tensor]:
    logits = [model(input_ids=ids[None, a:b], use_cache=False).logits[0, :-1] for a, b in pairwise(CU)]
    return [
        F.cross_entropy(x, ids[a + 1 : b], reduction="none") for x, (a, b) in zip(logits, pairwise(CU), strict=True)
    ]


def one_process(replicas: int, accumulate: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    steps = list(zip(*(batches(r) for r in range(replicas)), strict=True))
    valid = (CU[-1] - len(CU) + 1) * (len(steps) if accumulate else replicas)
    for step in steps:
        loss = sum(x.sum() for ids, _ in step for x in nll(model, ids)) / valid
        loss.backward()
        losses.append(float(loss))
        if not accumulate:
            optimizer.step()
            optimizer.zero_grad()
    if accumulate:
        optimizer.step()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["hugging face", "fsdp2", "ddp", "accumulation"])
def test_training_recipes(ranks: Ranks, name: str) -> None:
    want, parameters = one_process(2 if name == "fsdp2" else 1, name == "accumulation")
    for losses, after in ranks.run(recipe, name, size=RECIPES[name][0]):
        assert losses == pytest.approx(want, rel=1e-5)
        for key, value in after.items():
            assert (value - parameters[key]).abs().max() < 1e-4, key  # a step of AdamW is 1e-3


def test_a_model_of_your_own(ranks: Ranks) -> None:
    (one, _), *_ = ranks.run(recipe, "own model", size=1)
    for losses, _ in ranks.run(recipe, "own model", size=2):
        assert losses == pytest.approx(one, rel=1e-5)
    assert one[0] > one[-1] or one[0] > 1


def test_logprobs(ranks: Ranks) -> None:
    for losses, _ in ranks.run(recipe, "logprobs", size=2):
        advantages = torch.linspace(-1, 1, CU[-1])
        counted = torch.ones(CU[-1])
        assert losses == pytest.approx([float(-(advantages * counted).sum() / (CU[-1] - len(CU) + 1))] * 3, abs=1e-5)


def test_every_recipe_is_tested() -> None:
    assert sorted(RECIPES) == ["accumulation", "ddp", "fsdp2", "hugging face", "logprobs", "own model"]
    assert PAGE.read_text().count("```python") == len(RECIPES)
