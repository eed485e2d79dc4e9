"""Bytes as torch's own allocator counts them: what is alive when a piece of code ends, and the most in between."""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocated(NamedTuple):
    kept: int  # bytes allocated by a call and alive while its result is
    peak: int


def allocated(call: Callable[[], object], times: int = 6) -> Allocated:
    """Every tensor's bytes, also of those that only autograd or a library holds. numpy arrays do not count.

    The least of several runs: a buffer that a thread of the communication frees is not seen to be freed.
    """
    return Allocated(*map(min, zip(*(_run(call) for _ in range(times)), strict=True)))


def _run(call: Callable[[], object]) -> tuple[int, int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    running = [0, *accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))]
    del result
    return running[-1], max(running)
