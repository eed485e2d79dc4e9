"""How fast it is here: attention by backend and by strategy, and how much of an exchange hides behind compute.

Times on a GPU are taken with CUDA events, elsewhere with a clock. Of several ranks the slowest counts. Nothing here
fails for being slow: figures are to be compared with other machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

import longweave as lw
from longweave.comm.exchange import all_to_all_v, resolve
from longweave.kernels.attention import BACKENDS, attend, attend_backward
from longweave.kernels.attention.partial import QuerySide, Tasks
from longweave.plan.schedule import STRATEGIES
from longweave.tools.doctor.checks import Outcome, Site, SkipCase, attempt, short


@dataclass(frozen=True)
class Workload:
    """What is timed, for each rank: tokens in documents of a few thousand, heads of q and of k and v, head dim."""

    tokens: int
    document: int
    heads: tuple[int, int]
    dim: int
    dtype: torch.dtype
    rounds: int

    def __str__(self) -> str:
        heads = f"{self.heads[0]}:{self.heads[1]} heads of {self.dim}"
        return f"{self.tokens} tokens a rank in documents of {self.document}, {heads}, {short(self.dtype)}, causal"

    def inputs(self, tokens: int, device: torch.device) -> list[Tensor]:
        """q, k, v and the gradient of out."""
        heads = (self.heads[0], self.heads[1], self.heads[1], self.heads[0])
        return [torch.randn((tokens, h, self.dim), dtype=self.dtype, device=device) for h in heads]

    def borders(self, ranks: int) -> list[int]:
        return [*range(0, self.tokens * ranks, self.document), self.tokens * ranks]

    def flops(self, cu: list[int]) -> float:
        """Of forward: two products of D for each pair and head, each 2·D operations."""
        pairs = sum((b - a) * (b - a + 1) / 2 for a, b in pairwise(cu))
        return 4 * pairs * self.heads[0] * self.dim


def workload(site: Site) -> Workload:
    if site.device.type == "cuda":
        return Workload(16384, 4096, (32, 8), 128, torch.bfloat16, 5)
    return Workload(1024, 512, (4, 2), 64, torch.float32, 2)


def milliseconds(call: Callable[[], object], site: Site, rounds: int) -> float:
    """Best of `rounds`, after one that warms up."""
    call()
    best = float("inf")
    for _ in range(rounds):
        site.wait()
        if site.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            best = min(best, 1e3 * (time.perf_counter() - start))
    return best


# -- kernels -------------------------------------------------------------------------------------------


def kernel_times(site: Site) -> Iterator[Outcome]:
    """Forward and backward of every backend that serves, on one rank's tokens."""
    yield Outcome("sizes", "", note=str(workload(site)))
    for backend in BACKENDS:
        if backend != "reference":  # plain products: nobody trains with it
            yield attempt(site, backend, "", None, partial(_kernel_time, site, backend))


def _kernel_time(site: Site, backend: str) -> Outcome:
    work = workload(site)
    q, k, v, grad = work.inputs(work.tokens, site.device)
    cu = work.borders(1)
    tasks = Tasks(lw.Mask.causal(cu).rows)
    forward = milliseconds(lambda: attend(q, k, v, tasks, backend=backend), site, work.rounds)
    out, lse = attend(q, k, v, tasks, backend=backend)
    queries = QuerySide(grad, q, out.to(q.dtype), lse)
    backward = milliseconds(lambda: attend_backward(queries, k, v, tasks, backend=backend), site, work.rounds)
    rate = 3.5 * work.flops(cu) / (forward + backward) / 1e9
    note = f"forward {forward:.2f} ms, backward {backward:.2f} ms, {rate:.3g} TFLOP/s"
    return Outcome("", "", value=forward + backward, unit="ms", note=note)


# -- strategies ----------------------------------------------------------------------------------------


def strategy_times(site: Site) -> Iterator[Outcome]:
    """Forward and backward of a layer by every strategy, all ranks together."""
    yield Outcome("sizes", "", note=str(workload(site)))
    for strategy in STRATEGIES:
        yield attempt(site, strategy, "", None, partial(_strategy_time, site, strategy))


def _strategy_time(site: Site, strategy: str) -> Outcome:
    work = workload(site)
    pack = lw.Pack(work.borders(site.size), site.group, strategy=strategy)
    q, k, v, grad = work.inputs(pack.tokens, site.device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dist.barrier()  # of the default group: the hosts start together

    def both() -> None:
        torch.autograd.grad(lw.attention(q, k, v, pack), leaves, grad)

    with torch.no_grad():
        forward = milliseconds(lambda: lw.attention(q, k, v, pack), site, work.rounds)
    total = milliseconds(both, site, work.rounds)
    return Outcome("", "", value=total, unit="ms", note=f"forward {forward:.2f} ms, with backward {total:.2f} ms")


# -- overlap -------------------------------------------------------------------------------------------


def overlap(site: Site) -> Iterator[Outcome]:
    """An exchange of K/V and attention on own keys: each alone, and the exchange started before the compute."""
    yield attempt(site, "exchange and compute", "", None, partial(_overlap, site))


def _overlap(site: Site) -> Outcome:
    if site.size == 1:
        raise SkipCase("one rank exchanges nothing")
    work, comm = workload(site), resolve(site.group)
    q, k, v, _ = work.inputs(work.tokens, site.device)
    kv = torch.cat([k, v], -1)
    tasks = Tasks(lw.Mask.causal(work.borders(1)).rows)
    # To every other rank an equal part, to this one nothing.
    splits = [0 if peer == comm.rank else len(kv) // (comm.size - 1) for peer in range(comm.size)]
    kv = kv[: sum(splits)].contiguous()

    def exchange() -> Tensor:
        return all_to_all_v(kv, splits, splits, comm).wait()

    def compute() -> None:
        attend(q, k, v, tasks)

    def together() -> None:
        arriving = all_to_all_v(kv, splits, splits, comm)
        compute()
        arriving.wait()

    times = []
    for call in (exchange, compute, together):
        dist.barrier()
        times.append(milliseconds(call, site, work.rounds))
    sent, computed, both = times
    hidden = (sent + computed - both) / min(sent, computed)
    note = f"exchange {sent:.2f} ms, compute {computed:.2f} ms, together {both:.2f} ms: "
    note += f"{100 * max(0.0, min(1.0, hidden)):.0f} % of the shorter is hidden"
    if site.device.type == "cpu":
        note = f"not judged, ranks share the CPU: {note}"
    return Outcome("", "", value=both, unit="ms", note=note)
