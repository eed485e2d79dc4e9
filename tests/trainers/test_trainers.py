"""Real trainers, ten steps: losses, gradient norms and weights with `lw.pool` are those without it.

"zigzag" cuts every document over all ranks; "auto" is what users get. `make test-all` runs the whole table.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch
from trainer_runs import compared

from longweave.launch import Ranks
from longweave.models import rows
from longweave.models.pooled import Pooled

FULL = bool(os.environ.get("LONGWEAVE_FULL"))
CUT, AUTO = {"layout": "zigzag"}, {"layout": "auto"}
POOLED = {"layout": "zigzag", "head": "pooled"}
# In float32, transformers' own linear attention is more than 1e-5 away from itself in float64. TRL's kernels have no
# float64.
HYBRID = {"family": "qwen3_5", "dtype": torch.float64}
HYBRID_32 = {"family": "qwen3_5"}

# trainer, ranks, options of lw.pool, options of the run
CASES = [
    ("trainer", 2, CUT, {}),
    ("trainer", 3, AUTO, {"side": "left"}),
    ("trainer", 4, CUT, HYBRID),
    ("trainer", 2, AUTO, {"family": "gpt_oss"}),
    ("trainer", 2, POOLED, {"family": "qwen3_moe", "gradient_accumulation_steps": 2, "gradient_checkpointing": True}),
    ("sft", 2, CUT, {}),
    ("sft", 3, CUT, {"packing": True}),
    ("sft", 4, POOLED, {"packing": True}),
    ("sft", 2, POOLED, {"lora_outside": True}),
    ("sft", 2, CUT, {"lora_inside": True}),
    ("dpo", 2, POOLED, {}),
    ("grpo", 2, POOLED, {}),
    ("grpo", 3, CUT, HYBRID_32),
    ("reward", 2, CUT, {}),
    ("accelerate", 2, CUT, {}),
    ("fabric", 2, CUT, {}),
    ("loop", 4, CUT, {}),
    ("loop", 3, POOLED, {**HYBRID, "wrapper": "fsdp", "checkpointing": True}),
]
MORE = [
    *(("trainer", size, how, {**family, "side": side})
      for size in (2, 3, 4) for how in (CUT, AUTO, POOLED) for side in ("left", "right")
      for family in ({}, HYBRID, {"family": "gpt_oss"}, {"family": "qwen3_moe"})),
    *((name, size, how, {}) for name in ("sft", "dpo", "grpo", "reward", "accelerate", "fabric", "loop")
      for size in (2, 3, 4) for how in (CUT, AUTO, *([POOLED] if name != "reward" else []))),
    *(("sft", size, how, {"packing": True}) for size in (2, 3, 4) for how in (CUT, AUTO, POOLED)),
    *((name, 2, how, HYBRID_32) for name in ("sft", "dpo", "grpo", "reward") for how in (CUT, AUTO)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "how", "options"), CASES + (MORE if FULL else []))
def test_trainers_see_data_parallelism(ranks: Ranks, name: str, size: int, how: dict, options: dict) -> None:
    for loss, norm, weights in ranks.run(compared, name, how, size=size, timeout=300, **options):
        assert loss < 1e-5
        assert norm < (5e-5 if options == HYBRID_32 else 1e-5)
        assert weights < 1e-6


def with_fault(fault: str, name: str) -> str:
    """The comparison, while the code is broken on purpose."""
    if fault == "documents merged":
        place, attribute = rows, "_begins"
        wrong: Any = lambda places, *rest: np.arange(len(places)) == 0  # noqa: E731
    else:  # no gradient comes back from the ranks that computed a row's tokens
        place, attribute, home = Pooled, "home", Pooled.home
        wrong = lambda self, y: home(self, y.detach()).requires_grad_(y.requires_grad)  # noqa: E731
    right = getattr(place, attribute)
    setattr(place, attribute, wrong)
    try:
        loss, norm, _ = compared(name, CUT)
    except AssertionError:
        return "noticed"
    finally:
        setattr(place, attribute, right)
    return "noticed" if max(loss, norm) > 1e-3 else "not noticed"


@pytest.mark.parametrize("name", ["trainer", "sft"])
@pytest.mark.parametrize("fault", ["documents merged", "gradient of the exchange cut"])
def test_planted_faults_make_these_tests_red(ranks: Ranks, fault: str, name: str) -> None:
    assert ranks.run(with_fault, fault, name, size=2) == ["noticed"] * 2
