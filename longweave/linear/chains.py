"""Rows that travel between ranks, and the walk along the chains: what every engine for cut documents shares.

                 own rows            received rows
    U or C   [ HEAD MID ... | from rank 0, from rank 1, ... ]        (rows, H, K, V)
    M        [ MID ...      | from rank 0, from rank 1, ... ]        (rows, H, K, K), (K, 1), (1, 1), or None

A message to a peer holds its rows of states, then its rows of transitions, in float32 (float64 for float64 inputs).
With all rows at hand, a rank walks its chains side by side, one fused multiply-add a step:

    S ← M·S + U     forward, from the first fragment          dS ← Mᵀ·dS + C     backward, from the last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from longweave.comm.exchange import Comm, Pending, all_to_all_v, done
from longweave.kernels.recurrence.mixer import Kind, advanced
from longweave.kernels.recurrence.segments import Segments
from longweave.plan.chains import ChainStep, Messages, rank_chains
from longweave.plan.fragments import Fragments, Role
from longweave.tensors import Indices


class Chains:
    """The chains of a layout seen from one rank: its fragments by role, what it sends, and the walks along them."""

    def __init__(self, fragments: Fragments, comm: Comm) -> None:
        self.comm = comm
        chains = rank_chains(fragments, comm.rank)
        self.segments = {role: Segments(chains.spans[role]) for role in Role}
        self.forward = Direction(chains.forward, chains.forward_steps, comm, chains.communicates)
        self.backward = Direction(chains.backward, chains.backward_steps, comm, chains.communicates)

    @cached_property
    def all(self) -> Selection:
        return Selection(self, tuple(Role))

    @cached_property
    def cut(self) -> Selection:
        return Selection(self, (Role.HEAD, Role.MID, Role.LAST))

    @cached_property
    def sending(self) -> Selection:
        return Selection(self, (Role.HEAD, Role.MID))


class Selection:
    """Fragments of some roles, in the order of their tokens, as the segments of one call."""

    def __init__(self, chains: Chains, roles: Sequence[Role]) -> None:
        found = sorted((*span, role) for role in roles for span in chains.segments[role].spans)
        self.count = len(found)
        self._rows = {role: np.array([i for i, row in enumerate(found) if row[2] == role], np.int64) for role in Role}
        stops = np.cumsum([stop - start for start, stop, _ in found]).tolist()
        self.segments = Segments(tuple(zip([0, *stops], stops, strict=False)))
        self._tokens = np.concatenate([np.arange(start, stop) for start, stop, _ in found] or [np.arange(0)])
        self._gather, self._places = Rows(self._tokens), dict[tuple[Role, ...], Rows]()

    def has(self, *roles: Role) -> bool:
        return any(len(self._rows[role]) for role in roles)

    def take(self, x: Tensor) -> Tensor:
        """Their tokens of x (tokens, …): x itself or a view of it where they lie side by side, else a copy."""
        return self._gather.of(x)

    def rows(self, *roles: Role) -> Rows:
        """Which of the segments have these roles: those of the first role, then those of the second, …"""
        if roles not in self._places:
            self._places[roles] = Rows(np.concatenate([self._rows[role] for role in roles]))
        return self._places[roles]


class Rows:
    """Some rows of a tensor: a view where they are neighbours, else a copy. Decided once, from host integers."""

    def __init__(self, rows: np.ndarray) -> None:
        self.count, self.first = len(rows), int(rows[0]) if len(rows) else 0
        self.neighbours = bool((np.diff(rows) == 1).all())
        self._index = Indices(rows)

    def of(self, x: Tensor) -> Tensor:
        if self.neighbours:
            return x[self.first : self.first + self.count]
        return x.index_select(0, self._index.on(x.device)[0])

    def put(self, x: Tensor, into: Tensor) -> None:
        """x becomes these rows of `into`."""
        if self.neighbours:
            into[self.first : self.first + self.count] = x
        else:
            into.index_copy_(0, self._index.on(into.device)[0], x)


@dataclass(frozen=True)
class Summaries:
    """States (rows, H, K, V) and transitions (rows, H, …) that a rank knows; None where the kind has none."""

    states: Tensor
    transitions: Tensor | None


class Direction:
    """Messages and steps of one rank along its chains, forward or back, with their index tensors."""

    def __init__(self, messages: Messages, steps: Sequence[ChainStep], comm: Comm, communicates: bool) -> None:
        self.messages, self.comm, self.communicates = messages, comm, communicates
        self._sent = [Rows(np.concatenate(rows)) for rows in (messages.send_states, messages.send_transitions)]
        self._steps = [[Rows(rows) for rows in (step.states, step.transitions, step.of, step.into)] for step in steps]

    def exchange(self, own: Summaries) -> Pending[Summaries]:
        """Own rows followed by those of others, once they have arrived."""
        if not self.communicates:
            return done(own)
        messages, states, transitions = self.messages, own.states, own.transitions
        transition_size = 0 if transitions is None else _size(transitions)
        send_splits, recv_splits = messages.splits(_size(states), transition_size)
        sent = [_by_peer(self._sent[0].of(states), messages.send_states)]
        if transitions is not None:
            sent.append(_by_peer(self._sent[1].of(transitions), messages.send_transitions))
        parts = [rows.flatten() for to_peer in zip(*sent, strict=True) for rows in to_peer]
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
        for number, (states, transitions, of, into) in enumerate(self._steps):
            gained = states.of(rows.states)
            if number:
                M = None if rows.transitions is None else transitions.of(rows.transitions)
                gained = advanced(kind, gained, M, S[: len(gained)], transposed=transposed)
            S = gained
            if of.count:
                into.put(of.of(S), arriving)
        return arriving


def _by_peer(rows: Tensor, counts: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
    return torch.split(rows, [len(count) for count in counts])


def _size(rows: Tensor) -> int:
    """Elements of one row."""
    return prod(rows.shape[1:])
