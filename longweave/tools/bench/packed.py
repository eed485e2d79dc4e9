"""Packed documents: group-cast against all-gather, a ring, and one process; time and bytes.

Forward and backward, float32, 8:2 heads, head dim 64, on a balanced layout. Every ratio comes from this run. Local
ranks would plan for a CPU, where bytes are cheap next to arithmetic: the layout here is the one that GPUs get.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

import longweave as lw
from longweave.kernels.attention import attend, attend_backward
from longweave.kernels.attention.partial import QuerySide, Tasks
from longweave.launch import Ranks
from longweave.plan.cost import Machine, cost
from longweave.tools.bench import peak_bytes, seconds
from longweave.tools.bench.attention import DIM, KV_HEADS, inputs
from longweave.tools.charts import BarPanel


def documents(kind: str, total: int, seed: int = 0) -> list[int]:
    """Borders of a pack: "lognormal" (up to a quarter of the pack), or "giant" (half in one document)."""
    rng = np.random.default_rng(seed)
    lengths = [total // 2] if kind == "giant" else []
    while sum(lengths) < total:
        draw = int(rng.lognormal(np.log(total / 60), 1.2))
        lengths.append(min(max(16, draw), total // 4, total - sum(lengths)))
    return [0, *np.cumsum(rng.permutation(lengths)).tolist()]


_RATES = f"{Machine.flops / 1e12:.0f} TFLOP/s and {Machine.bytes_per_second / 1e9:.0f} GB/s a rank"
PLANNED_FOR = f"layouts are planned for GPUs: {_RATES}"


def layout_of(name: str, cu: list[int], world: int) -> lw.Layout:
    """By name; "balanced" as a pack on GPUs takes it."""
    return lw.Layout.zigzag(cu, world) if name == "zigzag" else lw.Layout.balanced(lw.Mask.causal(cu), world)


def our_pass(cu: list[int], strategy: str) -> float:
    """On one of the ranks: forward and backward."""
    pack = lw.Pack(cu, layout=layout_of("balanced", cu, dist.get_world_size()), strategy=strategy)
    q, k, v, grad = inputs(pack.tokens)

    def call() -> None:
        out = lw.attention(q, k, v, pack)
        torch.autograd.grad(out, (q, k, v), grad)

    return seconds(call)


def one_process(cu: list[int], kernel: str) -> float:
    """One process on the whole pack: our kernels, or PyTorch's SDPA document by document."""
    q, k, v, grad = inputs(cu[-1])
    tasks = Tasks(lw.Mask.causal(cu).rows)
    alone = q.detach(), k.detach(), v.detach()

    def ours() -> None:
        out, lse = attend(*alone, tasks)
        attend_backward(QuerySide(grad, alone[0], out, lse), *alone[1:], tasks)

    def document(a: int, b: int) -> torch.Tensor:
        q_d, k_d, v_d = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q_d, k_d, v_d, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    def sdpa() -> None:
        outs = [document(a, b) for a, b in pairwise(cu) if b > a]
        torch.autograd.grad(torch.cat(outs), (q, k, v), grad)

    return seconds(ours if kernel == "ours" else sdpa)


def footprint(cu: list[int], strategy: str, layout: str) -> tuple[int, int]:
    """On one of the ranks: bytes that autograd keeps for one call, inputs included, and the most that the call
    takes at once, without its inputs.
    """
    pack = lw.Pack(cu, layout=layout_of(layout, cu, dist.get_world_size()), strategy=strategy)
    q, k, v, _ = inputs(pack.tokens)
    lw.attention(q, k, v, pack)  # the pack now holds what it derives
    kept: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
        torch.autograd.graph.saved_tensors_hooks(note, lambda x: x),
    ):
        lw.attention(q, k, v, pack)
    return sum(kept.values()), peak_bytes(profile)


@dataclass(frozen=True)
class Footprint:
    """One way to do it, on the worst rank."""

    strategy: str
    layout: str
    tokens_received: int
    imbalance: float
    mb_kept: float
    mb_peak: float


def compare(cu: list[int], world: int = 4) -> list[Footprint]:
    """All-gather, ring and group-cast side by side: traffic, balance, memory of one forward."""
    rows = []
    mask = lw.Mask.causal(cu)
    with Ranks(world) as ranks:
        for strategy, layout in (("allgather", "zigzag"), ("ring", "zigzag"), ("groupcast", "balanced")):
            report = lw.make_plan(mask, layout_of(layout, cu, world), strategy).report()
            found = ranks.run(footprint, cu, strategy, layout)
            rows.append(
                Footprint(
                    strategy,
                    layout,
                    max(rank.tokens_received for rank in report.ranks),
                    report.imbalance,
                    max(kept for kept, _ in found) / 1e6,
                    max(peak for _, peak in found) / 1e6,
                )
            )
    return rows


@dataclass(frozen=True)
class PackedTimes:
    """Times in seconds; MB are K/V that all ranks together receive in one forward."""

    kind: str
    tokens: int
    ranks: int
    groupcast: float
    allgather: float
    ring: float
    one_process: float
    mb_groupcast: float
    mb_allgather: float


def run(tokens: int, kind: str) -> Iterator[PackedTimes]:
    """A row for 2 ranks and one for 4, as they come."""
    cu = documents(kind, tokens)
    with Ranks(1, threads=2, timeout=600) as single:
        one = min(single.run(one_process, cu, kernel)[0] for kernel in ("ours", "sdpa"))
    mask = lw.Mask.causal(cu)
    per_token = 2 * KV_HEADS * DIM * 4 / 1e6
    with Ranks(4, timeout=600) as ranks:
        for world in (2, 4):
            times = {name: ranks.run(our_pass, cu, name, size=world)[0] for name in ("groupcast", "allgather", "ring")}
            received = int(cost(mask, layout_of("balanced", cu, world)).received.sum())
            yield PackedTimes(
                kind,
                tokens,
                world,
                times["groupcast"],
                times["allgather"],
                times["ring"],
                one,
                received * per_token,
                (world - 1) * tokens * per_token,
            )


# -- for pictures --------------------------------------------------------------------------------------


def compare_panels(rows: Sequence[Footprint]) -> list[BarPanel]:
    """Of each way to do it: traffic, balance and memory."""
    labels = [f"{row.strategy},\n{row.layout}" for row in rows]
    return [
        BarPanel("tokens received, worst rank", labels, {"": [row.tokens_received for row in rows]}),
        BarPanel("work of the busiest rank over the mean", labels, {"": [row.imbalance for row in rows]}),
        BarPanel(
            "MB, worst rank",
            labels,
            {"kept with inputs": [row.mb_kept for row in rows], "peak over inputs": [row.mb_peak for row in rows]},
        ),
    ]


def packed_panels(rows: Sequence[PackedTimes]) -> list[BarPanel]:
    """Seconds by every strategy, and K/V that is received."""
    labels = [f"{row.kind}\n{row.tokens}\n{row.ranks} ranks" for row in rows]
    seconds_of = {
        "group-cast": [row.groupcast for row in rows],
        "all-gather": [row.allgather for row in rows],
        "ring": [row.ring for row in rows],
        "one process, 2 threads": [row.one_process for row in rows],
    }
    megabytes = {"group-cast": [row.mb_groupcast for row in rows], "all-gather": [row.mb_allgather for row in rows]}
    return [
        BarPanel("seconds, forward + backward, float32", labels, seconds_of),
        BarPanel("MB received", labels, megabytes),
    ]
