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
from longweave.kernels import fused
from longweave.kernels.attention import Kernel, zeros_like_sum
from longweave.kernels.attention.partial import Partial, QuerySide, Tasks, sinks_gradient
from longweave.kernels.triton_launch import serves
from longweave.plan.schedule import Plan
from longweave.plan.tasks import CastStage, GroupCast
from longweave.softmax.strategy import Grads, Result, room_for, split, take, zeros_for
from longweave.tensors import Indices, Order
from longweave.tokens import Shards


class GroupCastStrategy:
    """Only the keys that are needed, in stages."""

    needs_inputs = True

    def __init__(self, plan: Plan, shards: Shards) -> None:
        self.plan = plan
        schedule = GroupCast(plan.mask, plan.layout, plan.stages).of(shards.comm.rank)
        self.own = Tasks(schedule.own)
        self.stages = [Stage.of(stage, shards.comm, shards.tokens) for stage in schedule.stages]

    def forward(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, want_lse: bool) -> Result:
        received = room_for(sum(stage.tokens for stage in self.stages), k, v) if self.plan.keep_kv else None
        result = groupcast_forward(kernel, q, k, v, self.own, self.stages, self._parts(received))
        out = result.finish(sinks, q.dtype)
        return Result(out, result.lse, result.lse, None if received is None else received.view(-1))

    def backward(
        self, kernel: Kernel, grad_out: Tensor, inputs: Sequence[Tensor], kept: Tensor, lse: Tensor,
        sinks: Tensor | None,
    ) -> Grads:  # fmt: skip
        q, k, v, out = inputs
        queries = QuerySide(grad_out, q, out, lse.view(q.shape[1], len(q)))
        dsinks = None if sinks is None else sinks_gradient(sinks, queries)
        received = kept.view(-1, k.shape[1], k.shape[-1] + v.shape[-1]) if self.plan.keep_kv else None
        return *groupcast_backward(kernel, queries, k, v, self.own, self.stages, self._parts(received)), dsinks

    def _parts(self, received: Tensor | None) -> Sequence[Tensor | None]:
        """What belongs to each stage, in token order."""
        if received is None:
            return [None] * len(self.stages)
        return torch.split(received, [stage.tokens for stage in self.stages]) if self.stages else []


@dataclass(frozen=True)
class Stage:
    """One exchange and the tasks on what it brings."""

    comm: Comm
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    sent: Indices  # tokens in sending order; then rows of what comes back, token by token, and where each token's begin
    order: Order  # arrival -> token order
    tasks: Tasks

    @classmethod
    def of(cls, stage: CastStage, comm: Comm, tokens: int) -> Stage:
        # A token that went to several ranks comes back from each: its rows stay in rank order.
        by_token = np.argsort(stage.send_index, kind="stable")
        offsets = np.searchsorted(stage.send_index[by_token], np.arange(tokens + 1))
        sent = Indices(stage.send_index, by_token.astype(np.int32), offsets.astype(np.int32))
        return cls(comm, stage.send_splits, stage.recv_splits, sent, Order(stage.order), Tasks(stage.tasks))

    @property
    def tokens(self) -> int:
        """Received."""
        return sum(self.recv_splits)

    def receive(self, k: Tensor, v: Tensor, into: Tensor | None = None) -> Pending[Tensor]:
        """Exchange tokens of k and v; what comes is (tokens, Hk, D + Dv) in token order."""
        rows = take(k, v, self.sent.on(k.device)[0])
        if self.order.rising:
            return all_to_all_v(rows, self.send_splits, self.recv_splits, self.comm, into)
        arriving = all_to_all_v(rows, self.send_splits, self.recv_splits, self.comm)
        return Pending((), lambda: self.order.apply(arriving.wait(), into))

    def send_home(self, grads: Tensor) -> Pending[Tensor]:
        """The reverse exchange: what comes back are gradients of the tokens that were sent, in sending order."""
        return all_to_all_v(self.order.undo(grads), self.recv_splits, self.send_splits, self.comm)

    def add_home(self, pending: Pending[Tensor], total: Tensor) -> None:
        """Add what has come back to the gradients of my tokens, rank after rank: the same bits every run."""
        rows, (index, by_token, offsets) = pending.wait(), self.sent.on(total.device)
        if serves(total):
            fused.add_rows(total, rows, by_token, offsets)
            return
        splits = list(self.send_splits)
        for peer_index, grad in zip(torch.split(index, splits), torch.split(rows, splits), strict=True):
            if len(peer_index):
                total.index_add_(0, peer_index, grad)


def groupcast_forward(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: Tasks,
    stages: Sequence[Stage],
    into: Sequence[Tensor | None],
) -> Partial:
    """q (T, H, D) on the keys of this rank and on those it receives. `into`: where the K/V of each stage go."""
    result = Partial.empty(q, v.shape[-1])
    arriving = [stages[0].receive(k, v, into[0])] if stages else []
    kernel.forward(result, q, k, v, own, fresh=True)
    for step, stage in enumerate(stages):
        kv = arriving.pop().wait()
        if step + 1 < len(stages):
            arriving.append(stages[step + 1].receive(k, v, into[step + 1]))
        kernel.forward(result, q, *split(kv, k.shape[-1]), stage.tasks)
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
    k_dim = k.shape[-1]
    dq, total = zeros_like_sum(queries.q), zeros_for(len(k), k, v)
    again = any(part is None for part in received)
    arriving = [stage.receive(k, v) for stage in stages[:1]] if again else []
    if again:
        kernel.backward((dq, *split(total, k_dim)), queries, k, v, own)  # while the first stage is on its way
    leaving: Pending[Tensor] | None = None
    for step, stage in enumerate(stages):
        kept = received[step]
        kv = arriving.pop().wait() if kept is None else kept
        if again and step + 1 < len(stages):
            arriving.append(stages[step + 1].receive(k, v))
        grads = zeros_like_sum(kv)
        kernel.backward((dq, *split(grads, k_dim)), queries, *split(kv, k_dim), stage.tasks)
        if leaving:
            stages[step - 1].add_home(leaving, total)
        leaving = stage.send_home(grads)
    if not again:
        kernel.backward((dq, *split(total, k_dim)), queries, k, v, own)  # while the last gradients go home
    if leaving:
        stages[-1].add_home(leaving, total)
    return dq, *split(total, k_dim)
