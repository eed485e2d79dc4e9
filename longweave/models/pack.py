"""From what a user has to one packed sequence: ids, documents, targets, weights, positions.

    input_ids (tokens,) or (1, tokens)   with cu_seqlens, or with packed position_ids, or neither: one document
    input_ids (batch, seq)               every row is a document; an attention_mask removes its padding

Labels and weights are given where the tokens are. The model's output at a token is about the *next* token, so they move
one place forward, inside each document: the last token of a document predicts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longweave.errors import InputError
from longweave.plan.ranges import Ints, as_cu_seqlens, frozen


@dataclass(frozen=True)
class Pack:
    """A whole batch as one sequence; every tensor has one entry per token."""

    ids: Tensor
    cu_seqlens: Ints
    targets: Tensor  # the next token's label, `ignore_index` where there is none
    weights: Tensor | None  # the next token's weight
    positions: Tensor | None  # as given, else counted from the start of each document
    shifted_by_us: bool
    rows: tuple[int, int, Tensor] | None  # of a (batch, seq) input: its shape, and the place of every token in it

    def fingerprint(self) -> str:
        """Equal packs have equal fingerprints."""
        digest = blake2b(self.cu_seqlens.tobytes(), digest_size=16)
        for x in (self.ids, self.targets, self.weights, self.positions):
            digest.update(
                b"none" if x is None else str(x.dtype).encode() + x.detach().cpu().contiguous().numpy().tobytes()
            )
        return digest.hexdigest()


def make_pack(
    input_ids: Any,
    cu_seqlens: object = None,
    labels: Any = None,
    shift_labels: Any = None,
    loss_weights: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    ignore_index: int = -100,
) -> Pack:
    """Check the arguments of `lw.shard_batch` against each other and pack them. Raises InputError."""
    ids = _tensor("input_ids", input_ids)
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise InputError(
            f"input_ids has the shape {tuple(ids.shape)}; give (tokens,), (1, tokens) or (batch, seq), not empty"
        )
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise InputError(f"input_ids is {ids.dtype}; give integer token ids")
    if labels is not None and shift_labels is not None:
        raise InputError("give labels (one per token) or shift_labels (already moved one place forward), not both")
    given = {"labels": labels, "shift_labels": shift_labels, "loss_weights": loss_weights, "position_ids": position_ids}
    tensors = {name: _like(name, x, ids) for name, x in given.items() if x is not None}
    is_rows = ids.ndim == 2 and ids.shape[0] > 1
    rows = None
    if is_rows or attention_mask is not None:
        if cu_seqlens is not None:
            raise InputError(
                f"input_ids has the shape {tuple(ids.shape)} and cu_seqlens is given too; pack it into (1, tokens), "
                "or leave cu_seqlens out: every row is a document"
            )
        rows, cu = _rows(ids.reshape(-1, ids.shape[-1]), attention_mask)
        keep = rows[2]
        ids, tensors = ids.reshape(-1)[keep], {name: x.reshape(-1)[keep] for name, x in tensors.items()}
    else:
        ids, tensors = ids.reshape(-1), {name: x.reshape(-1) for name, x in tensors.items()}
        cu = _documents(len(ids), cu_seqlens, tensors.get("position_ids"))
    weights, positions = tensors.get("loss_weights"), tensors.get("position_ids")
    if weights is not None and not weights.dtype.is_floating_point:
        weights = weights.float()
    shifted_by_us = "shift_labels" not in tensors
    if shifted_by_us:
        targets = shift(tensors.get("labels", ids).long(), cu, ignore_index)
        weights = None if weights is None else shift(weights, cu, 0)
    else:
        targets = tensors["shift_labels"].long()
    return Pack(ids.long(), cu, targets, weights, None if positions is None else positions.long(), shifted_by_us, rows)


def shift(x: Tensor, cu_seqlens: Ints, fill: float) -> Tensor:
    """The next token's entry, inside each document."""
    moved = torch.cat([x[1:], x.new_full((1,), fill)])
    moved[torch.from_numpy(_ends(cu_seqlens)).to(x.device)] = fill
    return moved


def unshift(x: Tensor, cu_seqlens: Ints) -> Tensor:
    """The other way: what a token said about the next one, put where the next one is. 0 for first tokens."""
    first = torch.zeros(len(x), dtype=torch.bool)
    first[torch.from_numpy(_ends(cu_seqlens)[:-1] + 1)] = True
    first[0] = True
    return torch.cat([x[:1], x[:-1]]).masked_fill(first.to(x.device).view(-1, *[1] * (x.ndim - 1)), 0)


def _ends(cu_seqlens: Ints) -> Ints:
    """The last token of every document that has tokens."""
    return cu_seqlens[1:][np.diff(cu_seqlens) > 0] - 1


def _tensor(name: str, x: Any) -> Tensor:
    try:
        return x if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x))
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is a {type(x).__name__} that is no tensor; give one of numbers") from error


def _like(name: str, x: Any, ids: Tensor) -> Tensor:
    tensor = _tensor(name, x)
    flat = ids.ndim == 1 or ids.shape[0] == 1
    fits = tensor.numel() == ids.numel() and (tensor.squeeze().ndim <= 1 if flat else tensor.shape == ids.shape)
    if not fits:
        raise InputError(
            f"{name} has the shape {tuple(tensor.shape)} for input_ids of {tuple(ids.shape)}; give one entry per token"
        )
    return tensor.to(ids.device)


def _documents(total: int, cu_seqlens: object, positions: Tensor | None) -> Ints:
    if cu_seqlens is not None:
        cu = as_cu_seqlens(cu_seqlens)
        if int(cu[-1]) != total:
            raise InputError(f"cu_seqlens ends at {cu[-1]} but input_ids has {total} tokens; give those of this batch")
        return cu
    if positions is None:
        return frozen([0, total])
    at = positions.cpu().numpy()
    starts = np.flatnonzero(np.diff(at, prepend=at[0] - 2) != 1)
    return frozen(np.append(starts, total))


def _rows(ids: Tensor, attention_mask: Any) -> tuple[tuple[int, int, Tensor], Ints]:
    """Where the tokens of the rows are, and their lengths as cu_seqlens."""
    batch, seq = ids.shape
    if attention_mask is None:
        keep = np.ones((batch, seq), dtype=bool)
    else:
        mask = _tensor("attention_mask", attention_mask)
        if mask.numel() != ids.numel() or mask.ndim not in (1, 2):
            raise InputError(
                f"attention_mask has the shape {tuple(mask.shape)} for input_ids of {(batch, seq)}; give one of the "
                "same shape, 1 for tokens and 0 for padding"
            )
        keep = mask.reshape(batch, seq).cpu().numpy().astype(bool)
        runs = (np.diff(keep.astype(np.int8), axis=1, prepend=0) == 1).sum(1)
        if (runs > 1).any():
            row = int(np.flatnonzero(runs > 1)[0])
            raise InputError(f"row {row} of attention_mask has padding between its tokens; pad left or right of them")
        if not keep.any():
            raise InputError("attention_mask is 0 everywhere; a batch needs at least one token")
    places = torch.from_numpy(np.flatnonzero(keep)).to(ids.device)
    return (batch, seq, places), frozen(np.append(0, np.cumsum(keep.sum(1))))
