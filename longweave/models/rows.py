"""What a trainer gives a model, read as documents: rows with padding, packed rows, or both.

    input_ids       · · a b c d        attention_mask 0: padding, left or right of the tokens
                    e f g · · ·
    position_ids    0 1 2 0 1 0        packed: a document begins where they do not go on by one (beside a mask: where
                    └─ h ─┘└ i ┘j      they fall); likewise where seq_idx changes, and at cu_seq_lens_q

    documents       a b c d │ e f g │ h h h │ i i │ j      one after another, without padding

Nothing is sent here, and nothing is moved: `HomeRows` says where tokens are, and brings values of tokens back there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longweave.errors import InputError
from longweave.models.packing import is_integer, kept_tokens
from longweave.plan.ranges import Ints, as_cu_seqlens
from longweave.tensors import check_tensor

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class HomeRows:
    """The rows of one rank's batch: (batch, seq), and the places of their tokens."""

    batch: int
    seq: int
    lengths: Ints  # of the documents, in the order of the tokens
    positions: Tensor  # (tokens, planes): as the model would count them; most models have one plane
    planes: tuple[int, ...]  # of position_ids, in front of (batch, seq)
    places: Tensor | None  # of the tokens among all places; None if every place holds one

    def take(self, x: Tensor) -> Tensor:
        """(batch, seq, …) → (tokens, …)."""
        flat = x.reshape(self.batch * self.seq, *x.shape[2:])
        return flat if self.places is None else flat.index_select(0, self.places)

    def put(self, x: Tensor) -> Tensor:
        """(tokens, …) → (batch, seq, …), with zeros at padding."""
        if self.places is not None:
            empty = x.new_zeros((self.batch * self.seq, *x.shape[1:]))
            x = empty.index_copy(0, self.places, x)
        return x.reshape(self.batch, self.seq, *x.shape[1:])


#: The arguments whose values are read.
ROW_ARGUMENTS = ("attention_mask", "position_ids", "cu_seq_lens_q", "seq_idx")


def read_rows(
    shape: torch.Size, device: torch.device, given: Mapping[str, Any], host: Mapping[str, Any] | None = None
) -> HomeRows:
    """Of tokens (batch, seq) and the arguments of the model's forward that came with them. Raises InputError.

    host: copies of the arguments in `ROW_ARGUMENTS` in the host's memory, if there are any.
    """
    given = {**given, **{name: given.get(name) for name in ROW_ARGUMENTS}}
    host = given if host is None else host
    if len(shape) != 2:
        raise InputError(f"the tokens have the shape {tuple(shape)}; give rows: (batch, seq)")
    batch, seq = shape
    mask = host["attention_mask"]
    keep = np.ones((batch, seq), dtype=bool) if mask is None else kept_tokens(mask, batch, seq)
    places = np.flatnonzero(keep)
    whole = len(places) == batch * seq
    positions, planes = _positions(given["position_ids"], batch, seq, device)
    at = None if whole else torch.from_numpy(places).to(device)
    of_tokens = positions if at is None else positions.index_select(0, at)
    # Of four planes the first counts tokens. Three say where in an image a token is, and nothing of documents.
    counts: Ints | None = None
    if given["position_ids"] is not None and planes in ((), (4,)):
        counts = _positions(host["position_ids"], batch, seq, torch.device("cpu"))[0][:, 0].numpy()[places]
    begins = _begins(places, batch, seq, counts, host, whole)
    lengths = np.diff(np.append(np.flatnonzero(begins), len(places)))
    return HomeRows(batch, seq, lengths, of_tokens, planes, at)


def _positions(given: Any, batch: int, seq: int, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """(batch · seq, planes): those that were given, else the column, as models count that are given none."""
    if given is None:
        return torch.arange(seq, device=device).repeat(batch)[:, None], ()
    if not isinstance(given, Tensor) or given.ndim < 2 or given.shape[-1] != seq or given.shape[-2] not in (1, batch):
        shown = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise InputError(f"position_ids is {shown} for tokens of {(batch, seq)}; give one entry per token")
    check_tensor("position_ids", given)
    if given.numel() and not is_integer(given):
        raise InputError(f"position_ids is {given.dtype}; give integers")
    planes = tuple(given.shape[:-2])
    flat = given.to(device).expand(*planes, batch, seq).reshape(math.prod(planes), batch * seq)
    return flat.T.long(), planes


def _begins(places: Ints, batch: int, seq: int, positions: Ints | None, given: Mapping[str, Any], whole: bool) -> Flags:
    """Which tokens begin a document."""
    begins: Flags = np.diff(places // max(seq, 1), prepend=-1) != 0
    cu = given.get("cu_seq_lens_q")
    if cu is not None:
        borders = as_cu_seqlens(cu)
        if not whole or int(borders[-1]) != len(places):
            padding = "" if whole else ", and padding beside them"
            raise InputError(
                f"cu_seq_lens_q ends at {borders[-1]}, but the batch has {len(places)} tokens{padding}; give the "
                "borders of packed tokens without padding"
            )
        begins[borders[:-1][np.diff(borders) > 0]] = True
        return begins
    index = given.get("seq_idx")
    if index is not None:
        if not isinstance(index, Tensor) or tuple(index.shape) not in ((batch, seq), (batch * seq,)):
            shown = tuple(index.shape) if isinstance(index, Tensor) else type(index).__name__
            raise InputError(f"seq_idx is {shown} for tokens of {(batch, seq)}; give the number of each one's document")
        check_tensor("seq_idx", index)
        of_tokens = index.reshape(-1).cpu().numpy()[places]
        begins[1:] |= np.diff(of_tokens) != 0
        return begins
    if positions is not None:
        steps = np.diff(positions)
        # Beside a mask, positions that skip some are those of one document, and only falling ones begin another.
        begins[1:] |= steps != 1 if given.get("attention_mask") is None else steps <= 0
    return begins
