"""A mixer over the segments of one rank, as one differentiable operation: `run` forward, `backward_run`
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longweave.kernels.chunks import ChunkTable
from longweave.kernels.mixer import Mixer
from longweave.kernels.prepared import Prepared
from longweave.kernels.scan import backward_run, run


def mix(
    mixer: Mixer,
    inputs: Sequence[Tensor],
    table: ChunkTable,
    initial_state: Tensor | None = None,
    *,
    want_final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs (tokens, H, V) and, if wanted, final states (segments, H, K, V) in float32 or float64."""
    out, final = _Mix.apply(mixer, table, want_final, initial_state, *inputs)  # type: ignore[no-untyped-call]
    return out, final


class _Mix(torch.autograd.Function):
    """Keeps the inputs and the state at every block border."""

    @staticmethod
    def forward(
        ctx: Any,
        mixer: Mixer,
        table: ChunkTable,
        want_final: bool,
        initial_state: Tensor | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        done = run(
            Prepared(mixer, inputs, table),
            initial_state,
            want_final=want_final,
            want_states=any(ctx.needs_input_grad),
        )
        ctx.mixer, ctx.table, ctx.count = mixer, table, len(inputs)
        ctx.state_dtype = None if initial_state is None else initial_state.dtype
        ctx.save_for_backward(*inputs, *done.states)
        ctx.set_materialize_grads(False)
        return done.out, done.final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, states = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        prepared = Prepared(ctx.mixer, inputs, ctx.table, pullbacks=True)
        if d_out is None:
            H, _, V = prepared.state_shape
            d_out = inputs[0].new_zeros((len(inputs[0]), H, V))
        grads, d_initial = backward_run(prepared, states, d_out, d_final)
        d_state = None if ctx.state_dtype is None else d_initial.to(ctx.state_dtype)
        return (None, None, None, d_state, *grads)
