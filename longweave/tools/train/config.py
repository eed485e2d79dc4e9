"""What a training run is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from longweave.errors import InputError


@dataclass(frozen=True)
class TrainConfig:
    """One run. `cp` is what remains of the ranks after `dp`."""

    model: str = "qwen3_5"
    hidden: int = 64
    layers: int = 4
    steps: int = 50
    tokens: int = 2048  # in one pack
    dp: int = 1
    accumulate: int = 1  # packs per step and data-parallel rank
    lr: float = 3e-3
    warmup: int = 5
    clip: float = 1.0
    seed: int = 0
    bf16: bool = False
    checkpointing: bool = False
    layout: str = "auto"
    strategy: str = "auto"
    out: Path | None = None  # metrics, plot and checkpoints
    save_every: int = 0
    resume: Path | None = None

    def check(self, world_size: int) -> int:
        """The number of context-parallel ranks; raises where the numbers do not fit."""
        for name in ("layers", "steps", "tokens", "dp", "accumulate"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give at least 1")
        if world_size % self.dp:
            raise InputError(f"dp is {self.dp} but there are {world_size} ranks; give a divisor")
        if self.save_every and self.out is None:
            raise InputError("save_every needs out: a folder for the checkpoints")
        if self.resume is not None and not self.resume.exists():
            raise InputError(f"resume is {self.resume}, which does not exist; give the folder of a checkpoint")
        return world_size // self.dp

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))
