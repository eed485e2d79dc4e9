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

import torch
from torch import Tensor

from longweave.comm.exchange import Pending, all_to_all_v
from longweave.comm.groups import Comm
from longweave.kernels.attention import Kernel, zeros_like_sum
from longweave.kernels.merge import Partial
from longweave.kernels.tasks import Tasks


@dataclass(frozen=True)
class Stage:
    """One exchange and the work on what it brings; indices are on the tensors' device."""

    comm: Comm
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    send_index: Tensor
    order: Tensor  # arrival -> token order
    back: Tensor  # token order -> arrival
    tasks: Tasks

    def receive(self, kv: Tensor) -> Pending[Tensor]:
        """Exchange tokens of kv (T, Hk, D + Dv); what arrives is in order of arrival."""
        return all_to_all_v(kv.index_select(0, self.send_index), self.send_splits, self.recv_splits, self.comm)

    def split(self, arrived: Tensor, k_dim: int) -> tuple[Tensor, Tensor]:
        """Head-first k and v in token order."""
        by_head = arrived.transpose(0, 1)
        return by_head[..., :k_dim].index_select(1, self.order), by_head[..., k_dim:].index_select(1, self.order)

    def send_home(self, dk: Tensor, dv: Tensor) -> Pending[Tensor]:
        """The reverse exchange: what comes back are gradients of the tokens that were sent, in sending order."""
        grad = torch.cat([dk, dv], -1).transpose(0, 1).index_select(0, self.back)
        return all_to_all_v(grad, self.recv_splits, self.send_splits, self.comm)

    def add_home(self, pending: Pending[Tensor], total: Tensor) -> None:
        """Add what has come back to the gradients of my tokens, rank after rank: the same bits every run."""
        parts = zip(
            torch.split(self.send_index, list(self.send_splits)),
            torch.split(pending.wait(), list(self.send_splits)),
            strict=True,
        )
        for index, grad in parts:
            if len(index):
                total.index_add_(0, index, grad)


def groupcast_forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, own: Tasks, stages: Sequence[Stage]
) -> tuple[Partial, list[Tensor]]:
    """q (H, T, D) on the keys of this rank and on those it receives. Also what was received, stage by stage."""
    result = Partial.empty(q, v.shape[-1])
    kv = torch.cat([k, v], -1).transpose(0, 1)
    received: list[Tensor] = []
    arriving = [stages[0].receive(kv)] if stages else []
    kernel.forward(result, q, k, v, own, fresh=True)
    for step, stage in enumerate(stages):
        received.append(arriving.pop().wait())
        if step + 1 < len(stages):
            arriving.append(stages[step + 1].receive(kv))
        kernel.forward(result, q, *stage.split(received[step], k.shape[-1]), stage.tasks)
    return result, received


def groupcast_backward(
    kernel: Kernel,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    own: Tasks,
    stages: Sequence[Stage],
    received: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in float32. `received`: what forward received, or nothing, then it is received again."""
    dq, dk, dv = (zeros_like_sum(x) for x in (q, k, v))

    def compute(k_part: Tensor, v_part: Tensor, grads: tuple[Tensor, Tensor], tasks: Tasks) -> None:
        kernel.backward((dq, *grads), grad_out, q, k_part, v_part, out, lse, tasks)

    kv = torch.cat([k, v], -1).transpose(0, 1)
    returned = kv.new_zeros(kv.shape, dtype=dk.dtype)
    arriving: list[Pending[Tensor]] = []
    if not received:
        arriving = [stage.receive(kv) for stage in stages[:1]]
        compute(k, v, (dk, dv), own)  # while the first stage is on its way
    leaving: Pending[Tensor] | None = None
    for step, stage in enumerate(stages):
        arrived = received[step] if received else arriving.pop().wait()
        if not received and step + 1 < len(stages):
            arriving.append(stages[step + 1].receive(kv))
        keys, values = stage.split(arrived, k.shape[-1])
        grads = zeros_like_sum(keys), zeros_like_sum(values)
        compute(keys, values, grads, stage.tasks)
        if leaving:
            stages[step - 1].add_home(leaving, returned)
        leaving = stage.send_home(*grads)
    if received:
        compute(k, v, (dk, dv), own)  # while the last gradients are on their way home
    if leaving:
        stages[-1].add_home(leaving, returned)
    dk += returned[..., : k.shape[-1]].transpose(0, 1)
    dv += returned[..., k.shape[-1] :].transpose(0, 1)
    return dq, dk, dv
