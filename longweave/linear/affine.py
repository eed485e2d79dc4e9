"""Any linear mixer over any layout: fragments are summed up, summaries travel, every fragment runs with its true state.

    one document, zigzag on 2 ranks              rank 0: HEAD and LAST          rank 1: MID
                                                 ╎                              ╎
    what others wait for                         run HEAD: outputs, U           summary of MID: M, U
    exchange starts                              U ───────────────────────────▶
                                                   ◀─────────────────────────── M, U
    while it is in flight                        documents that lie here whole, factors of what comes next
    states arrive                                S = M·U₀ + U₁                  S = U₀
    the rest                                     run LAST from S                run MID from S

Backward is the mirror image: LAST runs at once, MID gives its C, C's travel, HEAD and MID run with the gradient of
their last state. M was kept by forward, so only C travels. What travels does not grow with the sequence: one message to
each peer, see `chains.py`.

This is the engine that runs everywhere, in torch: stages of `kernels/recurrence/scan.py` in one autograd Function. The
other one, on fused kernels, is `fused_mix.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longweave.comm.ledger import call_of
from longweave.kernels.recurrence.factors import ChunkedInputs
from longweave.kernels.recurrence.mixer import Mixer, transition_shape
from longweave.kernels.recurrence.scan import Run, backward_run, backward_summary, run, summary
from longweave.linear.chains import Chains, Summaries
from longweave.plan.fragments import Role

# Factors that one stage makes for the next are kept up to this size; beyond it they are made twice.
KEEP_BYTES = 1 << 30


def affine_mix(mixer: Mixer, inputs: Sequence[Tensor], chains: Chains) -> Tensor:
    """Outputs (tokens, H, V) of this rank's tokens. Every rank of the group must call it."""
    out: Tensor = _AffineMix.apply(mixer, chains, *inputs)  # type: ignore[no-untyped-call]
    return out


class _AffineMix(torch.autograd.Function):
    """Keeps the inputs, states at block borders, and the transitions of the chains that pass here."""

    @staticmethod
    def forward(ctx: Any, mixer: Mixer, chains: Chains, *inputs: Tensor) -> Tensor:
        with torch.autocast(inputs[0].device.type, enabled=False):
            out, runs, transitions = _forward(mixer, chains, inputs, want_states=any(ctx.needs_input_grad))
        ctx.mixer, ctx.chains, ctx.call = mixer, chains, call_of(chains.comm.ledger, "linear attention")
        ctx.sizes = [len(inputs), *(len(runs[role].states) for role in Role)]
        ctx.save_for_backward(*inputs, *(state for role in Role for state in runs[role].states), transitions)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *saved, transitions = ctx.saved_tensors
        parts = []
        for size in ctx.sizes:
            parts.append(saved[:size])
            saved = saved[size:]
        inputs, *by_role = parts
        states = dict(zip(Role, by_role, strict=True))
        with ctx.call.backward(), torch.autocast(d_out.device.type, enabled=False):
            grads = _backward(ctx.mixer, ctx.chains, tuple(inputs), states, transitions, d_out)
        return None, None, *grads


def _forward(
    mixer: Mixer, chains: Chains, inputs: tuple[Tensor, ...], *, want_states: bool
) -> tuple[Tensor, dict[Role, Run], Tensor | None]:
    """Outputs, what each role keeps for backward, and the transitions of the chains."""
    parts = _parts(mixer, chains, inputs)
    head, mid, last = parts[Role.HEAD], parts[Role.MID], parts[Role.LAST]
    H, _, V = head.state_shape
    out = inputs[0].new_empty((len(inputs[0]), H, V))
    runs = {Role.HEAD: run(head, out=out, want_states=want_states)}
    U, M = summary(mid)
    own = Summaries(torch.cat([_final_states(runs[Role.HEAD]), U]), _transitions(mixer, M, U))
    arriving = chains.forward.exchange(own)

    runs[Role.WHOLE] = run(parts[Role.WHOLE], out=out, want_final=False, want_states=want_states)
    _solve_ahead(last)

    rows = arriving.wait()
    S = chains.forward.walk(mixer.kind, rows, _count(mid, last))
    S_mid, S_last = torch.split(S, [_count(mid), _count(last)])
    runs[Role.MID] = run(mid, S_mid, out=out, want_final=False, want_states=want_states)
    runs[Role.LAST] = run(last, S_last, out=out, want_final=False, want_states=want_states)
    return out, runs, rows.transitions


def _backward(
    mixer: Mixer,
    chains: Chains,
    inputs: tuple[Tensor, ...],
    states: dict[Role, list[Tensor | None]],
    transitions: Tensor | None,
    d_out: Tensor,
) -> Sequence[Tensor]:
    parts = _parts(mixer, chains, inputs, pullbacks=True)
    head, mid, last = parts[Role.HEAD], parts[Role.MID], parts[Role.LAST]
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    _, C_last = backward_run(last, states[Role.LAST], d_out, grads=grads)
    C = torch.cat([backward_summary(mid, d_out), C_last])
    arriving = chains.backward.exchange(Summaries(C, None))

    backward_run(parts[Role.WHOLE], states[Role.WHOLE], d_out, grads=grads)
    _solve_ahead(head)

    rows = Summaries(arriving.wait().states, transitions)
    dS = chains.backward.walk(mixer.kind, rows, _count(head, mid), transposed=True)
    dS_head, dS_mid = torch.split(dS, [_count(head), _count(mid)])
    backward_run(head, states[Role.HEAD], d_out, dS_head, grads=grads)
    backward_run(mid, states[Role.MID], d_out, dS_mid, grads=grads)
    return grads


def _parts(
    mixer: Mixer, chains: Chains, inputs: tuple[Tensor, ...], *, pullbacks: bool = False
) -> dict[Role, ChunkedInputs]:
    """The fragments of each role. MID is used by two stages; what runs last is solved during the exchange."""
    twice = {Role.MID, Role.HEAD if pullbacks else Role.LAST}
    parts = {}
    for role in Role:
        part = ChunkedInputs(mixer, inputs, chains.segments[role].table(inputs[0].device), pullbacks=pullbacks)
        part.keep = role in twice and _factor_bytes(part) <= KEEP_BYTES
        parts[role] = part
    return parts


def _factor_bytes(part: ChunkedInputs) -> int:
    """About what the factors of all blocks take."""
    H, K, V = part.state_shape
    chunk = part.table.chunk
    per_token = 3 * K + 2 * V + 3 * chunk
    return int(part.table.lengths.sum()) * H * per_token * (2 if part.pullbacks else 1) * part.dtype.itemsize


def _solve_ahead(part: ChunkedInputs) -> None:
    """Make the factors of a part that will run when states have arrived."""
    if part.keep:
        with torch.no_grad():
            for number in range(len(part.blocks)):
                part.solve(number)


def _count(*parts: ChunkedInputs) -> int:
    return sum(len(part.table.spans) for part in parts)


def _final_states(made: Run) -> Tensor:
    assert made.final_state is not None
    return made.final_state


def _transitions(mixer: Mixer, M: Tensor | None, U: Tensor) -> Tensor | None:
    """Own rows of M, also when there are none: others may send some."""
    shape = transition_shape(mixer.kind, U.shape[2])
    if M is None and shape is not None:
        return U.new_empty((0, U.shape[1], *shape))
    return M
