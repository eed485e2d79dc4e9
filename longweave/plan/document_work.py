"""What documents cost in a decoder: their tokens, and the query-key pairs of its attention layers, windows included.

work of a token   ┤            ·──────────────   layers with a window: no more than the window
                  ┤        · ·
                  ┤    · ·                       layers without one: all tokens before it
                  ┤··────────────────────────    every weight that it uses
                  └┴───────────┴──────────────▶ its place in the document
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import numpy as np

from longweave.plan import slices as sl
from longweave.plan.cost import Floats, areas
from longweave.plan.layout import Layout
from longweave.plan.mask import Mask


class AttentionWork(NamedTuple):
    """What the attention layers with one window cost together. It counts tokens, a query's own included."""

    window: int | None
    flops_per_pair: float
    kv_bytes: float  # of a token's K and V


@dataclass(frozen=True)
class DecoderWork:
    """What a decoder costs per token and per query-key pair, forward."""

    flops_per_token: float
    flops_per_pair: float  # of the attention layers without a window
    bytes_home: float  # of a token's hidden state
    kv_bytes: float  # of a token's K and V in the attention layers without a window
    is_chained: bool = False  # it has linear layers
    flops_to_sum_up: float = 0.0  # per token of a part that is summed up before it runs, on top
    windowed: tuple[AttentionWork, ...] = ()  # the attention layers with a window

    @property
    def attention(self) -> tuple[AttentionWork, ...]:
        """All attention layers."""
        return AttentionWork(None, self.flops_per_pair, self.kv_bytes), *self.windowed


def is_causal_mask(mask: Mask) -> bool:
    return bool((mask.rows[:, sl.HI] == 0).any())


def flops_of_ranks(mask: Mask, layout: Layout, work: DecoderWork) -> Floats:
    """Of each rank's tokens and query-key pairs, in a forward pass."""
    flops: Floats = np.array(layout.counts) * work.flops_per_token
    for seen, attention in attention_masks(mask, work):
        flops = flops + areas(seen, layout).astype(np.float64) * attention.flops_per_pair
    return flops


def attention_masks(mask: Mask, work: DecoderWork) -> Iterator[tuple[Mask, AttentionWork]]:
    """Every kind of attention layers, with what its queries see. Layers refuse windows where tokens see ahead."""
    for attention in work.attention:
        is_cut = attention.window is not None and is_causal_mask(mask)
        yield mask.windowed(attention.window) if is_cut else mask, attention  # type: ignore[arg-type]


def pairs_of(tokens: Floats, window: int | None, is_causal: bool) -> Floats:
    """Of documents of so many tokens."""
    if not is_causal:
        return tokens * tokens
    near = tokens if window is None else np.minimum(tokens, window)
    return near * (near + 1) / 2 + (tokens - near) * near


class _Piece(NamedTuple):
    """From token `start` on: the work done there, and linear · x + square · x² for x tokens more."""

    start: int
    done: float
    linear: float
    square: float


class Curve:
    """The work of the first tokens of a document: quadratic, and for every window linear from its end on.

    In documents whose tokens see all others it is linear.
    """

    def __init__(self, length: int, work: DecoderWork, is_causal: bool) -> None:
        self.length = length
        windows = {window for window, *_ in work.attention if is_causal and window is not None and window < length}
        self.pieces: list[_Piece] = []
        for start in sorted({0, *windows}):
            linear, square = work.flops_per_token, 0.0
            for window, flops, _ in work.attention:
                if not is_causal:
                    linear += flops * length
                elif window is not None and window <= start:
                    linear += flops * window
                else:  # Token start + i sees start + i + 1.
                    linear, square = linear + flops * (start + 0.5), square + flops / 2
            self.pieces.append(_Piece(start, self.of_first(start), linear, square))

    def of_first(self, tokens: float) -> float:
        """The work of so many first tokens."""
        if not tokens:
            return 0.0
        start, done, linear, square = self.pieces[bisect_right(self.pieces, tokens, key=lambda piece: piece.start) - 1]
        return done + linear * (tokens - start) + square * (tokens - start) ** 2

    def tokens_with(self, amount: float) -> float:
        """How many first tokens have so much work."""
        at = bisect_right(self.pieces, amount, key=lambda piece: piece.done) - 1
        start, done, linear, square = self.pieces[max(at, 0)]
        if not square:
            return start + (amount - done) / linear
        half = linear / (2 * square)
        return start + sqrt(half * half + (amount - done) / square) - half
