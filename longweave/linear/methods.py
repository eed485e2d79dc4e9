"""Three ways to bring a mixer to documents that a layout cuts, and which of them moves the fewest bytes.

    affine     summaries of fragments travel            bytes never grow with the sequence
    reshard    tokens travel to a contiguous layout     inputs   0 0 1 1 1 1 0 0  ── all-to-all-v ──▶  0 0 0 0 1 1 1 1
               and back                                 outputs  0 0 1 1 1 1 0 0  ◀── all-to-all-v ──  0 0 0 0 1 1 1 1
    gather     inputs travel to every rank              and every rank computes everything

Bytes are counted from integers, for the busiest rank, forward and backward together:

    affine     rows of U, M, C                  × heads · K · V  (or K · K)
    reshard    tokens that change rank          × inputs and outputs × 2        plus what affine sends afterwards
    gather     own tokens to every other rank   × inputs × 3

`reshard` pays where a layout cuts many short documents, whose summaries would be larger than their tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor

from longweave.comm.exchange import Comm
from longweave.core import METHODS, PackCore
from longweave.kernels.recurrence.mixer import Mixer, transition_shape
from longweave.kernels.recurrence.segments import Segments
from longweave.linear.chains import Chains
from longweave.plan.chains import sent_bytes
from longweave.plan.fragments import Fragments, fragments
from longweave.plan.layout import Layout
from longweave.plan.routing import route
from longweave.tensors import accumulation_dtype
from longweave.tokens import TokenRoute

log = logging.getLogger("longweave.linear")


class CutDocuments:
    """The documents of a pack as one layout cuts them, seen from this rank."""

    def __init__(self, found: Fragments, comm: Comm) -> None:
        self.fragments, self.comm = found, comm

    @cached_property
    def chains(self) -> Chains:
        return Chains(self.fragments, self.comm)

    @cached_property
    def local(self) -> Segments:
        """The fragments of this rank."""
        return Segments(self.fragments.local_spans(self.comm.rank))


class Contiguous(CutDocuments):
    """The same documents in a contiguous layout, one span a rank, and the way there and back."""

    def __init__(self, core: PackCore) -> None:
        layout = Layout.contiguous(core.layout.total, core.comm.size)
        super().__init__(fragments(layout, core.cu_seqlens), core.comm)
        self.there = TokenRoute(route(core.layout, layout, core.comm.rank), core.comm)


def in_place(core: PackCore) -> CutDocuments:
    """The documents as the pack's own layout cuts them."""
    return CutDocuments(core.fragments, core.comm)


def whole(core: PackCore) -> Segments:
    """All documents, uncut."""
    return Segments(tuple(pairwise(core.cu_seqlens.tolist())))


def move_all(tensors: Sequence[Tensor], way: TokenRoute) -> list[Tensor]:
    """Several (tokens, …) tensors in one exchange for each dtype among them."""
    moved: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        members = [i for i, x in enumerate(tensors) if x.dtype == dtype]
        flat = [tensors[i].flatten(1) for i in members]
        joined = way.walk(torch.cat(flat, 1) if len(flat) > 1 else flat[0])
        for i, part in zip(members, torch.split(joined, [x.shape[1] for x in flat], 1), strict=True):
            moved[i] = part.reshape(-1, *tensors[i].shape[1:])
    return [moved[i] for i in range(len(tensors))]


# -- which one -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MethodChoice:
    """The method of a linear layer, bytes that the busiest rank sends with each (forward and backward), and why.

    `backend` is what this rank computed on, and why that.
    """

    method: str
    bytes_sent: Mapping[str, int]
    why: str
    backend: str = ""
    backend_why: str = ""


@dataclass(frozen=True)
class Sizes:
    """What one call moves: elements of a state and of a transition, bytes of an element of either, bytes of a token."""

    state: int
    transition: int
    itemsize: int
    token_in: int  # of all inputs
    token_out: int

    @classmethod
    def of(cls, mixer: Mixer, inputs: Sequence[Tensor]) -> Sizes:
        H, K, V = mixer.state_shape(inputs)
        shape = transition_shape(mixer.kind, K)
        return cls(
            state=H * K * V,
            transition=0 if shape is None else H * shape[0] * shape[1],
            itemsize=max(accumulation_dtype(x.dtype).itemsize for x in inputs),
            token_in=sum(x.element_size() * prod(x.shape[1:]) for x in inputs),
            token_out=H * V * inputs[0].element_size(),
        )


def choose(core: PackCore, sizes: Sizes) -> MethodChoice:
    """What `method="auto"` takes; logged by `longweave.linear`."""
    if not core.fragments.communicates:
        return MethodChoice("affine", dict.fromkeys(METHODS, 0), "every document lies on one rank: nothing is sent")
    sent = _bytes(core, sizes)
    method = min(METHODS, key=lambda name: sent[name])
    listed = ", ".join(f"{name} {sent[name] / 2**20:.2f} MiB" for name in METHODS)
    why = f"fewest bytes from the busiest rank, forward and backward: {listed}"
    log.info("linear attention by %s: %s", method, why)
    return MethodChoice(method, sent, why)


def _bytes(core: PackCore, sizes: Sizes) -> dict[str, int]:
    layout, world = core.layout, core.comm.size
    contiguous = Layout.contiguous(layout.total, world)
    moved = np.array([_moved(layout, contiguous, rank) for rank in range(world)])
    counts = np.array(layout.counts, dtype=np.int64)
    inside = _summaries(fragments(contiguous, core.cu_seqlens), sizes)
    gathered = 2 * counts * (world - 1) + (layout.total - counts)
    return {
        "affine": int(_summaries(core.fragments, sizes).max()),
        "reshard": int((moved.sum(1) * (sizes.token_in + sizes.token_out) + inside).max()),
        "gather": int((gathered * sizes.token_in).max()),
    }


def _summaries(found: Fragments, sizes: Sizes) -> np.ndarray:
    forward, backward = sent_bytes(found, sizes.state, sizes.transition, sizes.itemsize)
    total: np.ndarray = forward + backward
    return total


def _moved(src: Layout, dst: Layout, rank: int) -> tuple[int, int]:
    """Tokens that a rank sends on the way there and on the way back; backward walks both ways again."""
    path = route(src, dst, rank)
    return sum(path.send_splits), sum(path.recv_splits)
