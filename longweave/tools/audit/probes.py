"""Which tokens are changed, which labels are kept, and who may notice: integers of the batch alone.

    documents        0 0 0 0 0 0 0 1 1 1 2 2 2 2
    changed token          ●
    may not notice   ✗ ✗ ✗           ✗ ✗ ✗ ✗ ✗ ✗ ✗      earlier ones, other documents
    may notice             ✓ ✓ ✓ ✓

An output belongs to the token that it is computed from, and predicts the next one; a label belongs to the token that it
is, and is predicted by the output before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longweave.tools.audit.steps import IGNORE, Inputs

Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def document_of(token: int, cu_seqlens: Sequence[int]) -> tuple[int, int]:
    """Its first token, and the first one after it."""
    return next((start, stop) for start, stop in pairwise(cu_seqlens) if start <= token < stop)


def tokens_to_change(cu_seqlens: Sequence[int]) -> list[int]:
    """First and middle of the longest document (windows, exchanges, causality), and both sides of document borders."""
    documents = [(start, stop) for start, stop in pairwise(cu_seqlens) if stop > start]
    start, stop = max(documents, key=lambda document: document[1] - document[0])
    chosen = [start, (start + stop) // 2, documents[0][1] - 1, documents[-1][0]]
    return [*dict.fromkeys(chosen)]


def changed(inputs: Inputs, token: int) -> Inputs:
    """With another id, one that occurs in the batch, in the place of one token. Labels stay as they are."""
    ids = inputs["input_ids"].clone()
    others = ids[ids != ids[token]]
    ids[token] = others[len(others) // 2] if len(others) else ids[token] ^ 1
    return {**inputs, "input_ids": ids}


# -- regions of outputs --------------------------------------------------------------------------------


def may_notice(token: int, cu_seqlens: Sequence[int]) -> Flags:
    """Outputs that a change of the token may move in a causal model without windows."""
    flags = np.zeros(cu_seqlens[-1], dtype=bool)
    flags[token : document_of(token, cu_seqlens)[1]] = True
    return flags


def regions(token: int, cu_seqlens: Sequence[int]) -> dict[str, Flags]:
    """Sets of outputs, for steps that return no more than a loss: each set is looked at by the loss of its labels."""
    start, stop = document_of(token, cu_seqlens)
    at = np.arange(cu_seqlens[-1])
    found = {
        "other documents": (at < start) | (at >= stop),
        "earlier tokens": (at >= start) & (at < token),
        "next tokens": (at >= token) & (at < min(token + 2, stop - 1)),
        "last tokens": (at >= max(token + 2, stop - 3)) & (at < stop),
    }
    return {name: flags for name, flags in found.items() if labels_of(flags, cu_seqlens).any()}


# -- labels --------------------------------------------------------------------------------------------


def labels_of(outputs: Flags, cu_seqlens: Sequence[int]) -> Flags:
    """The labels that these outputs predict."""
    found = np.zeros_like(outputs)
    found[1:] = outputs[:-1]
    return found & ~first_tokens(cu_seqlens)


def first_tokens(cu_seqlens: Sequence[int]) -> Flags:
    """Of documents: no output predicts them."""
    flags = np.zeros(cu_seqlens[-1], dtype=bool)
    flags[[start for start, stop in pairwise(cu_seqlens) if stop > start]] = True
    return flags


def only_labels(inputs: Inputs, keep: Flags) -> Inputs:
    labels = inputs["labels"].clone()
    labels[torch.from_numpy(~keep).to(labels.device)] = IGNORE
    return {**inputs, "labels": labels}


def labels_at_borders(owners: Ints, cu_seqlens: Sequence[int]) -> Flags:
    """Labels whose predicting output lies on another rank than the label."""
    flags = np.zeros(len(owners), dtype=bool)
    flags[1:] = owners[1:] != owners[:-1]
    return flags & ~first_tokens(cu_seqlens)


def counts(inputs: Inputs, keep: Flags) -> bool:
    """Does any of these labels count?"""
    return bool(((inputs["labels"].cpu().numpy() != IGNORE) & keep).any())


# -- wrong positions -----------------------------------------------------------------------------------


def wrong_positions(shards: Sequence[Ints], cu_seqlens: Sequence[int]) -> dict[str, Any]:
    """Ways to count positions that are wrong, as tensors, by what is done."""
    total = cu_seqlens[-1]
    by_rank, by_piece, in_document = (np.zeros(total, dtype=np.int64) for _ in range(3))
    start_of = np.zeros(total, dtype=np.int64)
    for number, (start, stop) in enumerate(pairwise(cu_seqlens)):
        start_of[start:stop] = number
    for tokens in shards:
        own = np.sort(tokens)
        by_rank[own] = np.arange(len(own))
        new_piece = np.r_[True, np.diff(own) != 1] | np.r_[True, np.diff(start_of[own]) != 0] if len(own) else own > 0
        by_piece[own] = _count_from(new_piece)
        in_document[own] = _count_from(np.r_[True, np.diff(start_of[own]) != 0] if len(own) else own > 0)
    ways = {
        "counted from the start of each rank's shard": by_rank,
        "counted from the start of each piece of a document": by_piece,
        "counted within what a rank holds of a document": in_document,
        "counted through all documents of the batch": np.arange(total),
        "all 0": np.zeros(total, dtype=np.int64),
    }
    right = np.concatenate([np.arange(stop - start) for start, stop in pairwise(cu_seqlens)])
    return {name: torch.from_numpy(way) for name, way in ways.items() if not np.array_equal(way, right)}


def _count_from(begins: Flags) -> Ints:
    """0, 1, 2, … anew at every flag."""
    at = np.arange(len(begins))
    return at - np.maximum.accumulate(np.where(begins, at, 0)) if len(at) else at
