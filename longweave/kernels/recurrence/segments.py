"""Spans of local tokens, each with a state of its own, in the forms that kernels want them in.

    spans          (0, 70), (70, 73), (73, 73), (73, 140)
    table          chunks for the scan in torch, see `chunks.py`
    bounds         for flash-linear-attention, without empty segments:
                   cu_seqlens, on the device and on the host        0 70 73 140
                   (segment, number) of every chunk of 64           (0, 0) (0, 1) (1, 0) (2, 0) (2, 1)

A pack makes them once, and all its layers share them: nothing is uploaded after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longweave.kernels.recurrence.chunks import ChunkTable, Segment, chunk_table
from longweave.tensors import Indices

TILE = 64  # tokens
HOST = torch.device("cpu")


class Bounds(NamedTuple):
    """The same tensors in every call: flash-linear-attention keeps what it derives from them by identity."""

    on_device: Tensor
    on_host: Tensor
    tiles: Tensor  # (chunks, 2), on the device


class Segments:
    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.spans = tuple(spans)
        self._tables: dict[str, ChunkTable] = {}

    def table(self, device: torch.device) -> ChunkTable:
        if device.type not in self._tables:
            self._tables[device.type] = chunk_table(self.spans, device=device.type)
        return self._tables[device.type]

    @cached_property
    def filled(self) -> tuple[Segment, ...]:
        """Those with tokens."""
        return tuple((start, stop) for start, stop in self.spans if stop > start)

    def bounds(self, device: torch.device) -> Bounds:
        """Of segments that fill the tokens in order."""
        on_device, tiles = self._bounds.on(device)
        return Bounds(on_device, self._bounds.on(HOST)[0], tiles)

    @cached_property
    def _bounds(self) -> Indices:
        stops = np.array([0, *(stop for _, stop in self.filled)], dtype=np.int64)
        chunks = -(-np.diff(stops) // TILE)
        segment = np.repeat(np.arange(len(chunks)), chunks)
        first = np.cumsum(chunks) - chunks
        return Indices(stops, np.stack([segment, np.arange(len(segment)) - first[segment]], 1))

    def of_tokens(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """First token of every token's segment (tokens,), first and behind-the-last token of every segment."""
        starts, begins, ends = self._of_tokens.on(device)
        return starts, begins, ends

    @cached_property
    def _of_tokens(self) -> Indices:
        begins, ends = (np.array([span[i] for span in self.filled], dtype=np.int64) for i in (0, 1))
        return Indices(np.repeat(begins, ends - begins), begins, ends)
