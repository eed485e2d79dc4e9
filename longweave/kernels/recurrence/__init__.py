"""Linear mixers over the segments of one rank: `mix`, one differentiable operation, `run` forward, `backward_run` back.

    mixer.py                            what a mixer says about one chunk: its factors
    chunks.py, factors.py, scan.py      packed segments as chunks, their factors, the scan over them
    delta_rule.py, linear_attention.py  the mixers
    conv.py                             the causal convolution in front of them
    reference.py                        the loop over tokens that all of this is tested against
    segments.py                         packed segments, in the form that each kernel wants
    fla.py, outer.py                    the mixers on flash-linear-attention; fused_conv.py: the convolution on a GPU

A chunk table says where the segments lie. Who mixes a batch in many layers makes it once and keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longweave.errors import InputError
from longweave.kernels.recurrence.chunks import ChunkTable
from longweave.kernels.recurrence.factors import ChunkedInputs
from longweave.kernels.recurrence.mixer import Mixer
from longweave.kernels.recurrence.scan import backward_run, run
from longweave.tensors import check_device, check_tensor


def mix(
    mixer: Mixer,
    inputs: Sequence[Tensor],
    table: ChunkTable,
    initial_state: Tensor | None = None,
    *,
    want_final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Outputs (tokens, H, V) and, if wanted, final states (segments, H, K, V) in float32 (float64 for
    float64). Both are differentiable, also by `initial_state` (segments, H, K, V).
    """
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
            ChunkedInputs(mixer, inputs, table),
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
        saved = ctx.saved_tensors  # asked for once: a checkpoint unpacks only once
        inputs, states = saved[: ctx.count], saved[ctx.count :]
        chunked = ChunkedInputs(ctx.mixer, inputs, ctx.table, pullbacks=True)
        if d_out is None:
            H, _, V = chunked.state_shape
            d_out = inputs[0].new_zeros((len(inputs[0]), H, V))
        grads, d_initial = backward_run(chunked, states, d_out, d_final)
        d_state = None if ctx.state_dtype is None else d_initial.to(ctx.state_dtype)
        return (None, None, None, d_state, *grads)


def check_mixer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    channel_decay: bool = False,
) -> None:
    """Raise InputError unless q, k (tokens, Hk, K), v (tokens, Hv, V), g, beta (tokens, Hv) fit.

    With `channel_decay`, g is (tokens, Hv, K).
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise InputError(f"{name} has shape {tuple(x.shape)}; it must be (tokens, heads, dim)")
    if q.shape != k.shape:
        raise InputError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; they must be equal")
    tokens, Hk, K = k.shape
    Hv = v.shape[1]
    if v.shape[0] != tokens:
        raise InputError(f"v has {v.shape[0]} tokens and k {tokens}; give all inputs the same tokens")
    if Hk == 0 or Hv % Hk:
        raise InputError(f"v has {Hv} heads, which is no multiple of the {Hk} heads of q and k")
    decay_shape = (tokens, Hv, K) if channel_decay else (tokens, Hv)
    for name, gate, shape in (("g", g, decay_shape), ("beta", beta, (tokens, Hv))):
        if gate is not None and tuple(gate.shape) != shape:
            raise InputError(f"{name} has shape {tuple(gate.shape)}; with these q, k, v it must be {shape}")
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):  # type: ignore[assignment]
        if x is not None:
            check_tensor(name, x, floating=True)
            check_device(name, x, "q", q)
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; cast them to one dtype")
