"""Rows of states and maps between ranks, and the walk along the chains that turns them into arriving states.

                 own rows            received rows
    U or C   [ HEAD MID ... | from rank 0, from rank 1, ... ]        (rows, H, K, V)
    M        [ MID ...      | from rank 0, from rank 1, ... ]        (rows, H, K, K), (K, 1), (1, 1), or None

One message to each peer: its rows of states, then its rows of maps, in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longweave.comm.exchange import Pending, all_to_all_v, done
from longweave.comm.groups import Comm
from longweave.kernels.affine import Kind, times
from longweave.plan.chains import Messages, Step


class Rows:
    """States (rows, H, K, V) and maps (rows, H, …) that a rank knows; `maps` is None where the kind has none."""

    def __init__(self, states: Tensor, maps: Tensor | None) -> None:
        self.states, self.maps = states, maps


def exchange(own: Rows, messages: Messages, comm: Comm, *, communicates: bool) -> Pending[Rows]:
    """Own rows followed by those of others, once they have arrived."""
    if not communicates:
        return done(own)
    states, maps = own.states, own.maps
    map_size = 0 if maps is None else _size(maps)
    send_splits, recv_splits = messages.splits(_size(states), map_size)
    parts: list[Tensor] = []
    for state_rows, map_rows in zip(messages.send_states, messages.send_maps, strict=True):
        parts.append(_pick(states, state_rows).flatten())
        if maps is not None:
            parts.append(_pick(maps, map_rows).flatten())
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
        gained = _pick(rows.states, step.states)
        if number:
            M = None if rows.maps is None else _pick(rows.maps, step.maps)
            gained += times(kind, M, S[: len(step.states)], transposed=transposed)
        S = gained
        if len(step.of):
            arriving[_index(step.into, S.device)] = _pick(S, step.of)
    return arriving


def _size(rows: Tensor) -> int:
    """Elements of one row."""
    return int(np.prod(rows.shape[1:]))


def _pick(rows: Tensor, index: np.ndarray) -> Tensor:
    return rows.index_select(0, _index(index, rows.device))


def _index(index: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(index)).to(device, non_blocking=True)
