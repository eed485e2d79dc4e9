"""From what a user has to one packed sequence: ids or embeddings, documents, targets, weights, positions.

    input_ids (tokens,) or (1, tokens)   with cu_seqlens, or a Mask, or packed position_ids; with none: one document
    input_ids (batch, seq)               every row is a document; an attention_mask removes its padding
    inputs_embeds                        the same with one more dimension, in the place of input_ids

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

from longweave.errors import InputError, shown
from longweave.plan.mask import Mask
from longweave.plan.ranges import Ints, as_cu_seqlens, check_int, frozen
from longweave.tensors import check_tensor


@dataclass(frozen=True)
class PaddedRows:
    """A (batch, seq) input, and the place of every token in it when its rows lie one after another."""

    batch: int
    seq: int
    places: Tensor


@dataclass(frozen=True)
class PackedTokens:
    """A whole batch as one sequence; every tensor has one entry per token."""

    ids: Tensor | None  # either these …
    embeds: Tensor | None  # … or these, (tokens, D)
    cu_seqlens: Ints
    targets: Tensor  # the next token's label, `ignore_index` where there is none
    weights: Tensor | None  # the next token's weight
    positions: Tensor | None  # as given, else counted from the start of each document
    has_labels: bool  # given by the user
    moved_labels: bool  # here, one place forward
    rows: PaddedRows | None

    def fingerprint(self) -> str:
        """Equal batches have equal fingerprints. Of embeddings only shape, dtype and "needs a gradient" count.

        They are results of arithmetic, which may differ in the last bits from rank to rank.
        """
        digest = blake2b(f"{self.has_labels} {self.moved_labels}".encode() + self.cu_seqlens.tobytes(), digest_size=16)
        if (embeds := self.embeds) is not None:
            digest.update(f"{tuple(embeds.shape)} {embeds.dtype} {embeds.requires_grad}".encode())
        for x in (self.ids, self.targets, self.weights, self.positions):
            digest.update(b"none" if x is None else str(x.dtype).encode() + _bits(x))
        return digest.hexdigest()


def pack_tokens(
    input_ids: Any = None,
    cu_seqlens: object = None,
    labels: Any = None,
    shift_labels: Any = None,
    loss_weights: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    ignore_index: int = -100,
    inputs_embeds: Any = None,
    mask: object = None,
) -> PackedTokens:
    """Check the arguments of `lw.shard_batch` against each other and pack them. Raises InputError."""
    remedy = "give the int of 64 bits that marks labels that do not count"
    ignore_index = check_int("ignore_index", ignore_index, remedy, -(1 << 63), (1 << 63) - 1)
    tokens, name = _tokens(input_ids, inputs_embeds)
    shape = tokens.shape if name == "input_ids" else tokens.shape[:-1]
    if labels is not None and shift_labels is not None:
        raise InputError("give labels (one per token) or shift_labels (already moved one place forward), not both")
    given = {"labels": labels, "shift_labels": shift_labels, "loss_weights": loss_weights, "position_ids": position_ids}
    others = {key: _like(key, x, shape, name).to(tokens.device) for key, x in given.items() if x is not None}
    for key, x in others.items():
        _check_dtype(key, x)
    rows, tokens = None, tokens.reshape(-1, *tokens.shape[len(shape) :])
    others = {key: x.reshape(-1) for key, x in others.items()}
    if (len(shape) == 2 and shape[0] > 1) or attention_mask is not None:
        if cu_seqlens is not None:
            raise InputError(
                f"{name} has the shape {tuple(shape)} and cu_seqlens is given too; pack it into (1, tokens), or leave "
                "cu_seqlens out: every row is a document"
            )
        rows, cu = _rows(torch.Size([1, *shape][-2:]), attention_mask, tokens.device)
        tokens, others = tokens[rows.places], {key: x[rows.places] for key, x in others.items()}
    else:
        cu = _documents(len(tokens), cu_seqlens, mask, others.get("position_ids"), name)
    for key, x in {name: tokens, **others}.items():
        _check_negative(key, x, ignore_index)
    positions, weights = others.get("position_ids"), others.get("loss_weights")
    if weights is not None and not weights.dtype.is_floating_point:
        weights = weights.float()
    if "shift_labels" in others:
        targets = others["shift_labels"].long()
    else:
        targets = shift(_labels(others.get("labels"), tokens, name, ignore_index), cu, ignore_index)
        weights = None if weights is None else shift(weights, cu, 0)
    return PackedTokens(
        ids=tokens.long() if name == "input_ids" else None,
        embeds=tokens if name == "inputs_embeds" else None,
        cu_seqlens=cu,
        targets=targets,
        weights=weights,
        positions=None if positions is None else positions.long(),
        has_labels=labels is not None or shift_labels is not None,
        moved_labels="shift_labels" not in others,
        rows=rows,
    )


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


def _bits(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def given_tokens(input_ids: Any, inputs_embeds: Any) -> tuple[Any, str]:
    """The one of both that was given, and its name."""
    if (input_ids is None) == (inputs_embeds is None):
        how_many = "neither" if input_ids is None else "both"
        raise InputError(f"{how_many} of input_ids and inputs_embeds was given; give one of them")
    name = "inputs_embeds" if input_ids is None else "input_ids"
    tokens = inputs_embeds if input_ids is None else input_ids
    return tokens, name


def check_tokens(tokens: Tensor, name: str) -> None:
    if name == "input_ids" and not is_integer(tokens):
        raise InputError(f"input_ids is {tokens.dtype}; give integer token ids, or embeddings as inputs_embeds")
    if name == "inputs_embeds" and not tokens.dtype.is_floating_point:
        raise InputError(f"inputs_embeds is {tokens.dtype}; give a floating dtype, or token ids as input_ids")


def _tokens(input_ids: Any, inputs_embeds: Any) -> tuple[Tensor, str]:
    """The same as a tensor of a shape that can be packed."""
    given, name = given_tokens(input_ids, inputs_embeds)
    tokens, dims = _tensor(name, given), int(name == "inputs_embeds")
    if tokens.ndim not in (1 + dims, 2 + dims) or tokens.numel() == 0:
        shapes = "(tokens, D), (1, tokens, D) or (batch, seq, D)" if dims else "(tokens,), (1, tokens) or (batch, seq)"
        raise InputError(f"{name} has the shape {tuple(tokens.shape)}; give {shapes}, not empty")
    check_tokens(tokens, name)
    return tokens, name


def _labels(labels: Tensor | None, tokens: Tensor, name: str, ignore_index: int) -> Tensor:
    if labels is not None:
        return labels.long()
    if name == "input_ids":
        return tokens.long()
    return torch.full((len(tokens),), ignore_index, device=tokens.device)  # an embedding is nothing to predict


def _tensor(name: str, x: Any) -> Tensor:
    try:
        tensor = x if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} is {shown(x)}, a {type(x).__name__} that is no tensor; give one of numbers"
        ) from error
    check_tensor(name, tensor)
    return tensor


def is_integer(x: Tensor) -> bool:
    return not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)


def _check_dtype(name: str, x: Tensor) -> None:
    if name == "loss_weights" and x.dtype.is_complex:
        raise InputError(f"loss_weights is {x.dtype}; give real numbers")
    if name != "loss_weights" and not is_integer(x):
        raise InputError(f"{name} is {x.dtype}; give integers")


def _check_negative(name: str, x: Tensor, ignore_index: int) -> None:
    """Of the integers of a batch without its padding. They are read on the host anyway, to compare the ranks."""
    if not is_integer(x) or name == "loss_weights":
        return
    is_label = name.endswith("labels")
    whole = x.long()
    negative = whole[(whole < 0) & (whole != ignore_index)] if is_label else whole[whole < 0]
    if len(negative):
        besides = f", and ignore_index is {ignore_index}" if is_label else ""
        what = "positions" if name == "position_ids" else "token ids"
        raise InputError(f"{name} holds {int(negative[0])} (in 64 bits); {what} count from 0{besides}")


def _like(name: str, x: Any, shape: torch.Size, tokens_name: str) -> Tensor:
    tensor = _tensor(name, x)
    flat = len(shape) == 1 or shape[0] == 1
    fits = tensor.numel() == shape.numel() and (tensor.squeeze().ndim <= 1 if flat else tensor.shape == shape)
    if not fits:
        raise InputError(
            f"{name} has the shape {tuple(tensor.shape)} for {tokens_name} of {tuple(shape)}; give one entry per token"
        )
    return tensor


def _documents(total: int, cu_seqlens: object, mask: object, positions: Tensor | None, name: str) -> Ints:
    if cu_seqlens is not None:
        cu = as_cu_seqlens(cu_seqlens)
        if int(cu[-1]) != total:
            raise InputError(f"cu_seqlens ends at {cu[-1]} but {name} has {total} tokens; give those of this batch")
        return cu
    if isinstance(mask, Mask):
        if mask.total != total:
            raise InputError(f"the mask has {mask.total} tokens but {name} has {total}; make it for this batch")
        return mask.cu_seqlens
    if positions is None:
        return frozen([0, total])
    at = positions.long().cpu().numpy()
    starts = np.flatnonzero(np.diff(at, prepend=at[0] - 2) != 1)
    return frozen(np.append(starts, total))


def _rows(shape: torch.Size, attention_mask: Any, device: torch.device) -> tuple[PaddedRows, Ints]:
    """Where the tokens of the rows are, and their lengths as cu_seqlens."""
    batch, seq = shape
    if attention_mask is None:
        keep = np.ones((batch, seq), dtype=bool)
    else:
        keep = kept_tokens(attention_mask, batch, seq)
        if not keep.any():
            raise InputError("attention_mask is 0 everywhere; a batch needs at least one token")
    places = torch.from_numpy(np.flatnonzero(keep)).to(device)
    return PaddedRows(batch, seq, places), frozen(np.append(0, np.cumsum(keep.sum(1))))


def kept_tokens(attention_mask: Any, batch: int, seq: int) -> np.ndarray:
    """Which places of (batch, seq) hold tokens, by a mask of 1 for tokens and 0 for padding left or right of them."""
    remedy = "give one of the same shape, 1 for tokens and 0 for padding"
    if isinstance(attention_mask, dict):
        raise InputError(f"attention_mask is a dict of masks for tokens of {(batch, seq)}; {remedy}")
    given = _tensor("attention_mask", attention_mask)
    fits = tuple(given.shape) == (batch, seq) or (batch == 1 and tuple(given.shape) == (seq,))
    if not fits:
        raise InputError(f"attention_mask has the shape {tuple(given.shape)} for tokens of {(batch, seq)}; {remedy}")
    if given.dtype.is_complex:
        raise InputError(f"attention_mask is {given.dtype}; {remedy}")
    values = given.reshape(batch, seq).float().cpu().numpy()
    keep: np.ndarray = values == 1
    if not (keep | (values == 0)).all():
        other = float(values[~keep & (values != 0)][0])
        raise InputError(
            f"attention_mask holds {other:g}, which is neither 1 (a token) nor 0 (padding); packed documents are given "
            "by cu_seqlens or position_ids"
        )
    runs = (np.diff(keep.astype(np.int8), axis=1, prepend=0) == 1).sum(1)
    if (runs > 1).any():
        row = int(np.flatnonzero(runs > 1)[0])
        raise InputError(f"row {row} of attention_mask has padding between its tokens; pad left or right of them")
    return keep
