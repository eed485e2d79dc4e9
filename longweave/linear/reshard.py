"""A mixer on its documents in one piece: to a contiguous layout, mix there, and back.

    zigzag      0 0 1 1 1 1 0 0  ── all-to-all-v ──▶  contiguous  0 0 0 0 1 1 1 1
                                                      one span a rank: at most two documents are cut on each
    outputs     0 0 1 1 1 1 0 0  ◀── all-to-all-v ──

Costs bytes for every token that moves, in and out, whatever their number. It pays where a layout cuts many short
documents, whose summaries would be larger than their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longweave.comm.groups import Comm
from longweave.plan.layout import Layout
from longweave.tokens import reshard


def contiguous_of(layout: Layout) -> Layout:
    """The contiguous layout of the same tokens: one object for each layout object, so that ranks agree on it once."""
    if "contiguous" not in layout.derived:
        layout.derived["contiguous"] = Layout.contiguous(layout.total, layout.world_size)
    contiguous: Layout = layout.derived["contiguous"]
    return contiguous


def reshard_all(tensors: Sequence[Tensor], src: Layout, dst: Layout, comm: Comm) -> list[Tensor]:
    """Several (tokens, …) tensors in one exchange for each dtype among them."""
    moved: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        members = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        flat = [tensors[i].flatten(1) for i in members]
        joined = reshard(torch.cat(flat, 1) if len(flat) > 1 else flat[0], src, dst, comm.group)
        for i, part in zip(members, torch.split(joined, [x.shape[1] for x in flat], 1), strict=True):
            moved[i] = part.reshape(-1, *tensors[i].shape[1:])
    return [moved[i] for i in range(len(tensors))]
