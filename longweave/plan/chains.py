"""What travels so that every fragment learns the state that enters it, and how the states are then put together.

A fragment takes the state S that enters it to M·S + U: its summary, M its transition, U its state. Along a chain
(HEAD, MID, MID, LAST):

    forward        U₀ ──▶ M₁·+U₁ ──▶ M₂·+U₂ ──▶ (nobody asks for the last one's)
    backward                 M₁ᵀ·+C₁ ◀── M₂ᵀ·+C₂ ◀── C₃

    forward    U of all but the last goes to every rank that holds a later fragment of the document
               M of those between goes to every other rank that holds any: later ones need it now, earlier ones then
    backward   C of all but the first goes to every rank that holds an earlier fragment

Documents on one rank send nothing, and how many rows travel depends on the fragments, never on their tokens. In a
message to a peer the rows of U come first, then those of M, both in token order: both sides agree without talking.

With all rows at hand a rank walks its chains from their start up to its own last fragment, all chains side by side:
step t takes the state of every chain that is still going past the chain's fragment number t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longweave.plan.fragments import Fragments, Role
from longweave.plan.ranges import Ints, ramp

PerPeer = tuple[Ints, ...]
Wanted = Callable[[Ints, Ints], npt.NDArray[np.bool_]]  # (fragment rows, holder rows) -> does the holder need it


@dataclass(frozen=True, eq=False)
class Messages:
    """Rows for each peer and from each peer. Sent rows index own rows of that kind, as ordered in `RankChains`."""

    send_states: PerPeer
    send_transitions: PerPeer
    recv_states: tuple[int, ...]
    recv_transitions: tuple[int, ...]

    def splits(self, state_size: int, transition_size: int) -> tuple[list[int], list[int]]:
        """Elements to and from each peer."""
        sends = zip(self.send_states, self.send_transitions, strict=True)
        receives = zip(self.recv_states, self.recv_transitions, strict=True)
        return (
            [len(states) * state_size + len(transitions) * transition_size for states, transitions in sends],
            [states * state_size + transitions * transition_size for states, transitions in receives],
        )


@dataclass(frozen=True, eq=False)
class ChainStep:
    """All chains that are still going take one fragment. Indices count own rows first, then received ones."""

    states: Ints  # the row of U (or C) of each chain
    transitions: Ints  # the row of M; empty in the first step, where the state is zero
    of: Ints  # chains whose next fragment is ours …
    into: Ints  # … and which of our waiting fragments that is


@dataclass(frozen=True, eq=False)
class RankChains:
    """One rank's part: local tokens of its fragments by role, messages and walks.

    Own rows: of U, HEAD then MID; of M, MID; of C, MID then LAST. Waiting fragments: forward, MID then LAST; backward,
    HEAD then MID.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...]  # local tokens, for each role
    forward: Messages
    backward: Messages
    forward_steps: tuple[ChainStep, ...]
    backward_steps: tuple[ChainStep, ...]
    communicates: bool


def sent_rows(fragments: Fragments) -> tuple[Ints, Ints, Ints]:
    """How many rows of U, M and C each rank sends: (ranks,) each. In closed form, without any routing."""
    later, earlier, others = _receivers(fragments)
    transitions = np.where(fragments.roles == Role.MID, others, 0)
    by_rank = [
        np.bincount(fragments.ranks, weights=count, minlength=fragments.world_size)
        for count in (later, transitions, earlier)
    ]
    states, middle, gradients = (count.astype(np.int64) for count in by_rank)
    return states, middle, gradients


def sent_bytes(fragments: Fragments, state_size: int, transition_size: int, itemsize: int = 4) -> tuple[Ints, Ints]:
    """Bytes that each rank sends forward and backward; a state has `state_size` = heads · K · V elements."""
    states, transitions, gradients = sent_rows(fragments)
    return (states * state_size + transitions * transition_size) * itemsize, gradients * state_size * itemsize


def _receivers(f: Fragments) -> tuple[Ints, Ints, Ints]:
    """For every fragment: other ranks that hold a later one of its chain, an earlier one, any."""
    holders = f.holders
    chain_end = np.int64(len(f.starts) + 1)  # larger than any position
    begin = np.searchsorted(holders.documents, f.documents, side="left")
    end = np.searchsorted(holders.documents, f.documents, side="right")
    here = f.documents * chain_end + f.positions
    ends_later = end - np.searchsorted(np.sort(holders.documents * chain_end + holders.last), here, side="right")
    begins_earlier = np.searchsorted(np.sort(holders.documents * chain_end + holders.first), here, side="left") - begin
    own = np.searchsorted(holders.documents * f.world_size + holders.ranks, f.documents * f.world_size + f.ranks)
    return (
        ends_later - (holders.last[own] > f.positions),
        begins_earlier - (holders.first[own] < f.positions),
        end - begin - 1,
    )


def rank_chains(fragments: Fragments, rank: int) -> RankChains:
    """The part of `rank`."""
    f = fragments
    mine = f.rows_of(rank)
    by_role = {role: mine[f.roles[mine] == role] for role in Role}
    head, mid, last = by_role[Role.HEAD], by_role[Role.MID], by_role[Role.LAST]
    is_mid = f.roles == Role.MID
    forward = _Mail(f, rank, np.append(head, mid), mid)
    forward.state(lambda row, holder: f.holders.last[holder] > f.positions[row])
    forward.transition(is_mid)
    backward = _Mail(f, rank, np.append(mid, last), mid)
    backward.state(lambda row, holder: f.holders.first[holder] < f.positions[row])
    transition_slots = forward.transition_slots
    return RankChains(
        tuple(_local_spans(f, by_role[role]) for role in Role),
        forward.messages(),
        backward.messages(),
        _walk(f, rank, +1, np.append(mid, last), forward.state_slots, transition_slots),
        _walk(f, rank, -1, np.append(head, mid), backward.state_slots, transition_slots),
        f.communicates,
    )


def _local_spans(f: Fragments, rows: Ints) -> tuple[tuple[int, int], ...]:
    starts = f.local_starts[rows]
    return tuple(zip(starts.tolist(), (starts + f.stops[rows] - f.starts[rows]).tolist(), strict=True))


class _Mail:
    """Sends and receives of one rank in one direction, and where every row that it then knows is found."""

    def __init__(self, f: Fragments, rank: int, own_states: Ints, own_transitions: Ints) -> None:
        self.f, self.rank = f, rank
        self.state_slots, self.transition_slots = _slots(f, own_states), _slots(f, own_transitions)
        nothing = tuple(np.empty(0, dtype=np.int64) for _ in range(f.world_size))
        self.send_states: PerPeer = nothing
        self.send_transitions: PerPeer = nothing
        self.recv_states = self.recv_transitions = (0,) * f.world_size

    def state(self, wants: Wanted) -> None:
        self.send_states, self.recv_states = self._exchange(wants, self.state_slots)

    def transition(self, travels: npt.NDArray[np.bool_]) -> None:
        self.send_transitions, self.recv_transitions = self._exchange(
            lambda row, holder: travels[row], self.transition_slots
        )

    def _exchange(self, wants: Wanted, slots: Ints) -> tuple[PerPeer, tuple[int, ...]]:
        f, holders = self.f, self.f.holders
        mine = np.sort(f.rows_of(self.rank))
        pair, holder = holders.of_documents(f.documents[mine])
        row, peer = mine[pair], holders.ranks[holder]
        wanted = wants(row, holder) & (peer != self.rank)
        send = tuple(slots[row[wanted & (peer == p)]] for p in range(f.world_size))
        # What I receive: rows of others in my documents that I, as a holder, need.
        as_holder = np.flatnonzero(holders.ranks == self.rank)
        begin = np.searchsorted(f.documents, holders.documents[as_holder], side="left")
        counts = np.searchsorted(f.documents, holders.documents[as_holder], side="right") - begin
        row, holder = np.repeat(begin, counts) + ramp(counts), np.repeat(as_holder, counts)
        row = row[wants(row, holder) & (f.ranks[row] != self.rank)]
        row = row[np.lexsort((row, f.ranks[row]))]
        slots[row] = slots.max(initial=-1) + 1 + np.arange(len(row))
        return send, tuple(np.bincount(f.ranks[row], minlength=f.world_size).tolist())

    def messages(self) -> Messages:
        return Messages(self.send_states, self.send_transitions, self.recv_states, self.recv_transitions)


def _slots(f: Fragments, rows: Ints) -> Ints:
    """Where the row of each fragment is found: own ones first, −1 where it is not known."""
    slots = np.full(len(f.starts), -1, dtype=np.int64)
    slots[rows] = np.arange(len(rows))
    return slots


def _walk(
    f: Fragments, rank: int, way: int, waiting: Ints, state_slots: Ints, transition_slots: Ints
) -> tuple[ChainStep, ...]:
    """From the first fragment of each chain (way +1) or the last (−1) to this rank's farthest one."""
    holders = f.holders
    own = np.flatnonzero(holders.ranks == rank)
    begin = np.searchsorted(f.documents, holders.documents[own], side="left")
    if way > 0:
        origin, steps = begin, holders.last[own]
    else:
        origin = np.searchsorted(f.documents, holders.documents[own], side="right") - 1
        steps = origin - begin - holders.first[own]
    order = np.argsort(-steps, kind="stable")
    origin, steps = origin[order], steps[order]
    place = _slots(f, waiting)
    walk = []
    for step in range(int(steps.max(initial=0))):
        rows = origin[: np.searchsorted(-steps, -step, side="left")] + way * step
        of = np.flatnonzero(f.ranks[rows + way] == rank)
        transitions = transition_slots[rows] if step else rows[:0]
        walk.append(ChainStep(state_slots[rows], transitions, of, place[rows[of] + way]))
    return tuple(walk)
