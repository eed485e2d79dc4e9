"""The gated delta rule: in time per token, and across ranks by every method. Beside Hugging Face's: `bench peers`.

Float32, 4 heads, states of 128 × 128. Every ratio comes from times measured in this run; above 1 is in our favour.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import longweave as lw
from longweave.core import METHODS
from longweave.kernels.recurrence import mix
from longweave.kernels.recurrence.chunks import chunk_table
from longweave.kernels.recurrence.delta_rule import GatedDeltaRule
from longweave.launch import Ranks
from longweave.linear.methods import Sizes, choose
from longweave.tools.bench import seconds
from longweave.tools.charts import check_picture, save_figure

HEADS, DIM = 4, 128


@dataclass(frozen=True)
class LinearTime:
    """One line of the table."""

    what: str
    against: str
    seconds: float
    ratio: float
    goal: str


@dataclass(frozen=True)
class MethodTime:
    """One method on one length: time of forward and backward, bytes that the busiest rank sends in them."""

    tokens: int
    method: str
    seconds: float
    bytes_sent: int


def inputs(tokens: int) -> list[Tensor]:
    """q, k, v, g, beta; k of length 1, decay as in a trained model."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, HEADS, DIM) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    return [q, k, v, -0.05 * torch.rand(tokens, HEADS), torch.rand(tokens, HEADS)]


def _pass(fn: Callable[..., Tensor], given: list[Tensor], backward: bool) -> Callable[[], None]:
    grad = torch.randn(len(given[0]), HEADS, DIM)
    leaves = [x.requires_grad_(backward) for x in given]

    def call() -> None:
        out = fn(*leaves)
        if backward:
            torch.autograd.grad(out, leaves, grad)

    return call


def hugging_face() -> Callable[..., Tensor]:
    """Its code in torch, also where flash-linear-attention is installed, which its own wrapper would call."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    plain = inspect.unwrap(torch_chunk_gated_delta_rule)

    def call(*given: Tensor) -> Tensor:
        out: Tensor = plain(*(x.unsqueeze(0) for x in given))[0].squeeze(0)
        return out

    return call


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return mix(GatedDeltaRule(DIM**-0.5), (q, k, v, g, beta), chunk_table([(0, len(q))]))[0]


def local_pass(tokens: int, backward: bool, rounds: int = 3) -> float:
    """In one process: seconds of one pass over one document."""
    return seconds(_pass(ours, inputs(tokens), backward), rounds)


def rank_pass(tokens: int, method: str, rounds: int = 3) -> tuple[float, int]:
    """On one of the ranks: seconds and bytes of forward and backward over one document in zigzag."""
    pack = lw.Pack([0, tokens], layout="zigzag")
    given = [pack.shard(x) for x in inputs(tokens)]

    def across_ranks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return lw.gated_delta_rule(q, k, v, g, beta, pack, method=method)

    sent = choose(pack.core, Sizes.of(GatedDeltaRule(1.0), given)).bytes_sent[method]
    return seconds(_pass(across_ranks, given, backward=True), rounds), sent


def growth() -> LinearTime:
    with Ranks(1, threads=1, timeout=1200) as single:
        short = single.run(local_pass, 4096, True)[0]
        long = single.run(local_pass, 65536, True)[0]
    return LinearTime("forward + backward, 65536 tokens", "4096 tokens (times as long)", long, long / short, "≤ 18")


def two_ranks(tokens: int = 32768) -> LinearTime:
    with Ranks(1, threads=2, timeout=1200) as single:
        one = single.run(local_pass, tokens, True)[0]
    with Ranks(2, timeout=1200) as ranks:
        took = ranks.run(rank_pass, tokens, "affine")[0][0]
    return LinearTime(f"2 ranks, {tokens} tokens, zigzag", "one process, two threads", took, one / took, "≥ 0.85")


def methods(lengths: list[int]) -> list[MethodTime]:
    rows = []
    with Ranks(2, timeout=1200) as ranks:
        for tokens in lengths:
            for method in METHODS:
                took, sent = ranks.run(rank_pass, tokens, method, 1)[0]
                rows.append(MethodTime(tokens, method, took, sent))
    return rows


def draw_methods(rows: list[MethodTime], path: Path) -> str:
    """Time and bytes of each method over the length. Says what was written."""
    figure = check_picture(path)(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for method in METHODS:
        own = [row for row in rows if row.method == method]
        lengths = [row.tokens for row in own]
        axes[0].plot(lengths, [row.bytes_sent / 2**20 for row in own], "o-", label=method)
        axes[1].plot(lengths, [row.seconds for row in own], "o-", label=method)
    for axis, title in zip(axes, ("MiB sent by the busiest rank", "seconds"), strict=True):
        axis.set(yscale="log", xlabel="tokens", title=f"forward + backward, {title}")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend()
    return save_figure(figure, path)
