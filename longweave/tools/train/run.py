"""Start ranks here, or join those that torchrun started; show progress on a terminal; draw the losses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from longweave.launch import Ranks
from longweave.tools.train.loop import Metrics, TrainConfig, train


def run_local(
    config: TrainConfig, ranks: int, threads: int | None = None, timeout: float = 24 * 3600.0
) -> list[Metrics]:
    """Start `ranks` processes on this machine and train; `threads` each, by default the cores divided among them."""
    config.check(ranks)
    threads = threads or max(1, (os.cpu_count() or 1) // ranks)
    with Ranks(ranks, threads=threads, timeout=timeout) as pool:
        return pool.run(train_and_show, config, sys.stderr.isatty())[0]


def run_under_torchrun(config: TrainConfig) -> list[Metrics]:
    """Join the ranks that torchrun started."""
    dist.init_process_group("gloo")
    try:
        return train_and_show(config, sys.stderr.isatty())
    finally:
        dist.destroy_process_group()


def train_and_show(config: TrainConfig, terminal: bool) -> list[Metrics]:
    """On one rank: train; rank 0 shows a progress bar on terminals and a line every few steps elsewhere."""
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


def plot_losses(curves: dict[str, list[Metrics]], path: Path) -> None:
    """The losses of one or more runs as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for i, (name, history) in enumerate(curves.items()):
        style = "-" if i == 0 else "--"
        axes.plot([m.step for m in history], [m.loss for m in history], style, linewidth=2, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
