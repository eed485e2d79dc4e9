"""The training loop of one rank: what a user of the library would write, with every step that is easy to get wrong.

every CP rank draws the same pack ─▶ shard_batch ─▶ model ─▶ local sum / global count ─▶ backward
gradients: SUM over dp × cp (FSDP2 averages, so the loss is scaled by the number of ranks)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import longweave as lw
from longweave.tools.train import checkpoint
from longweave.tools.train.config import TrainConfig
from longweave.tools.train.data import Pack, draw_pack
from longweave.tools.train.models import build

Progress = Callable[["Metrics"], None]


@dataclass(frozen=True)
class Metrics:
    """One step, the same on every rank but for the seconds."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    imbalance: float  # of the attention work over the CP ranks
    kv_received: int  # tokens of K/V per softmax layer, all CP ranks together
    kv_gathered: int  # the same if K/V were all-gathered


def train(config: TrainConfig, progress: Progress | None = None) -> list[Metrics]:
    """Train on this rank of the default process group; returns the metrics of every step of this run."""
    world = dist.get_world_size()
    cp = config.check(world)
    mesh = init_device_mesh("cpu", (config.dp, cp), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(config.seed)
    model = build(config.model, config.hidden, config.layers)
    if config.checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    lw.parallelize(model, mesh["cp"])
    if world > 1:
        shard_parameters(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
    first = checkpoint.load(config.resume, model, optimizer) if config.resume else 0
    history = []
    for step in range(first, config.steps):
        metrics = train_step(config, step, model, optimizer, mesh)
        history.append(metrics)
        if dist.get_rank() == 0:
            _write(config.out, metrics, fresh=step == first)
            if progress:
                progress(metrics)
        if config.save_every and config.out and (step + 1) % config.save_every == 0:
            checkpoint.save(config.out / f"step-{step + 1}", model, optimizer, step + 1)
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
    """All packs of one step, one update."""
    begin = time.perf_counter()
    learning_rate = config.learning_rate(step)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    packs = [draw_pack(config.tokens, config.seed, step, i) for i in range(config.dp * config.accumulate)]
    targets = sum(pack.targets for pack in packs)  # of the whole step: the loss is a mean over all of them
    total = torch.zeros(())
    received = gathered = 0
    imbalance = 1.0
    row = mesh["dp"].get_local_rank()
    for pack in packs[row * config.accumulate : (row + 1) * config.accumulate]:
        batch, loss = forward(config, model, pack, mesh, targets)
        # FSDP2 takes the mean over all ranks; the convention is SUM.
        torch.autograd.backward(loss * dist.get_world_size())
        total += loss.detach().float()
        for plan in list(batch.step.plans.values())[:1]:  # layers of one kind share a plan; the first stands for all
            report = plan.report()
            received += sum(rank.tokens_received for rank in report.ranks)
            imbalance = max(imbalance, report.imbalance)
        gathered += config.tokens * (batch.layout.world_size - 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    tokens = config.tokens * config.dp * config.accumulate
    speed = tokens / (time.perf_counter() - begin)
    return Metrics(step, float(total), learning_rate, _number(norm), speed, imbalance, received, gathered)


def forward(
    config: TrainConfig, model: nn.Module, pack: Pack, mesh: DeviceMesh, targets: int
) -> tuple[Any, torch.Tensor]:
    """The batch, and this rank's part of the loss: a local sum over the targets of the whole step."""
    batch = lw.shard_batch(
        torch.from_numpy(pack.input_ids),
        pack.cu_seqlens,
        mesh["cp"],
        layout=config.layout,
        strategy=config.strategy,
    )
    with torch.autocast("cpu", torch.bfloat16) if config.bf16 else nullcontext():
        logits = model(**batch.inputs).logits
    return batch, batch.loss(logits, num_items=targets)


def _number(norm: torch.Tensor) -> float:
    full = getattr(norm, "full_tensor", None)
    return float(full() if full else norm)


def _write(out: Path | None, metrics: Metrics, fresh: bool) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / "metrics.jsonl").open("w" if fresh and metrics.step == 0 else "a") as file:
        file.write(json.dumps(asdict(metrics)) + "\n")
