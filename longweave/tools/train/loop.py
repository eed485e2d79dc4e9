"""The training loop of one rank: what a user of the library would write, with every step that is easy to get wrong.

every CP rank draws the same documents ─▶ shard_batch ─▶ model ─▶ local sum / global count ─▶ backward
gradients: SUM over dp × cp (FSDP2 averages, so the loss is scaled by the number of ranks)
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import longweave as lw
from longweave.errors import InputError
from longweave.plan.cost import cost
from longweave.plan.heads import split_heads
from longweave.tools.train.workload import DrawnDocuments, build_model, draw_documents

Progress = Callable[["Metrics"], None]


@dataclass(frozen=True)
class TrainConfig:
    """One run. `cp` is what remains of the ranks after `dp`."""

    model: str = "qwen3_5"
    hidden: int = 64
    layers: int = 4
    steps: int = 50
    tokens: int = 2048  # in one batch
    dp: int = 1
    accumulate: int = 1  # batches per step and data-parallel rank
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


@dataclass(frozen=True)
class Metrics:
    """One step, the same on every rank of a data-parallel row but for the seconds."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    imbalance: float  # of the attention work over the CP ranks
    kv_received: int  # tokens of K/V that one softmax layer of each kind brings to all CP ranks together
    kv_gathered: int  # the same if K/V were all-gathered


def train(config: TrainConfig, progress: Progress | None = None) -> list[Metrics]:
    """Train on this rank of the default process group; returns the metrics of every step of this run."""
    world = dist.get_world_size()
    cp = config.check(world)
    mesh = init_device_mesh("cpu", (config.dp, cp), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(config.seed)
    model = build_model(config.model, config.hidden, config.layers)
    if config.checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    lw.parallelize(model, mesh["cp"])
    if world > 1:
        shard_parameters(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
    first = load(config.resume, model, optimizer) if config.resume else 0
    history = []
    for step in range(first, config.steps):
        metrics = train_step(config, step, model, optimizer, mesh)
        history.append(metrics)
        if dist.get_rank() == 0:
            _write(config.out, metrics, fresh=step == first)
            if progress:
                progress(metrics)
        if config.save_every and config.out and (step + 1) % config.save_every == 0:
            save(config.out / f"step-{step + 1}", model, optimizer, step + 1)
    return history


def shard_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 over all ranks of dp × cp: every decoder layer, then the rest."""
    everyone = mesh._flatten("dp_cp")
    decoder: Any = model.model
    for layer in decoder.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)


def train_step(
    config: TrainConfig, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh
) -> Metrics:
    """All batches of one step, one update."""
    begin = time.perf_counter()
    learning_rate = config.learning_rate(step)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    drawn = [draw_documents(config.tokens, config.seed, step, i) for i in range(config.dp * config.accumulate)]
    targets = sum(one.targets for one in drawn)  # of the whole step: the loss is a mean over all of them
    total = torch.zeros(())
    plans: list[lw.Plan] = []
    row = mesh["dp"].get_local_rank()
    for one in drawn[row * config.accumulate : (row + 1) * config.accumulate]:
        batch, loss = forward(config, model, one, mesh, targets)
        # FSDP2 takes the mean over all ranks; the convention is SUM.
        torch.autograd.backward(loss * dist.get_world_size())
        total += loss.detach().float()
        plans += batch.pack.plans
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    tokens = config.tokens * config.dp * config.accumulate
    speed = tokens / (time.perf_counter() - begin)
    # Not timed: what the layers did, in numbers.
    loads = [attention_load(plan) for plan in plans]
    return Metrics(
        step,
        float(total),
        learning_rate,
        _number(norm),
        speed,
        max((load.imbalance for load in loads), default=1.0),
        sum(load.received for load in loads),
        sum(load.gathered for load in loads),
    )


def forward(
    config: TrainConfig, model: nn.Module, drawn: DrawnDocuments, mesh: DeviceMesh, targets: int
) -> tuple[lw.Batch, torch.Tensor]:
    """The batch, and this rank's part of the loss: a local sum over the targets of the whole step."""
    batch = lw.shard_batch(
        torch.from_numpy(drawn.input_ids),
        drawn.cu_seqlens,
        mesh["cp"],
        layout=config.layout,
        strategy=config.strategy,
    )
    with torch.autocast("cpu", torch.bfloat16) if config.bf16 else nullcontext():
        logits = model(**batch.inputs).logits
    return batch, batch.loss(logits, num_items=targets)


class AttentionLoad(NamedTuple):
    """One softmax layer: imbalance of its work, K/V tokens that all ranks receive, and if K/V were all-gathered."""

    imbalance: float
    received: int
    gathered: int


def attention_load(plan: lw.Plan) -> AttentionLoad:
    """`plan.report()` says the same and more, but it plans for every rank: a second or more for a hundred of them."""
    found = cost(plan.mask, plan.layout)
    total, world, size = plan.layout.total, plan.world_size, plan.ulysses_size
    received = int(found.received.sum()) if plan.strategy == "groupcast" else total * (world // size - 1)
    # Ranks that exchange heads compute the pairs of all their tokens, each for its heads.
    blocks = found.area.reshape(-1, size).sum(1)
    most_heads = max(stop - start for start, stop in split_heads(plan.shape.heads, plan.shape.kv_heads, size).q)
    busiest = int(blocks.max()) * most_heads / plan.shape.heads
    imbalance = busiest * world / int(blocks.sum()) if plan.mask.area else 1.0
    return AttentionLoad(imbalance, received, total * (world - 1))


def _number(norm: torch.Tensor) -> float:
    full = getattr(norm, "full_tensor", None)
    return float(full() if full else norm)


def _write(out: Path | None, metrics: Metrics, fresh: bool) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / "metrics.jsonl").open("w" if fresh and metrics.step == 0 else "a") as file:
        file.write(json.dumps(asdict(metrics)) + "\n")


# -- checkpoints: torch.distributed.checkpoint reshards what it loads, so the number of ranks may change ----------


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Every rank writes its shards."""
    weights, moments = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": moments, "step": torch.tensor(step)}, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Fill model and optimizer from a checkpoint; returns the number of steps that it had done."""
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
    state_dict_loader.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])
