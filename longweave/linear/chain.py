"""Rows of states and maps between ranks, and the walk along the chains that turns them into arriving states.

                 own rows            received rows
    U or C   [ HEAD MID ... | from rank 0, from rank 1, ... ]        (rows, H, K, V)
    M        [ MID ...      | from rank 0, from rank 1, ... ]        (rows, H, K, K), (K, 1), (1, 1), or None

One message to each peer: its rows of states, then its rows of maps, in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from longweave.comm.exchange import Pending, all_to_all_v, done
from longweave.comm.groups import Comm
from longweave.kernels.affine import Kind, times
from longweave.kernels.index import Indices
from longweave.plan.chains import Messages, Step


@dataclass(frozen=True)
class Rows:
    """States (rows, H, K, V) and maps (rows, H, …) that a rank knows; `maps` is None where the kind has none."""

    states: Tensor
    maps: Tensor | None


def exchange(own: Rows, messages: Messages, comm: Comm, *, communicates: bool) -> Pending[Rows]:
    """Own rows followed by those of others, once they have arrived."""
    if not communicates:
        return done(own)
    states, maps = own.states, own.maps
    map_size = 0 if maps is None else _size(maps)
    send_splits, recv_splits = messages.splits(_size(states), map_size)
    parts: list[Tensor] = []
    for state_rows, map_rows in zip(*_sent(messages, states.device), strict=True):
        parts.append(states.index_select(0, state_rows).flatten())
        if maps is not None:
            parts.append(maps.index_select(0, map_rows).flatten())
    pending = all_to_all_v(torch.cat(parts), send_splits, recv_splits, comm)

    def unpack() -> Rows:
        found_states, found_maps = [states], [] if maps is None else [maps]
        arrived = torch.split(pending.wait(), recv_splits)
        for message, state_count, map_count in zip(arrived, messages.recv_states, messages.recv_maps, strict=True):
            cut = state_count * _size(states)
            found_states.append(message[:cut].view(state_count, *states.shape[1:]))
            if maps is not None:
                found_maps.append(message[cut:].view(map_count, *maps.shape[1:]))
        return Rows(torch.cat(found_states), torch.cat(found_maps) if found_maps else None)

    return Pending((), unpack)


def walk(kind: Kind, rows: Rows, steps: Sequence[Step], waiting: int, *, transposed: bool = False) -> Tensor:
    """The state that each of the `waiting` fragments of this rank receives: (waiting, H, K, V)."""
    arriving = rows.states.new_empty((waiting, *rows.states.shape[1:]))
    S = rows.states[:0]
    for number, step in enumerate(steps):
        which_states, which_maps, of, into = _indices(step).on(S.device)
        gained = rows.states.index_select(0, which_states)
        if number:
            M = None if rows.maps is None else rows.maps.index_select(0, which_maps)
            gained += times(kind, M, S[: len(gained)], transposed=transposed)
        S = gained
        arriving.index_copy_(0, into, S.index_select(0, of))
    return arriving


def _size(rows: Tensor) -> int:
    """Elements of one row."""
    return prod(rows.shape[1:])


# Plans are cached, so these keys live as long as what they stand for.


@lru_cache(maxsize=4096)
def _indices(step: Step) -> Indices:
    return Indices(step.states, step.maps, step.of, step.into)


@lru_cache(maxsize=256)
def _message_indices(messages: Messages) -> Indices:
    return Indices(*messages.send_states, *messages.send_maps)


def _sent(messages: Messages, device: torch.device) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Own rows of states and of maps for each peer."""
    index, peers = _message_indices(messages).on(device), len(messages.send_states)
    return index[:peers], index[peers:]
