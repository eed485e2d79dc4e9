"""Which method moves the fewest bytes: counted from integers, for the busiest rank, forward and backward together.

affine     rows of U, M, C                  × heads · K · V  (or K · K)     never grows with the sequence
reshard    tokens that change rank          × inputs and outputs × 2        plus what affine sends afterwards
gather     own tokens to every other rank   × inputs × 3                    and every rank computes everything
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from longweave.errors import InputError
from longweave.plan.chains import sent_bytes
from longweave.plan.fragments import Fragments, fragments
from longweave.plan.layout import Layout
from longweave.plan.routing import route

METHODS = ("affine", "reshard", "gather")
log = logging.getLogger("longweave.linear")


@dataclass(frozen=True)
class Sizes:
    """What one call moves: elements of a state and of a map, bytes of an element of either, bytes of a token."""

    state: int
    map: int
    itemsize: int
    token_in: int  # of all inputs
    token_out: int


@dataclass(frozen=True)
class Choice:
    """The method, bytes that the busiest rank sends with each (forward and backward), and why it was taken."""

    method: str
    bytes_sent: Mapping[str, int]
    reason: str


def choose_method(layout: Layout, cu_seqlens: object, sizes: Sizes) -> Choice:
    """What `method="auto"` takes. Cached; logged by `longweave.linear` when it is made."""
    return _choose(fragments(layout, cu_seqlens), sizes)


def bytes_by_method(layout: Layout, cu_seqlens: object, sizes: Sizes) -> dict[str, int]:
    """Bytes that the busiest rank sends in one forward and backward, for each method."""
    return _bytes(fragments(layout, cu_seqlens), sizes)


def check_method(method: object) -> None:
    if method not in ("auto", *METHODS):
        raise InputError(f'method is {method!r}; choose "auto", "affine", "reshard" or "gather"')


@lru_cache(maxsize=256)
def _choose(f: Fragments, sizes: Sizes) -> Choice:
    if not f.communicates:
        return Choice("affine", dict.fromkeys(METHODS, 0), "every document lies on one rank: nothing is sent")
    sent = _bytes(f, sizes)
    method = min(METHODS, key=lambda name: sent[name])
    listed = ", ".join(f"{name} {sent[name] / 2**20:.2f} MiB" for name in METHODS)
    reason = f"fewest bytes from the busiest rank, forward and backward: {listed}"
    log.info("linear attention by %s: %s", method, reason)
    return Choice(method, sent, reason)


@lru_cache(maxsize=256)
def _bytes(f: Fragments, sizes: Sizes) -> dict[str, int]:
    layout = Layout(f.table)
    contiguous = Layout.contiguous(layout.total, layout.world_size)
    moved = np.array([_moved(layout, contiguous, rank) for rank in range(layout.world_size)])
    counts = np.array(layout.counts, dtype=np.int64)
    inside = _summaries(fragments(contiguous, f.cu_seqlens), sizes)
    gathered = 2 * counts * (layout.world_size - 1) + (layout.total - counts)
    return {
        "affine": int(_summaries(f, sizes).max()),
        "reshard": int((moved.sum(1) * (sizes.token_in + sizes.token_out) + inside).max()),
        "gather": int((gathered * sizes.token_in).max()),
    }


def _summaries(f: Fragments, sizes: Sizes) -> np.ndarray:
    forward, backward = sent_bytes(f, sizes.state, sizes.map, sizes.itemsize)
    total: np.ndarray = forward + backward
    return total


def _moved(src: Layout, dst: Layout, rank: int) -> tuple[int, int]:
    """Tokens that a rank sends on the way there and on the way back; backward walks both ways again."""
    path = route(src, dst, rank)
    return sum(path.send_splits), sum(path.recv_splits)
