"""Measure on ranks: everybody starts together, the slowest counts, the best of a few rounds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def seconds(call: Callable[[], object], rounds: int = 3) -> float:
    """Best of `rounds`, after one warm-up; on several ranks the time of the slowest."""
    call()
    best = float("inf")
    for _ in range(rounds):
        together = dist.is_initialized() and dist.get_world_size() > 1
        if together:
            dist.barrier()
        begin = time.perf_counter()
        call()
        took = torch.tensor(time.perf_counter() - begin)
        if together:
            dist.all_reduce(took, dist.ReduceOp.MAX)
        best = min(best, float(took))
    return best
