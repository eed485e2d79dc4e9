"""Softmax attention of one causal document: against the kernel's own rate, one process, and other layouts.

Forward and backward, float32, 8:2 heads, head dim 64. Every ratio comes from times measured in this run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import longweave as lw
from longweave.kernels.attention import Kernel
from longweave.kernels.attention.partial import Partial, Tasks
from longweave.launch import Ranks
from longweave.plan.cost import areas
from longweave.softmax.ring import RingStrategy
from longweave.tools.bench import seconds
from longweave.tools.timeline import Lane, Timeline, recording

HEADS, KV_HEADS, DIM = 8, 2, 64

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = ((tokens, HEADS), (tokens, KV_HEADS), (tokens, KV_HEADS), (tokens, HEADS))
    q, k, v, grad = (torch.randn(*shape, DIM) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def rectangle(rows: int, keys: int) -> Callable[[], None]:
    """The bare kernel on a rectangle: forward and backward."""
    q, k, v = (torch.randn(1, h, n, DIM) for h, n in ((HEADS, rows), (KV_HEADS, keys), (KV_HEADS, keys)))
    grad = torch.randn(1, HEADS, rows, DIM)

    def call() -> None:
        out, lse = _forward(q, k, v, 0.0, False)
        _backward(grad, q, k, v, out, lse, 0.0, False)

    return call


def rectangle_rate(rows: int = 2048, keys: int = 4096) -> float:
    """Pairs per second, forward and backward, of the bare kernel on a rectangle, in as many threads as are set."""
    return rows * keys / seconds(rectangle(rows, keys))


def kernel_pass(tokens: int) -> float:
    """One process: the kernel's causal mode on the whole document."""
    q, k, v, grad = (x.detach().transpose(0, 1)[None].contiguous() for x in inputs(tokens))

    def call() -> None:
        out, lse = _forward(q, k, v, 0.0, True)
        _backward(grad, q, k, v, out, lse, 0.0, True)

    return seconds(call)


def our_pass(tokens: int, layout: str, strategy: str, options: dict[str, Any]) -> float:
    """On one of the ranks: forward and backward of `lw.attention`."""
    pack = lw.Pack([0, tokens], layout=layout, strategy=strategy, **options)
    q, k, v, grad = inputs(pack.tokens)

    def call() -> None:
        out = lw.attention(q, k, v, pack)
        torch.autograd.grad(out, (q, k, v), grad)

    return seconds(call)


@dataclass(frozen=True)
class TimedKernel(Kernel):
    """A kernel that notes when it was busy."""

    busy: list[tuple[float, float]] = field(default_factory=list)

    def forward(self, into: Partial, q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, fresh: bool = False) -> None:
        begin = time.perf_counter()
        super().forward(into, q, k, v, tasks, fresh)
        if len(tasks):
            self.busy.append((begin, time.perf_counter()))


def timeline(tokens: int, layout: str) -> list[tuple[float, float]]:
    """On one of the ranks: when the kernel was busy during one ring forward, in seconds from the common start."""
    pack = lw.Pack([0, tokens], layout=layout)
    ring = RingStrategy(lw.make_plan(pack.mask, pack.layout, "ring"), pack.core.shards)
    kernel = TimedKernel("cpu_flash", DIM**-0.5)
    q, k, v, _ = (x.detach() for x in inputs(pack.tokens))
    ring.forward(kernel, q, k, v, None, want_lse=False)
    kernel.busy.clear()
    dist.barrier()
    begin = time.perf_counter()
    ring.forward(kernel, q, k, v, None, want_lse=False)
    return [(a - begin, b - begin) for a, b in kernel.busy]


def recorded_pass(tokens: int, layout: str) -> Lane:
    """On one of the ranks: forward and backward of a ring, the second of two, written down."""
    pack = lw.Pack([0, tokens], layout=layout, strategy="ring")
    q, k, v, grad = inputs(pack.tokens)

    def call() -> None:
        out = lw.attention(q, k, v, pack)
        torch.autograd.grad(out, (q, k, v), grad)

    call()
    with recording(None) as recorder:
        call()
        return recorder.stop()


def draw_timelines(timelines: dict[str, list[list[tuple[float, float]]]], width: int = 72) -> str:
    """Busy time of every rank as a bar, all on one scale."""
    end = max(b for ranks in timelines.values() for busy in ranks for _, b in busy)
    lines = []
    for name, ranks in timelines.items():
        lines.append(f"{name}: {max(b for busy in ranks for _, b in busy):.2f} s")
        for rank, busy in enumerate(ranks):
            bar = ["·"] * width
            for step, (a, b) in enumerate(busy):
                for column in range(int(a / end * width), max(int(a / end * width) + 1, int(b / end * width))):
                    bar[min(column, width - 1)] = "█▓"[step % 2]
            lines.append(f"{rank:3d} {''.join(bar)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class AttentionTime:
    """One line of the table; ratios above 1 are in our favour."""

    tokens: int
    ranks: int
    what: str
    seconds: float
    ratio: float
    against: str


def run(tokens: int) -> list[AttentionTime]:
    """All figures for one document of that many tokens."""
    cu = [0, tokens]
    share = float(areas(lw.Mask.causal(cu), lw.Layout.zigzag(cu, 2)).max())
    rows = []
    with Ranks(4, timeout=600) as ranks:
        rates = ranks.run(rectangle_rate, size=2)
        ours = ranks.run(our_pass, tokens, "zigzag", "ring", {}, size=2)[0]
        rows.append(
            AttentionTime(
                tokens, 2, "ring, zigzag", ours, share / min(rates) / ours, "(a) its share at the rectangle rate"
            )
        )
        with Ranks(1, threads=2, timeout=600) as single:
            one = single.run(kernel_pass, tokens)[0]
        rows.append(AttentionTime(tokens, 2, "ring, zigzag", ours, one / ours, "(b) one process, two threads"))
        uneven = ranks.run(our_pass, tokens, "contiguous", "ring", {}, size=2)[0]
        rows.append(AttentionTime(tokens, 2, "ring, zigzag", ours, uneven / ours, "(c) ring, contiguous"))
        zigzag = ranks.run(our_pass, tokens, "zigzag", "ring", {}, size=4)[0]
        contiguous = ranks.run(our_pass, tokens, "contiguous", "ring", {}, size=4)[0]
        rows.append(AttentionTime(tokens, 4, "ring, zigzag", zigzag, contiguous / zigzag, "(c) ring, contiguous"))
        plain = {"heads_k_stride": 2, "bwd_head_first_stride": 2, "bwd_head_last_stride": 2}
        cut = {"heads_k_stride": 2, "bwd_head_first_stride": 1, "bwd_head_last_stride": 1}
        without = ranks.run(our_pass, tokens, "zigzag", "allgather", plain, size=2)[0]
        with_cuts = ranks.run(our_pass, tokens, "zigzag", "allgather", cut, size=2)[0]
        rows.append(
            AttentionTime(
                tokens, 2, "allgather, first/last 1 of 2", with_cuts, without / with_cuts, "(d) first/last whole"
            )
        )
        ulysses = ranks.run(our_pass, tokens, "zigzag", "ulysses", {}, size=2)[0]
        rows.append(AttentionTime(tokens, 2, "ulysses", ulysses, one / ulysses, "one process, two threads"))
    return rows


def timelines(tokens: int) -> str:
    """The picture of (c): four ranks, contiguous and zigzag, forward."""
    with Ranks(4, timeout=600) as ranks:
        return draw_timelines({f"ring, {name}": ranks.run(timeline, tokens, name) for name in ("contiguous", "zigzag")})


def recorded_timelines(tokens: int) -> list[Timeline]:
    """With backward, for a picture: busy, waiting, sent. No more ranks than cores, or they would wait for those."""
    with Ranks(max(2, min(4, os.cpu_count() or 1)), timeout=600) as ranks:
        return [
            Timeline(
                f"ring, {name}, {tokens} tokens, forward + backward", tuple(ranks.run(recorded_pass, tokens, name))
            )
            for name in ("contiguous", "zigzag")
        ]
