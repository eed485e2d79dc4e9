"""The training loop of one rank: what a user of the library would write, with every step that is easy to get wrong.

every CP rank draws the same documents ─▶ shard_batch ─▶ model ─▶ local sum / global count ─▶ backward
gradients: SUM over dp × cp (FSDP2 averages, so the loss is scaled by the number of ranks)
what a step draws follows from the seed and its number, so a resumed run goes on with the next batch
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import longweave as lw
from longweave.core import LAYOUTS
from longweave.errors import InputError
from longweave.plan.cost import cost
from longweave.plan.heads import split_heads
from longweave.plan.schedule import check_options
from longweave.tools.timeline import StepRecorder, Timeline, gather_timeline, recording
from longweave.tools.train import checkpoints
from longweave.tools.train.together import compare_facts, naming, rank_0_writes
from longweave.tools.train.workload import DrawnDocuments, build_model, documents_digest, draw_documents

TIMELINE = "timeline.json"  # in the run's folder: one step of all ranks

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
    resume: Path | Literal["auto"] | None = None  # a checkpoint or a run's folder; "auto": out, if it has a checkpoint
    wait: float = 30.0  # seconds that ranks wait for each other in a step
    timeout: float = 600.0  # seconds that they do at the start, and around checkpoints

    def check(self, world_size: int) -> int:
        """The number of context-parallel ranks; raises where the numbers do not fit."""
        for name in ("layers", "steps", "tokens", "dp", "accumulate"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give at least 1")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; give a positive number")
        if self.layout not in LAYOUTS:
            raise InputError(f"layout is {self.layout!r}; choose one of {', '.join(LAYOUTS)}")
        check_options(self.strategy, {})
        if self.save_every < 0:
            raise InputError(f"save_every is {self.save_every}; give the steps between checkpoints, 0 for none")
        if world_size % self.dp:
            raise InputError(f"dp is {self.dp} but there are {world_size} ranks; give a divisor")
        if self.save_every and self.out is None:
            raise InputError("save_every needs out: a folder for the checkpoints")
        for name in ("wait", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; give a number of seconds above 0")
        if self.resume == "auto" and self.out is None:
            raise InputError("resume is 'auto', which needs out: the folder that has the checkpoints")
        start = self.start()
        if start is not None:
            checkpoints.check_facts(start, self.facts)
        return world_size // self.dp

    def start(self) -> Path | None:
        """The checkpoint that `resume` means now; raises where one was asked for and there is none."""
        if self.resume == "auto":
            return checkpoints.newest(self.out) if self.out else None
        return checkpoints.find(self.resume) if self.resume else None

    @property
    def facts(self) -> checkpoints.Facts:
        """What must be as it was when a run goes on: the shape of the model, and what each step draws."""
        return {
            "model": self.model,
            "hidden": self.hidden,
            "layers": self.layers,
            "seed": self.seed,
            "tokens": self.tokens,
            "dp × accumulate": self.dp * self.accumulate,
            "documents of Python's standard library": documents_digest(),
        }

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
    loads: tuple[float, ...]  # attention work of each CP rank over the mean
    kv_received: int  # tokens of K/V that one softmax layer of each kind brings to all CP ranks together
    kv_gathered: int  # the same if K/V were all-gathered


def train(config: TrainConfig, progress: Progress | None = None) -> list[Metrics]:
    """Train on this rank of the default process group; returns the metrics of every step of this run."""
    world = dist.get_world_size()
    compare_facts(config.facts)
    cp = config.check(world)
    files = dist.new_group(timeout=timedelta(seconds=config.timeout))
    start = checkpoints.chosen_by_rank_0(config.start, files)
    mesh = init_device_mesh("cpu", (config.dp, cp), mesh_dim_names=("dp", "cp"))
    everyone = mesh._flatten("dp_cp")
    torch.manual_seed(config.seed)
    model = build_model(config.model, config.hidden, config.layers)
    if config.checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    lw.parallelize(model, mesh["cp"])
    if world > 1:
        shard_parameters(model, everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
    history = []
    with checkpoints.run_folder(config.out, start, files) if config.out else nullcontext():
        first = checkpoints.load(start, model, optimizer, config.facts, files) if start else 0
        if config.out:
            rank_0_writes("metrics", partial(begin_again, config.out, start, first), files)
        dist.barrier(files)  # from here on ranks wait for each other's work only
        for group in (None, mesh["dp"].get_group(), mesh["cp"].get_group(), everyone.get_group()):
            _set_pg_timeout(timedelta(seconds=config.wait), group)
        lw.set_wait(config.wait)
        recorded = (first + config.steps) // 2 if config.out else None  # a step in the middle; the first ones warm up
        for step in range(first, config.steps):
            if config.out and step == recorded:
                with recording(mesh["cp"], model) as recorder:
                    metrics = train_step(config, step, model, optimizer, mesh, recorder)
                timeline = gather_timeline(f"step {step}", recorder.stop(), files)
                rank_0_writes("the timeline", partial(save_timeline, config.out, timeline), files)
            else:
                metrics = train_step(config, step, model, optimizer, mesh)
            history.append(metrics)
            if config.out:
                rank_0_writes(f"metrics of step {step}", partial(add_metrics, config.out, metrics))
            if progress and dist.get_rank() == 0:
                progress(metrics)
            if config.save_every and config.out and (step + 1) % config.save_every == 0:
                checkpoints.save(config.out, model, optimizer, step + 1, config.facts, files)
    return history


def shard_parameters(model: nn.Module, everyone: DeviceMesh) -> None:
    """FSDP2 over all ranks of dp × cp: every decoder layer, then the rest."""
    decoder: Any = model.model
    for layer in decoder.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)


def train_step(
    config: TrainConfig,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    recorder: StepRecorder | None = None,
) -> Metrics:
    """All batches of one step, one update. A recorder is stopped where the time of the step is."""
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
    norm = clip_gradients(model, config.clip, recorder)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with recorder.waits("sum of the loss") if recorder else nullcontext():
        dist.all_reduce(total)
    tokens = config.tokens * config.dp * config.accumulate
    speed = tokens / (time.perf_counter() - begin)
    if recorder:
        recorder.stop()
    # Not timed: what the layers did, in numbers.
    loads = [attention_load(plan) for plan in plans]
    work = np.sum([load.work for load in loads], axis=0) if loads else np.ones(mesh["cp"].size())
    return Metrics(
        step,
        float(total),
        learning_rate,
        float(norm),
        speed,
        max((load.imbalance for load in loads), default=1.0),
        tuple((work / work.mean() if work.any() else np.ones_like(work)).tolist()),
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


def clip_gradients(model: nn.Module, most: float, recorder: StepRecorder | None) -> torch.Tensor:
    """`clip_grad_norm_` in its two parts: between them ranks add up the norm, which is returned."""
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        with recorder.waits("sum of the gradient norm") if recorder else nullcontext():
            norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm


class AttentionLoad(NamedTuple):
    """One softmax layer: pairs of each rank, imbalance, K/V tokens that all receive, and if K/V were all-gathered."""

    work: tuple[float, ...]  # of a rank that computes some of the heads, its share
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
    heads = [stop - start for start, stop in split_heads(plan.shape.heads, plan.shape.kv_heads, size).q]
    work = np.outer(blocks, heads).ravel() / plan.shape.heads
    imbalance = float(work.max()) * world / int(blocks.sum()) if plan.mask.area else 1.0
    return AttentionLoad(tuple(work.tolist()), imbalance, received, total * (world - 1))


# -- files of rank 0; metrics.jsonl has every step once, also when it was done twice --------------------


def begin_again(out: Path, start: Path | None, first: int) -> None:
    keep_metrics(out, first)
    if start:
        checkpoints.went_on_from(start, out)


def keep_metrics(out: Path, first: int) -> None:
    """Forget the steps that are about to be done, and a line that was not finished; in one go."""
    path = out / "metrics.jsonl"
    kept = [line for line in path.read_bytes().splitlines() if _step(line) < first] if path.exists() else []
    draft = out / ".metrics.jsonl"
    with naming(draft):
        draft.write_bytes(b"".join(line + b"\n" for line in kept))
    draft.replace(path)


def add_metrics(out: Path, metrics: Metrics) -> None:
    path = out / "metrics.jsonl"
    with naming(path), path.open("a") as file:
        file.write(json.dumps(asdict(metrics)) + "\n")


def save_timeline(out: Path, timeline: Timeline) -> None:
    with naming(out / TIMELINE):
        timeline.save(out / TIMELINE)


def _step(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
