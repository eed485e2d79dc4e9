"""The recipes of docs/trainers/ run as they are written, and their losses are those without `lw.pool`."""

import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import as_launched, examples, model_of, tokenizer, words

import longweave as lw
from longweave.launch import Ranks

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "trainers"
TEXT = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
RECIPES = dict(re.findall(r"<!-- recipe: (\w+) -->\n```python\n(.*?)```", TEXT, re.S))


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def names() -> dict[str, Any]:
    """What the page says a recipe finds in place."""
    from datasets import Dataset

    config = model_of("llama").config
    config.num_labels = 1
    found = [words(e["input_ids"]) for e in examples(60, longest=30)]
    return {
        "__name__": "recipe",
        "config": config,
        "tokenizer": tokenizer(),
        "rows": examples(64, longest=30),
        "texts": Dataset.from_list([{"text": text} for text in found]),
        "prompts": Dataset.from_list([{"prompt": text} for text in found]),
        "choices": Dataset.from_list([{"chosen": a, "rejected": b} for a, b in itertools.pairwise(found)]),
        "preferences": Dataset.from_list(
            [
                {"prompt": a, "chosen": f" {b}", "rejected": f" {c}"}
                for a, b, c in zip(found, found[1:], found[2:], strict=False)
            ]
        ),
        "reward": reward,
    }


def recipe(name: str, with_pool: bool) -> list[float]:
    given, before = names(), os.getcwd()
    with as_launched() as folder, pytest.MonkeyPatch.context() as patch:
        if not with_pool:
            patch.setattr(lw, "pool", lambda model, *args, **options: model, raising=False)
        os.chdir(folder)
        torch.manual_seed(0)
        try:
            exec(compile(RECIPES[name], str(PAGES), "exec"), given)
        finally:
            os.chdir(before)
    if "losses" in given:
        return given["losses"]
    return [entry["loss"] for entry in given["trainer"].state.log_history if "loss" in entry]


def both(name: str) -> tuple[list[float], list[float]]:
    return recipe(name, True), recipe(name, False)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(ranks: Ranks, name: str) -> None:
    for pooled, plain in ranks.run(both, name, size=2, timeout=300):
        assert len(pooled) >= 5
        assert len(set(pooled)) > 2  # something was learned
        assert pooled == pytest.approx(plain, rel=1e-4, abs=1e-6)


def test_every_recipe_is_here() -> None:
    wanted = ["accelerate", "dpo", "fabric", "fsdp2", "grpo", "peft", "reward", "sft", "trainer"]
    assert sorted(RECIPES) == wanted
