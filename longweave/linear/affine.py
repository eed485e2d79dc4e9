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
each peer, its rows of states, then its rows of transitions, in float32 (float64 for float64 inputs).

                 own rows            received rows
    U or C   [ HEAD MID ... | from rank 0, from rank 1, ... ]        (rows, H, K, V)
    M        [ MID ...      | from rank 0, from rank 1, ... ]        (rows, H, K, K), (K, 1), (1, 1), or None
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longweave.comm.exchange import Comm, Pending, all_to_all_v, done
from longweave.kernels.recurrence.chunks import ChunkTable, chunk_table
from longweave.kernels.recurrence.factors import ChunkedInputs
from longweave.kernels.recurrence.mixer import Kind, Mixer, times, transition_shape
from longweave.kernels.recurrence.scan import Run, backward_run, backward_summary, run, summary
from longweave.plan.chains import ChainStep, Messages, rank_chains
from longweave.plan.fragments import Fragments, Role
from longweave.tensors import Indices

# Factors that one stage makes for the next are kept up to this size; beyond it they are made twice.
KEEP_BYTES = 1 << 30


class Segments:
    """Spans of local tokens, each with a state of its own, and their chunk table on each type of device."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.spans = tuple(spans)
        self._tables: dict[str, ChunkTable] = {}

    def table(self, device: torch.device) -> ChunkTable:
        if device.type not in self._tables:
            self._tables[device.type] = chunk_table(self.spans, device=device.type)
        return self._tables[device.type]


class Chains:
    """The chains of a layout seen from one rank: its fragments by role, what it sends, and the walks along them."""

    def __init__(self, fragments: Fragments, comm: Comm) -> None:
        self.comm = comm
        chains = rank_chains(fragments, comm.rank)
        self.segments = {role: Segments(chains.spans[role]) for role in Role}
        self.forward = _Direction(chains.forward, chains.forward_steps, comm, chains.communicates)
        self.backward = _Direction(chains.backward, chains.backward_steps, comm, chains.communicates)


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
        ctx.mixer, ctx.chains = mixer, chains
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
        with torch.autocast(d_out.device.type, enabled=False):
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


# -- rows between ranks, and the walk along the chains -------------------------------------------------


@dataclass(frozen=True)
class Summaries:
    """States (rows, H, K, V) and transitions (rows, H, …) that a rank knows; None where the kind has none."""

    states: Tensor
    transitions: Tensor | None


class _Direction:
    """Messages and steps of one rank along its chains, forward or back, with their index tensors."""

    def __init__(self, messages: Messages, steps: Sequence[ChainStep], comm: Comm, communicates: bool) -> None:
        self.messages, self.comm, self.communicates = messages, comm, communicates
        self._sent = Indices(*messages.send_states, *messages.send_transitions)
        self._steps = [Indices(step.states, step.transitions, step.of, step.into) for step in steps]

    def exchange(self, own: Summaries) -> Pending[Summaries]:
        """Own rows followed by those of others, once they have arrived."""
        if not self.communicates:
            return done(own)
        messages, states, transitions = self.messages, own.states, own.transitions
        index, peers = self._sent.on(states.device), len(messages.send_states)
        transition_size = 0 if transitions is None else _size(transitions)
        send_splits, recv_splits = messages.splits(_size(states), transition_size)
        parts: list[Tensor] = []
        for state_rows, transition_rows in zip(index[:peers], index[peers:], strict=True):
            parts.append(states.index_select(0, state_rows).flatten())
            if transitions is not None:
                parts.append(transitions.index_select(0, transition_rows).flatten())
        pending = all_to_all_v(torch.cat(parts), send_splits, recv_splits, self.comm)

        def unpack() -> Summaries:
            found, found_transitions = [states], [] if transitions is None else [transitions]
            arrived = torch.split(pending.wait(), recv_splits)
            counts = zip(arrived, messages.recv_states, messages.recv_transitions, strict=True)
            for message, state_count, transition_count in counts:
                cut = state_count * _size(states)
                found.append(message[:cut].view(state_count, *states.shape[1:]))
                if transitions is not None:
                    found_transitions.append(message[cut:].view(transition_count, *transitions.shape[1:]))
            return Summaries(torch.cat(found), torch.cat(found_transitions) if found_transitions else None)

        return Pending((), unpack)

    def walk(self, kind: Kind, rows: Summaries, waiting: int, *, transposed: bool = False) -> Tensor:
        """The state that each of the `waiting` fragments of this rank receives: (waiting, H, K, V)."""
        arriving = rows.states.new_empty((waiting, *rows.states.shape[1:]))
        S = rows.states[:0]
        for number, step in enumerate(self._steps):
            which_states, which_transitions, of, into = step.on(S.device)
            gained = rows.states.index_select(0, which_states)
            if number:
                M = None if rows.transitions is None else rows.transitions.index_select(0, which_transitions)
                gained += times(kind, M, S[: len(gained)], transposed=transposed)
            S = gained
            arriving.index_copy_(0, into, S.index_select(0, of))
        return arriving


def _size(rows: Tensor) -> int:
    """Elements of one row."""
    return prod(rows.shape[1:])
