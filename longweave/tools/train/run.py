"""Start ranks here, or join those that torchrun started; show progress on a terminal; draw what was measured."""

from __future__ import annotations

import math
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from longweave.launch import Ranks
from longweave.tools.charts import draw_run
from longweave.tools.timeline import Timeline
from longweave.tools.train import failures
from longweave.tools.train.loop import TIMELINE, Metrics, TrainConfig, train


def run_local(config: TrainConfig, ranks: int, threads: int | None = None, limit: float = math.inf) -> list[Metrics]:
    """Start `ranks` processes on this machine and train; `threads` each, by default the cores divided among them.

    Raises `TrainingError`, one line that names the rank, if a rank fails, dies, stops or does not end within `limit`
    seconds.
    """
    config.check(ranks)
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    with Ranks(ranks, threads=threads, timeout=limit) as pool:
        try:
            return pool.run(train_and_show, config, sys.stdout.isatty(), wait=config.timeout)[0]
        except Exception as error:
            if pool.failed is None:
                raise
            raise failures.of_local_ranks(error, pool.failed, ranks, config.out) from error


def run_under_torchrun(config: TrainConfig) -> list[Metrics]:
    """Join the ranks that torchrun started. Raises `TrainingError`, one line, on ranks that fail or wait in vain."""
    limit = timedelta(seconds=config.timeout)
    store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        # With --master-port a restart finds the store of the attempt before, and there the addresses of dead ranks.
        # Several hosts need a rendezvous that makes a new one (c10d): they may count restarts differently.
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    try:
        hosts = failures.gather_hosts()
        try:
            return train_and_show(config, sys.stdout.isatty())
        except Exception as error:
            raise failures.of_this_rank(error, hosts, config.out) from error
    finally:
        dist.destroy_process_group()


def train_and_show(config: TrainConfig, terminal: bool) -> list[Metrics]:
    """On one rank: train; rank 0 shows a progress bar if stdout is a `terminal`, else a line every few steps."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    if dist.get_rank() != 0:
        return train(config)
    if not terminal:
        return train(config, lambda m: print(line(m), flush=True) if m.step % 10 == 0 else None)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()) as bar:
        task = bar.add_task("training", total=config.steps)
        return train(config, lambda m: bar.update(task, completed=m.step + 1, description=line(m)))


def line(m: Metrics) -> str:
    share = f"{100 * m.kv_received / m.kv_gathered:.0f} % of gathering" if m.kv_gathered else "nothing to send"
    return (
        f"step {m.step:4d}  loss {m.loss:.4f}  |grad| {m.gradient_norm:.2f}  {m.tokens_per_second:7.0f} tokens/s  "
        f"imbalance {m.imbalance:.2f}  K/V {share}"
    )


def draw(name: str, history: list[Metrics], out: Path) -> str:
    """Draw what the run has measured into its folder; says what was written."""
    if not history:  # the pictures of the run that did the steps stay
        return f"wrote {out / 'metrics.jsonl'}"
    timeline = Timeline.load(out / TIMELINE)
    draw_run(name, history, timeline, out / "run.png")
    shown = f"loss, tokens/s, load of the ranks, {timeline.title} of each"
    return f"wrote {out / 'metrics.jsonl'}, {TIMELINE} and run.png: {shown}"
