"""Cut documents on fused kernels (flash-linear-attention), in two calls forward and one back, whatever the roles.

    forward    1. sum up what is cut        U, M of every fragment, and what its tokens read of a state: r
                  exchange, walk            the state S that enters each fragment                        (`chains.py`)
               2. run all tokens from S     outputs and last states: an ordinary differentiable call

    backward      C = Σ r_t dO_tᵀ           one more launch; nothing of the run is needed
                  exchange, walk            the gradient dS of each fragment's last state
               2. backward of the run       from dO and dS: all gradients of the inputs

The run is a node of autograd's graph as the library made it, so that checkpointing and hooks on saved tensors see it as
they see any other. Behind it stands one node of ours, which changes nothing forward; backward it comes first, and hands
the run the dS that it asks for:

    inputs ──▶ run(S) ──┬── outputs ────▶ _PassBack ──▶ outputs
                        └── last states ─▶

Nothing is computed while summaries travel: they are small, and a third call would cost more than it hides.
Besides what the run keeps, r is kept: K numbers per token and head in the dtype of q (for decays per head: one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longweave.comm.ledger import call_of
from longweave.kernels.recurrence import fla
from longweave.kernels.recurrence.mixer import Kind, Mixer, transition_shape
from longweave.linear.chains import Chains, Selection, Summaries
from longweave.plan.fragments import Role

HEAD, MID, LAST = Role.HEAD, Role.MID, Role.LAST


def fused_mix(mixer: Mixer, inputs: Sequence[Tensor], chains: Chains) -> Tensor:
    """Outputs (tokens, H, V) of this rank's tokens. Every rank of the group must call it."""
    inputs = [x.contiguous() for x in inputs]  # as the kernels want them: once for both calls
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    everything = chains.all
    with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        summed = chains.cut if trained else chains.sending
        rows, reads = _sum_up(mixer, inputs, chains, summed, want_reads=trained)
        initial = _entering(chains, mixer.kind, rows)
    out, final = fla.run(mixer, inputs, everything.segments, initial, want_final=trained and everything.has(HEAD, MID))
    if trained:
        way = _Way(chains, summed, mixer.kind, rows.states.shape[1:], 1.0 if reads is None else reads.scale)
        x, weight = (None, None) if reads is None else reads[:2]
        out = _PassBack.apply(way, out, final, rows.transitions, x, weight)  # type: ignore[no-untyped-call]
    return out.squeeze(0)


def _sum_up(
    mixer: Mixer, inputs: Sequence[Tensor], chains: Chains, summed: Selection, *, want_reads: bool
) -> tuple[Summaries, fla.Reads | None]:
    """All rows that this rank needs, and what the tokens of `summed` read."""
    taken = [summed.take(x) for x in inputs]
    wanted = {"want_M": summed.has(MID), "want_reads": want_reads and summed.has(MID, LAST)}
    U, M, reads = fla.summarize(mixer, taken, summed.segments, **wanted)
    shape = transition_shape(mixer.kind, U.shape[2])
    transitions = None
    if shape is not None:
        transitions = U.new_empty((0, U.shape[1], *shape)) if M is None else summed.rows(MID).of(M)
    own = Summaries(summed.rows(HEAD, MID).of(U), transitions)
    return chains.forward.exchange(own).wait(), reads


def _entering(chains: Chains, kind: Kind, rows: Summaries) -> Tensor | None:
    """The state at the start of every fragment of this rank; None if all are zero."""
    waiting = chains.all.rows(MID, LAST)
    S = chains.forward.walk(kind, rows, waiting.count)
    if not waiting.count:
        return None
    initial = S.new_zeros((chains.all.count, *S.shape[1:]))
    waiting.put(S, initial)
    return initial


@dataclass(frozen=True)
class _Way:
    """What backward needs besides tensors."""

    chains: Chains
    summed: Selection
    kind: Kind
    state_shape: tuple[int, ...]
    scale: float


class _PassBack(torch.autograd.Function):
    """Outputs as they are; backward finds the gradients of last states, which the run before it then receives."""

    @staticmethod
    def forward(ctx: Any, way: _Way, out: Tensor, final: Tensor | None, *kept: Tensor | None) -> Tensor:
        ctx.way, ctx.leaves = way, final is not None
        ctx.call = call_of(way.chains.comm.ledger, "linear attention")
        # One that is there on every rank: reading it makes checkpointing recompute, and that is a collective.
        ctx.save_for_backward(out.new_empty(0), *kept)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        way, chains, summed = ctx.way, ctx.way.chains, ctx.way.summed
        _, transitions, x, weight = ctx.saved_tensors
        with ctx.call.backward(), torch.autocast(d_out.device.type, enabled=False):
            C = torch.zeros((0, *way.state_shape), dtype=torch.float32, device=d_out.device)
            if x is not None:
                reads = fla.Reads(x, weight, way.scale)
                C = fla.reads_gradient(reads, summed.take(d_out.squeeze(0)), summed.segments)
                C = summed.rows(MID, LAST).of(C)
            rows = Summaries(chains.backward.exchange(Summaries(C, None)).wait().states, transitions)
            waiting = chains.all.rows(HEAD, MID)
            dS = chains.backward.walk(way.kind, rows, waiting.count, transposed=True)
            d_final = None
            if ctx.leaves:
                d_final = dS.new_zeros((chains.all.count, *way.state_shape))
                waiting.put(dS, d_final)
        return None, d_out, d_final, None, None, None
