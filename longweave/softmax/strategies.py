"""From a plan to something that runs: one object per strategy, with the forward and the backward of one call.

Both take and give head-first tensors of this rank: q (H, T, D), k (Hk, T, D), v (Hk, T, Dv). Backward finds q, k, v,
out and lse again (unless `keeps_inputs` is false: then what forward made instead of them), and the `extra` tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from longweave.comm.groups import Comm
from longweave.errors import InputError
from longweave.kernels.attention import Kernel
from longweave.kernels.dtypes import accumulation_dtype
from longweave.kernels.index import Indices
from longweave.kernels.merge import Partial, sinks_gradient
from longweave.kernels.tasks import Tasks
from longweave.plan.cast import Cast, CastStage, cast
from longweave.plan.heads import HeadSplit, head_groups, split_heads
from longweave.plan.layout import Layout, SpanTable, join_ranks
from longweave.plan.mask import Mask
from longweave.plan.schedule import Plan, check_ulysses_size
from longweave.plan.work import work_by_source, work_on_all
from longweave.softmax.allgather import Gather, allgather_backward, allgather_forward
from longweave.softmax.groupcast import Stage, groupcast_backward, groupcast_forward
from longweave.softmax.heads import HeadExchange, sum_heads
from longweave.softmax.ring import Ring, ring_backward, ring_forward
from longweave.tokens import rank_order, token_order

Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Call:
    """Everything about one call except its tensors."""

    plan: Plan
    comm: Comm
    heads: int
    kv_heads: int
    options: dict[str, int]


class Strategy(Protocol):
    """How K/V reaches Q and gradients get home."""

    @property
    def keeps_inputs(self) -> bool:
        """Does backward want q, k, v, out and lse as they were at the door?"""

    def forward(
        self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out (H, T, Dv), lse (H, T; empty where it costs extra and nobody asked), extra tensors for backward."""

    def extra(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Empty tensors with the shapes of forward's extra tensors, for token-first q, k, v."""

    def backward(self, kernel: Kernel, grad_out: Tensor, saved: list[Tensor], sinks: Tensor | None) -> Grads:
        """dq, dk, dv and the gradient of the sinks, in float32 or the dtype of the inputs."""


def strategy_of(call: Call) -> Strategy:
    """The strategy of a call's plan, with the call's options checked."""
    name = call.plan.strategy
    maker, known = _STRATEGIES[name]
    unknown = sorted(set(call.options) - set(known))
    if unknown:
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        raise InputError(f"strategy {name} {takes}, not {', '.join(unknown)}")
    for option, value in call.options.items():
        if option == "keep_kv" and value not in (0, 1):
            raise InputError(f"keep_kv is {value}; give True or False")
        if option != "keep_kv" and value < 1:
            raise InputError(f"{option} is {value}; give a positive int")
    return maker(call)


# -- ring, Ulysses and their product --------------------------------------------------------------------


@dataclass(frozen=True)
class RingOfHeads:
    """A ring over blocks of ranks that exchange heads among themselves; blocks of one rank: a plain ring."""

    call: Call

    @cached_property
    def size(self) -> int:
        """Ranks per block."""
        plan = self.call.plan
        asked = self.call.options.get("ulysses_size")
        return plan.ulysses_size if asked is None else check_ulysses_size(plan.strategy, asked, plan.world_size)

    @cached_property
    def table(self) -> SpanTable:
        """The tokens of blocks."""
        table = self.call.plan.layout.table
        return table if self.size == 1 else join_ranks(table, self.size)

    @cached_property
    def ring(self) -> Ring:
        block, inner = divmod(self.call.comm.rank, self.size)
        peers = tuple(range(inner, self.call.comm.size, self.size))
        return Ring(self.call.comm, peers, block, self.table.counts)

    @cached_property
    def tasks(self) -> tuple[Tasks, ...]:
        return tasks_by_source(self.call.plan.mask, self.table, self.ring.index)

    @cached_property
    def split(self) -> HeadSplit:
        return split_heads(self.call.heads, self.call.kv_heads, self.size)

    @property
    def keeps_inputs(self) -> bool:
        return self.size == 1

    def extra(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        if self.size == 1:
            return []
        inner = self.call.comm.rank % self.size
        (q0, q1), (k0, k1) = self.split.q[inner], self.split.k[inner]
        tokens = self.table.counts[self.ring.index]
        shapes = [(q1 - q0, q.shape[-1]), (k1 - k0, k.shape[-1]), (k1 - k0, v.shape[-1]), (q1 - q0, v.shape[-1])]
        lse = q.new_empty((q1 - q0, tokens), dtype=accumulation_dtype(q.dtype))
        return [*(q.new_empty(heads, tokens, dim) for heads, dim in shapes), lse]

    def exchange(self, device: torch.device) -> HeadExchange:
        comm, size = self.call.comm, self.size
        first = comm.rank - comm.rank % size
        inner = tuple(range(first, first + size))
        counts = tuple(self.call.plan.layout.counts[rank] for rank in inner)
        order, back = block_order(self.call.plan.layout.table, inner, device)
        return HeadExchange(comm, inner, comm.rank - first, counts, self.split, order, back)

    def forward(
        self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        if self.size == 1:
            result = ring_forward(kernel, q, k, v, self.tasks, self.ring)
            if sinks is not None:
                result.add_sinks(sinks)
            return result.out, result.lse, []
        exchange, split = self.exchange(q.device), self.split
        q, k, v = exchange.to_heads([q, k, v], [split.q, split.k, split.k])
        result = ring_forward(self._kernel(kernel), q, k, v, self.tasks, self.ring)
        if sinks is not None:
            result.add_sinks(self._mine(sinks))
        out = result.out.to(q.dtype)
        (parts,) = exchange.to_tokens([out], [split.q], q.dtype)
        lse = result.lse.new_empty(0)
        if self.call.options.get("return_lse"):
            (lses,) = exchange.to_tokens([result.lse[..., None]], [split.q], result.lse.dtype)
            lse = torch.cat(lses)[..., 0]
        return torch.cat(parts), lse, [q, k, v, out, result.lse]

    def backward(self, kernel: Kernel, grad_out: Tensor, saved: list[Tensor], sinks: Tensor | None) -> Grads:
        q, k, v, out, lse = saved
        if self.size == 1:
            dsinks = None if sinks is None else sinks_gradient(sinks, grad_out, out, lse)
            return *ring_backward(kernel, grad_out, q, k, v, out, lse, self.tasks, self.ring), dsinks
        exchange, split = self.exchange(q.device), self.split
        (grad_out,) = exchange.to_heads([grad_out], [split.q])
        grads = ring_backward(self._kernel(kernel), grad_out, q, k, v, out, lse, self.tasks, self.ring)
        dsinks = None
        if sinks is not None:
            dsinks = torch.zeros(self.call.heads, dtype=lse.dtype, device=lse.device)
            self._mine(dsinks).copy_(sinks_gradient(self._mine(sinks), grad_out, out, lse))
        # Heads that only one rank computed are complete: they travel in the dtype they will have in the end.
        dtype = grads[1].dtype if split.replicated else q.dtype
        dq, dk, dv = exchange.to_tokens(grads, [split.q, split.k, split.k], dtype)
        tokens = self.call.plan.layout.counts[self.call.comm.rank]
        kv = [grads[i].new_zeros(self.call.kv_heads, tokens, grads[i].shape[-1]) for i in (1, 2)]
        return torch.cat(dq), sum_heads(dk, split.k, kv[0]), sum_heads(dv, split.k, kv[1]), dsinks

    def _kernel(self, kernel: Kernel) -> Kernel:
        return replace(kernel, runs=self.split.runs[self.call.comm.rank % self.size])

    def _mine(self, per_head: Tensor) -> Tensor:
        start, stop = self.split.q[self.call.comm.rank % self.size]
        return per_head[start:stop]


# -- all-gather ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllGather:
    """All keys on every rank, a few K/V heads at a time."""

    call: Call
    keeps_inputs: ClassVar[bool] = True

    def extra(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return []

    def __post_init__(self) -> None:
        self.groups(backward=True)  # bad strides raise before anything is sent

    def groups(self, backward: bool) -> tuple[tuple[int, int], ...]:
        """The K/V heads of each step."""
        heads, options = self.call.kv_heads, self.call.options
        stride = options.get("heads_k_stride", max(1, heads // 4))
        if stride > heads:
            raise InputError(f"heads_k_stride is {stride} but there are {heads} K/V heads; give at most that many")
        small = stride // 4 or None  # a short start and end where a step is wide enough to be cut
        first = options.get("bwd_head_first_stride", small)
        last = options.get("bwd_head_last_stride", small)
        for name, value in (("bwd_head_first_stride", first), ("bwd_head_last_stride", last)):
            if value is not None and value > stride:
                raise InputError(f"{name} is {value} but heads_k_stride is {stride}; give at most that many")
        if first is not None and last is not None and stride not in (first, last) and first + last > stride:
            raise InputError(
                f"bwd_head_first_stride {first} and bwd_head_last_stride {last} together exceed heads_k_stride "
                f"{stride}; make them smaller"
            )
        return head_groups(heads, stride, first, last) if backward else head_groups(heads, stride)

    def gather(self, device: torch.device) -> Gather:
        table = self.call.plan.layout.table
        return Gather(self.call.comm, table.counts, token_order(table, device), rank_order(table, device))

    @property
    def tasks(self) -> Tasks:
        return tasks_on_all(self.call.plan.mask, self.call.plan.layout.table, self.call.comm.rank)

    def forward(
        self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        result: Partial = allgather_forward(
            kernel, q, k, v, self.tasks, self.gather(q.device), self.groups(backward=False)
        )
        if sinks is not None:
            result.add_sinks(sinks)
        return result.out, result.lse, []

    def backward(self, kernel: Kernel, grad_out: Tensor, saved: list[Tensor], sinks: Tensor | None) -> Grads:
        q, k, v, out, lse = saved
        dsinks = None if sinks is None else sinks_gradient(sinks, grad_out, out, lse)
        grads = allgather_backward(
            kernel, grad_out, q, k, v, out, lse, self.tasks, self.gather(q.device), self.groups(backward=True)
        )
        return *grads, dsinks


# -- group-cast ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupCast:
    """Only the keys that are needed, in stages."""

    call: Call
    keeps_inputs: ClassVar[bool] = True

    @cached_property
    def cast(self) -> Cast:
        plan = self.call.plan
        return cast(plan.mask, plan.layout.table, self.call.comm.rank, self.call.options.get("stages", plan.stages))

    @property
    def keep_kv(self) -> bool:
        return bool(self.call.options.get("keep_kv", self.call.plan.keep_kv))

    def stages(self, device: torch.device) -> tuple[Tasks, list[Stage]]:
        own, parts = cast_parts(self.cast)
        stages = []
        for stage, indices, tasks in parts:
            send, order, back = indices.on(device)
            stages.append(Stage(self.call.comm, stage.send_splits, stage.recv_splits, send, order, back, tasks))
        return own, stages

    def extra(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        if not self.keep_kv:
            return []
        dims = (k.shape[1], k.shape[-1] + v.shape[-1])
        return [k.new_empty(sum(stage.recv_splits), *dims) for stage in self.cast.stages]

    def forward(
        self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        result, received = groupcast_forward(kernel, q, k, v, *self.stages(q.device))
        if sinks is not None:
            result.add_sinks(sinks)
        return result.out, result.lse, received if self.keep_kv else []

    def backward(self, kernel: Kernel, grad_out: Tensor, saved: list[Tensor], sinks: Tensor | None) -> Grads:
        q, k, v, out, lse, *received = saved
        dsinks = None if sinks is None else sinks_gradient(sinks, grad_out, out, lse)
        grads = groupcast_backward(kernel, grad_out, q, k, v, out, lse, *self.stages(q.device), received=received)
        return *grads, dsinks


_STRATEGIES: dict[str, tuple[Callable[[Call], Strategy], tuple[str, ...]]] = {
    "groupcast": (GroupCast, ("stages", "keep_kv", "return_lse")),
    "ring": (RingOfHeads, ("ulysses_size", "return_lse")),
    "ulysses": (RingOfHeads, ("ulysses_size", "return_lse")),
    "allgather": (AllGather, ("heads_k_stride", "bwd_head_first_stride", "bwd_head_last_stride", "return_lse")),
}


# -- made once per plan and rank -----------------------------------------------------------------------


@lru_cache(maxsize=256)
def tasks_by_source(mask: Mask, table: SpanTable, rank: int) -> tuple[Tasks, ...]:
    return tuple(Tasks(rows) for rows in work_by_source(mask, table, rank))


@lru_cache(maxsize=256)
def tasks_on_all(mask: Mask, table: SpanTable, rank: int) -> Tasks:
    return Tasks(work_on_all(mask, table, rank))


def block_order(table: SpanTable, ranks: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens of some ranks: from rank after rank to token order, and back."""
    order, back = _block_indices(table, ranks).on(device)
    return order, back


@lru_cache(maxsize=16)
def _block_indices(table: SpanTable, ranks: tuple[int, ...]) -> Indices:
    layout = Layout(table)
    order = np.argsort(np.concatenate([layout.indices(rank) for rank in ranks]))
    return Indices(order, np.argsort(order))


@lru_cache(maxsize=16)
def cast_parts(schedule: Cast) -> tuple[Tasks, tuple[tuple[CastStage, Indices, Tasks], ...]]:
    """A schedule with the tasks of its stages, and their indices: sending order, arrival to token order, and back."""
    parts = [
        (stage, Indices(stage.send_index, stage.order, np.argsort(stage.order)), Tasks(stage.rows))
        for stage in schedule.stages
    ]
    return Tasks(schedule.own), tuple(parts)
