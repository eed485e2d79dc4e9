"""`longweave bench`: what it costs here, as ratios measured in one run.

On ranks everybody starts together and the slowest counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def together(call: Callable[[], object]) -> float:
    """Seconds of one call; on several ranks, which start together, those of the slowest."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several:
        dist.barrier()
    begin = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - begin)
    if several:
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def seconds(call: Callable[[], object], rounds: int = 3) -> float:
    """Best of `rounds`, after one warm-up; on several ranks the time of the slowest."""
    call()
    return min(together(call) for _ in range(rounds))


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    """For short calls, one right after the other as in a model: the median of `rounds`, on this rank."""
    for _ in range(max(3, rounds // 10)):
        call()
    took = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def peak_bytes(profile: torch.profiler.profile) -> int:
    """The most bytes alive at once, over those alive at the start. The profile is one with `profile_memory`."""
    events: list[Any] = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    alive = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
