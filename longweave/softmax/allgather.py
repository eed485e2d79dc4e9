"""All-gather by head groups: every rank sees all keys, a few K/V heads at a time.

    heads     0 1          2 3          4 5
    gather    ████ ┐       ████ ┐       ████ ┐              the next heads are on their way
    compute        └▶ ████████  └▶ ████████  └▶ ████████    while these are computed

    backward
    gather    █ ┐      ███ ┐      ███ ┐                     gathered again, not kept
    compute     └▶ ██      └▶ ██████  └▶ ██████
    scatter           └▶ █       └▶ ███     └▶ ███          dK/dV home and summed in float32, while the next computes

What stands alone is the first gather and the last scatter, so backward may begin and end with fewer heads
(`bwd_head_first_stride`, `bwd_head_last_stride`). Gathered keys are put in token order: a chunk of queries then sees
one run of keys, whoever held them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longweave.comm.exchange import Pending, all_gather_v, reduce_scatter_v
from longweave.kernels.attention import Kernel, zeros_like_sum
from longweave.kernels.attention.partial import Partial, QuerySide, Tasks, sinks_gradient
from longweave.plan.schedule import Plan
from longweave.plan.tasks import tasks_on_all
from longweave.softmax.strategy import Grads, Result, split, zeros_for
from longweave.tokens import Shards

HeadRange = tuple[int, int]


class AllGatherStrategy:
    """All keys on every rank, a few K/V heads at a time."""

    needs_inputs = True

    def __init__(self, plan: Plan, shards: Shards) -> None:
        self.plan, self.shards = plan, shards
        self.tasks = Tasks(tasks_on_all(plan.mask, plan.layout, shards.comm.rank))

    def forward(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, want_lse: bool) -> Result:
        groups = self.plan.head_groups(backward=False)
        result = allgather_forward(kernel, q, k, v, self.tasks, self.shards, groups)
        return Result(result.finish(sinks, q.dtype), result.lse, result.lse)

    def backward(
        self, kernel: Kernel, grad_out: Tensor, inputs: Sequence[Tensor], kept: Tensor, lse: Tensor,
        sinks: Tensor | None,
    ) -> Grads:  # fmt: skip
        q, k, v, out = inputs
        queries = QuerySide(grad_out, q, out, lse.view(q.shape[1], len(q)))
        dsinks = None if sinks is None else sinks_gradient(sinks, queries)
        groups = self.plan.head_groups(backward=True)
        return *allgather_backward(kernel, queries, k, v, self.tasks, self.shards, groups), dsinks


def allgather_forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, shards: Shards, groups: Sequence[HeadRange]
) -> Partial:
    """q (T, H, D) on all keys, group after group of K/V heads."""
    result = Partial.empty(q, v.shape[-1])
    per_kv = q.shape[1] // k.shape[1]
    arriving = _gather(groups[0], k, v, shards)
    for step, group in enumerate(groups):
        kv = shards.order.undo(arriving.wait())
        if step + 1 < len(groups):
            arriving = _gather(groups[step + 1], k, v, shards)
        first, last = group[0] * per_kv, group[1] * per_kv
        part = result.heads(first, last)
        kernel.forward(part, q[:, first:last], *split(kv, k.shape[-1]), tasks, fresh=True)
    return result


def allgather_backward(
    kernel: Kernel,
    queries: QuerySide,
    k: Tensor,
    v: Tensor,
    tasks: Tasks,
    shards: Shards,
    groups: Sequence[HeadRange],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in float32 from the merged out and lse."""
    k_dim = k.shape[-1]
    dq, total = zeros_like_sum(queries.q), zeros_for(len(k), k, v)
    per_kv = queries.q.shape[1] // k.shape[1]
    arriving = _gather(groups[0], k, v, shards)
    leaving: list[tuple[HeadRange, Pending[Tensor]]] = []
    for step, group in enumerate(groups):
        kv = shards.order.undo(arriving.wait())
        if step + 1 < len(groups):
            arriving = _gather(groups[step + 1], k, v, shards)
        first, last = group[0] * per_kv, group[1] * per_kv
        grads = zeros_like_sum(kv)
        into = dq[:, first:last], *split(grads, k_dim)
        kernel.backward(into, queries.heads(first, last), *split(kv, k_dim), tasks)
        if leaving:  # at most one scatter is under way while the next group computes
            _store(*leaving.pop(), total)
        leaving.append((group, reduce_scatter_v(shards.order.apply(grads), shards.layout.counts, shards.comm)))
    _store(*leaving.pop(), total)
    return dq, *split(total, k_dim)


def _gather(group: HeadRange, k: Tensor, v: Tensor, shards: Shards) -> Pending[Tensor]:
    """Some heads of K and V of all ranks, in rank order."""
    heads = slice(*group)
    return all_gather_v(torch.cat([k[:, heads], v[:, heads]], -1), shards.layout.counts, shards.comm)


def _store(group: HeadRange, pending: Pending[Tensor], total: Tensor) -> None:
    total[:, group[0] : group[1]] = pending.wait()
