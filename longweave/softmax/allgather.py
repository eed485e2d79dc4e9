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
from dataclasses import dataclass

import torch
from torch import Tensor

from longweave.comm.exchange import Comm, Pending, all_gather_v, reduce_scatter_v
from longweave.kernels.attention import Kernel, zeros_like_sum
from longweave.kernels.attention.partial import Partial, QuerySide, Tasks, sinks_gradient
from longweave.plan.schedule import Plan
from longweave.plan.tasks import tasks_on_all
from longweave.softmax.strategy import Grads, Result
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
        result = allgather_forward(kernel, q, k, v, self.tasks, self._gather(q.device), groups)
        result.add_sinks(sinks)
        return Result(result.out, result.lse, result.lse)

    def backward(
        self, kernel: Kernel, grad_out: Tensor, inputs: Sequence[Tensor], kept: Tensor, lse: Tensor,
        sinks: Tensor | None,
    ) -> Grads:  # fmt: skip
        q, k, v, out = inputs
        queries = QuerySide(grad_out, q, out, lse.view(q.shape[:2]))
        dsinks = None if sinks is None else sinks_gradient(sinks, queries)
        groups = self.plan.head_groups(backward=True)
        return *allgather_backward(kernel, queries, k, v, self.tasks, self._gather(q.device), groups), dsinks

    def _gather(self, device: torch.device) -> Gather:
        shards = self.shards
        return Gather(shards.comm, shards.layout.counts, shards.token_order(device), shards.rank_order(device))


@dataclass(frozen=True)
class Gather:
    """How shards become one sequence and back. Indices are on the tensors' device."""

    comm: Comm
    counts: tuple[int, ...]
    token_order: Tensor  # rank order -> token order
    rank_order: Tensor  # token order -> rank order

    def start(self, k: Tensor, v: Tensor) -> Pending[Tensor]:
        """Gather some heads of k (h, T, D) and v (h, T, Dv), K and V in one buffer."""
        return all_gather_v(torch.cat([k, v], -1).transpose(0, 1), self.counts, self.comm)

    def finish(self, gathered: Tensor, k_dim: int) -> tuple[Tensor, Tensor]:
        """Head-first k and v of all tokens, in token order."""
        by_head = gathered.transpose(0, 1)
        return (
            by_head[..., :k_dim].index_select(1, self.token_order),
            by_head[..., k_dim:].index_select(1, self.token_order),
        )

    def send_home(self, dk: Tensor, dv: Tensor) -> Pending[Tensor]:
        """Sum the gradients of all tokens over the ranks; each gets those of its own tokens, as (T, h, D + Dv)."""
        by_rank = torch.cat([dk, dv], -1).transpose(0, 1).index_select(0, self.rank_order)
        return reduce_scatter_v(by_rank, self.counts, self.comm)


def allgather_forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tasks: Tasks, gather: Gather, groups: Sequence[HeadRange]
) -> Partial:
    """q (H, T, D) on all keys, group after group of K/V heads."""
    result = Partial.empty(q, v.shape[-1])
    per_kv = q.shape[0] // k.shape[0]
    arriving = gather.start(*_heads(groups[0], k, v))
    for step, group in enumerate(groups):
        k_full, v_full = gather.finish(arriving.wait(), k.shape[-1])
        if step + 1 < len(groups):
            arriving = gather.start(*_heads(groups[step + 1], k, v))
        mine = slice(group[0] * per_kv, group[1] * per_kv)
        part = Partial(result.out[mine], result.lse[mine])
        kernel.forward(part, q[mine], k_full, v_full, tasks, fresh=True)
    return result


def allgather_backward(
    kernel: Kernel,
    queries: QuerySide,
    k: Tensor,
    v: Tensor,
    tasks: Tasks,
    gather: Gather,
    groups: Sequence[HeadRange],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in float32 from the merged out and lse."""
    dq, dk, dv = (zeros_like_sum(x) for x in (queries.q, k, v))
    per_kv = queries.q.shape[0] // k.shape[0]
    arriving = gather.start(*_heads(groups[0], k, v))
    leaving: list[tuple[HeadRange, Pending[Tensor]]] = []
    for step, group in enumerate(groups):
        k_full, v_full = gather.finish(arriving.wait(), k.shape[-1])
        if step + 1 < len(groups):
            arriving = gather.start(*_heads(groups[step + 1], k, v))
        first, last = group[0] * per_kv, group[1] * per_kv
        grads = zeros_like_sum(k_full), zeros_like_sum(v_full)
        kernel.backward((dq[first:last], *grads), queries.heads(first, last), k_full, v_full, tasks)
        if leaving:  # at most one scatter is under way while the next group computes
            _store(*leaving.pop(), dk, dv)
        leaving.append((group, gather.send_home(*grads)))
    _store(*leaving.pop(), dk, dv)
    return dq, dk, dv


def _heads(group: HeadRange, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k[group[0] : group[1]], v[group[0] : group[1]]


def _store(group: HeadRange, pending: Pending[Tensor], dk: Tensor, dv: Tensor) -> None:
    home = pending.wait().transpose(0, 1)
    dk[group[0] : group[1]] = home[..., : dk.shape[-1]]
    dv[group[0] : group[1]] = home[..., dk.shape[-1] :]
