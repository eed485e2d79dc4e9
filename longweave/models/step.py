"""What the layers of a model need to know about the batch that passes through them.

A `Step` travels in the call: `batch.inputs` holds it under the name `longweave`, and models hand it down with their
other keyword arguments. Where a model drops them, the context variable serves: the model's own forward sets it while it
runs. It is never left set, so a model that is called without a batch is found out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longweave.comm.groups import Group, resolve
from longweave.errors import InputError
from longweave.plan.estimate import CPU
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints
from longweave.plan.schedule import Plan, make_plan

KEY = "longweave"


def outside_graphs(fn: Any) -> Any:
    """The function as it is, for torch.compile to step around."""
    return torch.compiler.disable(fn)  # type: ignore[no-untyped-call]


class Step:
    """One batch seen from the layers: who holds which token, on which group, and the plans, made when first asked for.

    A rank with no tokens carries one placeholder token through the model, because most models cannot reshape empty
    tensors. `enter` removes it in front of every operator across ranks and `leave` puts it back, with the value 0.
    """

    def __init__(
        self,
        cu_seqlens: Ints,
        layout: Layout,
        group: Group,
        strategy: str = "auto",
        method: str = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        comm = resolve(group)
        self.cu_seqlens, self.layout, self.group = cu_seqlens, layout, group
        self.strategy, self.method, self.options = strategy, method, dict(options or {})
        self.rank, self.world_size = comm.rank, comm.size
        self.tokens = layout.counts[comm.rank]
        self._longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max(initial=0))
        self.plans: dict[tuple[object, ...], Plan] = {}

    def plan(self, window: int | None = None, **shape: int) -> Plan:
        """The plan for causal attention, or for a sliding window. All plans of a batch share its layout.

        `shape` (heads, kv_heads, head_dim, v_dim, itemsize, on_cpu) is for the cost model that chooses the strategy.
        """
        if window is not None and window >= self._longest:
            window = None  # nobody can look back further than a document
        plan: Plan = _plan(self, window, shape)
        return plan

    def enter(self, x: Tensor) -> Tensor:
        """(1, tokens, …) as a model has it → (tokens, …) as operators across ranks take it."""
        if x.shape[0] != 1 or x.shape[1] != max(self.tokens, 1):
            raise InputError(
                f"a layer was called with a tensor of shape {tuple(x.shape)}, but this rank's batch has the shape "
                f"(1, {max(self.tokens, 1)}, …); call the model with batch.inputs unchanged"
            )
        return x[0, : self.tokens]

    def leave(self, y: Tensor) -> Tensor:
        """The way back."""
        if self.tokens == 0:
            y = F.pad(y, (0, 0) * (y.ndim - 1) + (0, 1))
        return y[None]

    def __repr__(self) -> str:
        return f"<Step: rank {self.rank} of {self.world_size}, {self.tokens} of {self.layout.total} tokens>"


@outside_graphs
def _plan(step: Step, window: int | None, shape: dict[str, int]) -> Plan:
    key = (window, *sorted(shape.items()))
    if key not in step.plans:
        cu = step.cu_seqlens
        mask = Mask.causal(cu) if window is None else Mask.sliding_window(cu, window)
        sizes = {name: value for name, value in shape.items() if name != "on_cpu"}
        machine = CPU if shape.get("on_cpu") else None
        step.plans[key] = make_plan(mask, step.layout, step.strategy, machine=machine, **sizes)
    return step.plans[key]


_current: ContextVar[Step | None] = ContextVar("longweave_step", default=None)


def find(kwargs: Mapping[str, Any]) -> Step:
    """The step of this call: from the call itself, else from the model's forward that is running."""
    step = kwargs.get(KEY) or _current.get()
    if step is None:
        raise InputError(
            "this model is parallel but was called without a batch; call model(**batch.inputs) with "
            "batch = lw.shard_batch(...), or lw.restore(model) first to use it in one process (generate, a KV cache)"
        )
    if not isinstance(step, Step):
        raise InputError(f"the argument {KEY!r} is a {type(step).__name__}; it belongs to lw.shard_batch(...).inputs")
    return step


@contextmanager
def running(step: Step) -> Iterator[None]:
    """While a model's forward, or a recomputation of a part of it, runs on this step."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def rerun(step: Step, fn: Any, *args: Any) -> Any:
    """Call `fn` with `step` as the running one: what a checkpointed layer does when backward computes it again."""
    with running(step):
        return fn(*args)
