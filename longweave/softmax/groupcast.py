"""Group-cast: only the K/V that are needed, in stages.

    receive   ░░ stage 0 ░░   ░░ stage 1 ░░
    compute   ████ own ████   ██ stage 0 ██   ██ stage 1 ██

    backward, K/V kept                              backward, K/V received again
    compute   ██ stage 0 ██ ██ stage 1 ██ █ own █   receive  ░ stage 0 ░  ░ stage 1 ░
    send home               ░░ dkv 0 ░░  ░ dkv 1 ░  compute  ███ own ███  ██ stage 0 ██  ██ stage 1 ██
                                                    send home                            ░░ dkv 0 ░░   ░ dkv 1 ░

K and V travel in one buffer. Their gradients go back the way they came and are summed at home, in float32, rank after
rank. Nothing is padded and nobody receives a token that it does not look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longweave.comm.exchange import Comm, Pending, all_to_all_v
from longweave.kernels.attention import Kernel, zeros_like_sum
from longweave.kernels.attention.partial import Partial, QuerySide, Tasks, sinks_gradient
from longweave.plan.schedule import Plan
from longweave.plan.tasks import CastStage, GroupCast
from longweave.softmax.strategy import Grads, Result
from longweave.tensors import Indices
from longweave.tokens import Shards


class GroupCastStrategy:
    """Only the keys that are needed, in stages."""

    needs_inputs = True

    def __init__(self, plan: Plan, shards: Shards) -> None:
        self.plan = plan
        schedule = GroupCast(plan.mask, plan.layout, plan.stages).of(shards.comm.rank)
        self.own = Tasks(schedule.own)
        self.stages = [Stage.of(stage, shards.comm) for stage in schedule.stages]

    def forward(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, want_lse: bool) -> Result:
        received = self._room(k, v) if self.plan.keep_kv else None
        result = groupcast_forward(kernel, q, k, v, self.own, self.stages, self._parts(received))
        result.add_sinks(sinks)
        return Result(result.out, result.lse, result.lse, None if received is None else received.view(-1))

    def backward(
        self, kernel: Kernel, grad_out: Tensor, inputs: Sequence[Tensor], kept: Tensor, lse: Tensor,
        sinks: Tensor | None,
    ) -> Grads:  # fmt: skip
        q, k, v, out = inputs
        queries = QuerySide(grad_out, q, out, lse.view(q.shape[:2]))
        dsinks = None if sinks is None else sinks_gradient(sinks, queries)
        received = kept.view(-1, k.shape[0], k.shape[-1] + v.shape[-1]) if self.plan.keep_kv else None
        return *groupcast_backward(kernel, queries, k, v, self.own, self.stages, self._parts(received)), dsinks

    def _room(self, k: Tensor, v: Tensor) -> Tensor:
        """For the K/V of all stages, in order of arrival: (tokens, Hk, D + Dv)."""
        return k.new_empty(sum(stage.tokens for stage in self.stages), k.shape[0], k.shape[-1] + v.shape[-1])

    def _parts(self, received: Tensor | None) -> Sequence[Tensor | None]:
        """What belongs to each stage."""
        if received is None:
            return [None] * len(self.stages)
        return torch.split(received, [stage.tokens for stage in self.stages]) if self.stages else []


@dataclass(frozen=True)
class Stage:
    """One exchange and the tasks on what it brings."""

    comm: Comm
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    indices: Indices  # sending order; arrival -> token order; token order -> arrival
    tasks: Tasks

    @classmethod
    def of(cls, stage: CastStage, comm: Comm) -> Stage:
        indices = Indices(stage.send_index, stage.order, np.argsort(stage.order))
        return cls(comm, stage.send_splits, stage.recv_splits, indices, Tasks(stage.tasks))

    @property
    def tokens(self) -> int:
        """Received."""
        return sum(self.recv_splits)

    def receive(self, kv: Tensor, into: Tensor | None) -> Pending[Tensor]:
        """Exchange tokens of kv (T, Hk, D + Dv); what arrives is in order of arrival."""
        send_index = self.indices.on(kv.device)[0]
        return all_to_all_v(kv.index_select(0, send_index), self.send_splits, self.recv_splits, self.comm, into)

    def split(self, arrived: Tensor, k_dim: int) -> tuple[Tensor, Tensor]:
        """Head-first k and v in token order."""
        order, by_head = self.indices.on(arrived.device)[1], arrived.transpose(0, 1)
        return by_head[..., :k_dim].index_select(1, order), by_head[..., k_dim:].index_select(1, order)

    def send_home(self, dk: Tensor, dv: Tensor) -> Pending[Tensor]:
        """The reverse exchange: what comes back are gradients of the tokens that were sent, in sending order."""
        back = self.indices.on(dk.device)[2]
        grad = torch.cat([dk, dv], -1).transpose(0, 1).index_select(0, back)
        return all_to_all_v(grad, self.recv_splits, self.send_splits, self.comm)

    def add_home(self, pending: Pending[Tensor], total: Tensor) -> None:
        """Add what has come back to the gradients of my tokens, rank after rank: the same bits every run."""
        parts = zip(
            torch.split(self.indices.on(total.device)[0], list(self.send_splits)),
            torch.split(pending.wait(), list(self.send_splits)),
            strict=True,
        )
        for index, grad in parts:
            if len(index):
                total.index_add_(0, index, grad)


def groupcast_forward(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: Tasks,
    stages: Sequence[Stage],
    into: Sequence[Tensor | None],
) -> Partial:
    """q (H, T, D) on the keys of this rank and on those it receives. `into`: where the K/V of each stage go."""
    result = Partial.empty(q, v.shape[-1])
    kv = torch.cat([k, v], -1).transpose(0, 1)
    arriving = [stages[0].receive(kv, into[0])] if stages else []
    kernel.forward(result, q, k, v, own, fresh=True)
    for step, stage in enumerate(stages):
        arrived = arriving.pop().wait()
        if step + 1 < len(stages):
            arriving.append(stages[step + 1].receive(kv, into[step + 1]))
        kernel.forward(result, q, *stage.split(arrived, k.shape[-1]), stage.tasks)
    return result


def groupcast_backward(
    kernel: Kernel,
    queries: QuerySide,
    k: Tensor,
    v: Tensor,
    own: Tasks,
    stages: Sequence[Stage],
    received: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in float32. `received`: what forward received in each stage; None is received again."""
    dq, dk, dv = (zeros_like_sum(x) for x in (queries.q, k, v))
    again = any(part is None for part in received)
    kv = torch.cat([k, v], -1).transpose(0, 1)
    returned = kv.new_zeros(kv.shape, dtype=dk.dtype)
    arriving = [stage.receive(kv, None) for stage in stages[:1]] if again else []
    if again:
        kernel.backward((dq, dk, dv), queries, k, v, own)  # while the first stage is on its way
    leaving: Pending[Tensor] | None = None
    for step, stage in enumerate(stages):
        kept = received[step]
        arrived = arriving.pop().wait() if kept is None else kept
        if again and step + 1 < len(stages):
            arriving.append(stages[step + 1].receive(kv, None))
        keys, values = stage.split(arrived, k.shape[-1])
        grads = zeros_like_sum(keys), zeros_like_sum(values)
        kernel.backward((dq, *grads), queries, keys, values, stage.tasks)
        if leaving:
            stages[step - 1].add_home(leaving, returned)
        leaving = stage.send_home(*grads)
    if not again:
        kernel.backward((dq, dk, dv), queries, k, v, own)  # while the last gradients are on their way home
    if leaving:
        stages[-1].add_home(leaving, returned)
    dk += returned[..., : k.shape[-1]].transpose(0, 1)
    dv += returned[..., k.shape[-1] :].transpose(0, 1)
    return dq, dk, dv
