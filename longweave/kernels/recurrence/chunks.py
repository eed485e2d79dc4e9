"""Packed ragged segments as a table of equal chunks.

Three segments of 5, 2 and 7 tokens, cut into chunks of C = 4, longest segment first::

    row 0 (7 tokens)   | a a a a | a a a . |
    row 1 (5 tokens)   | b b b b | b . . . |
    row 2 (2 tokens)   | c c . . |
                          step 0    step 1
    chunk number          0, 1, 2   3, 4

Chunks are numbered step by step, so the chunks of one step are neighbours and belong to the first `alive`
rows of the state. A scan therefore does one batched operation per step: a document of 64 Ki tokens is 1024
steps, 500 documents of 50 tokens are one. Dots are padding: tokens of zeros, which no mixer can notice.

Work is done in blocks of neighbouring chunks, so that what one block needs stays in the cache. A block holds
either several whole steps or a part of one step. Everything here is decided from host integers, once: whoever keeps
the table keeps its blocks and index tensors with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from longweave.errors import InputError
from longweave.tensors import Indices

Segment = tuple[int, int]  # (start, stop) of packed tokens
# Time per slot of a chunk of this size, relative to the best. Measured on CPU, forward and backward, with
# 128 × 128 states; elsewhere larger chunks are taken to pay, as they make fewer and larger kernels.
COST_PER_SLOT = {"cpu": {64: 1.06, 32: 1.0, 16: 1.3}}
COST_ELSEWHERE = {64: 1.0, 32: 1.3, 16: 2.0}


@dataclass(frozen=True)
class Piece:
    """The chunks `lo:hi` of a block (counted from its start), which act on state rows `row_lo:row_hi`.

    Rows `row_lo:row_next` have a further chunk after this one; the others end here.
    """

    lo: int
    hi: int
    row_lo: int
    row_hi: int
    row_next: int
    first: bool  # step 0: no earlier chunk of these segments exists


@dataclass(frozen=True, eq=False)
class Block:
    """`n` neighbouring chunks and the tokens in them."""

    n: int
    chunk: int
    pieces: tuple[Piece, ...]
    tokens: np.ndarray  # (n, C) token of every slot, -1 for padding

    @property
    def rows(self) -> slice:
        """State rows that the block touches: its first step has the most segments alive."""
        return slice(self.pieces[0].row_lo, self.pieces[0].row_hi)

    @cached_property
    def run(self) -> tuple[int, int] | None:
        """The tokens as one half-open span, when they are consecutive and padding comes only at the end."""
        flat = self.tokens.reshape(-1)
        count = int((flat >= 0).sum())
        start = int(flat[0])
        return (start, start + count) if np.array_equal(flat[:count], np.arange(start, start + count)) else None

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(tokens, H, ...) -> (n, H, C, ...) in `dtype`; padding is zero."""
        slots = self.n * self.chunk
        if self.run is not None:
            rows = x[self.run[0] : self.run[1]]
            if len(rows) < slots:
                rows = torch.cat([rows, rows.new_zeros((slots - len(rows), *x.shape[1:]))])
        else:
            tokens, valid = self._index.on(x.device)
            if len(valid) == slots:
                rows = x.index_select(0, tokens)
            else:
                rows = x.new_zeros((slots, *x.shape[1:])).index_copy_(0, valid, x.index_select(0, tokens))
        by_head = rows.reshape(self.n, self.chunk, *x.shape[1:]).transpose(1, 2)
        return torch.empty(by_head.shape, dtype=dtype, device=x.device).copy_(by_head)

    def scatter(self, chunks: Tensor, out: Tensor) -> None:
        """Write (n, H, C, ...) to its tokens of `out` (tokens, H, ...), dropping padding, casting once."""
        by_token = chunks.transpose(1, 2)
        if self.run is not None:
            start, stop = self.run
            if stop - start == self.n * self.chunk:
                out[start:stop].view(by_token.shape).copy_(by_token)
            else:
                out[start:stop].copy_(by_token.flatten(0, 1)[: stop - start])
            return
        tokens, valid = self._index.on(out.device)
        rows = by_token.to(out.dtype).flatten(0, 1)
        if len(valid) < len(rows):
            rows = rows.index_select(0, valid)
        out.index_copy_(0, tokens, rows)

    @cached_property
    def _index(self) -> Indices:
        """(tokens, slots): which token sits in which slot, without padding."""
        flat = self.tokens.reshape(-1)
        slots = np.flatnonzero(flat >= 0)
        return Indices(flat[slots], slots)


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """How `spans` of the local tokens are cut into chunks. Make one with `chunk_table`."""

    spans: tuple[Segment, ...]
    chunk: int
    _blocks: dict[int, tuple[Block, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def starts(self) -> np.ndarray:
        return np.array([start for start, _ in self.spans], dtype=np.int64)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([stop - start for start, stop in self.spans], dtype=np.int64)

    @cached_property
    def order(self) -> np.ndarray:
        """Segment of every state row: longest first, so that rows alive at a step are a prefix."""
        return np.argsort(-self.lengths, kind="stable")

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Number of segments that have a chunk at each step."""
        chunks = np.sort(-(-self.lengths // self.chunk))
        steps = np.arange(chunks.max(initial=0))
        return tuple((len(chunks) - np.searchsorted(chunks, steps, side="right")).tolist())

    def covers(self, total: int) -> bool:
        """True when every one of `total` tokens lies in a span."""
        return int(self.lengths.sum()) == total

    def blocks(self, chunks_per_block: int) -> tuple[Block, ...]:
        """The chunks in blocks of about `chunks_per_block`, in the order of the scan."""
        if chunks_per_block not in self._blocks:
            self._blocks[chunks_per_block] = tuple(self._cut(chunks_per_block))
        return self._blocks[chunks_per_block]

    def _cut(self, size: int) -> Iterable[Block]:
        pieces: list[tuple[int, int, int]] = []  # (step, row_lo, row_hi)
        held = 0
        for step, alive in enumerate(self.alive):
            if pieces and held + alive > size:
                yield self._block(pieces)
                pieces, held = [], 0
            if alive > size:
                for lo in range(0, alive, size):
                    yield self._block([(step, lo, min(lo + size, alive))])
            else:
                pieces.append((step, 0, alive))
                held += alive
        if pieces:
            yield self._block(pieces)

    def _block(self, parts: list[tuple[int, int, int]]) -> Block:
        pieces: list[Piece] = []
        tokens: list[np.ndarray] = []
        at = 0
        for step, lo, hi in parts:
            alive_next = self.alive[step + 1] if step + 1 < len(self.alive) else 0
            row_next = min(max(alive_next, lo), hi)
            pieces.append(Piece(at, at + hi - lo, lo, hi, row_next, first=step == 0))
            at += hi - lo
            segment = self.order[lo:hi]
            inside = step * self.chunk + np.arange(self.chunk)[None, :]
            token = self.starts[segment][:, None] + inside
            tokens.append(np.where(inside < self.lengths[segment][:, None], token, -1))
        return Block(at, self.chunk, tuple(pieces), np.concatenate(tokens))

    def to_rows(self, per_segment: Tensor) -> Tensor:
        """(segments, ...) -> state rows."""
        return per_segment.index_select(0, self._rows.on(per_segment.device)[0])

    def to_segments(self, rows: Tensor) -> Tensor:
        """State rows -> (segments, ...)."""
        return rows.index_select(0, self._rows.on(rows.device)[1])

    @cached_property
    def _rows(self) -> Indices:
        """(segment of each row, row of each segment)."""
        return Indices(self.order, np.argsort(self.order, kind="stable"))


def chunk_table(spans: Iterable[Sequence[int]], chunk: int | None = None, *, device: str = "cpu") -> ChunkTable:
    """The table of `spans` (start, stop): one segment each, disjoint, in any order; empty ones are allowed.

    Without `chunk`, the size with the least work on this type of device: 16, 32 or 64, padding counted.

    Example: `chunk_table([(0, 5), (5, 7), (7, 14)], chunk=4)` is the picture at the top.
    """
    segments = tuple((int(start), int(stop)) for start, stop in spans)
    if chunk is None:
        cost = COST_PER_SLOT.get(device, COST_ELSEWHERE)
        chunk = min(cost, key=lambda C: cost[C] * sum(-(-(b - a) // C) * C for a, b in segments))
    if chunk < 1 or chunk & (chunk - 1):
        raise InputError(f"chunk size is {chunk}; give a power of two such as 64")
    end = 0
    for start, stop in sorted(span for span in segments if span[0] != span[1]):
        if start < end or stop < start:
            raise InputError(f"span ({start}, {stop}) runs backwards or overlaps another; give disjoint spans")
        end = stop
    return ChunkTable(segments, chunk)


def spans_of(cu_seqlens: Sequence[int] | np.ndarray | Tensor | None, total: int) -> tuple[Segment, ...]:
    """Segments of `total` packed tokens as spans. None means one segment. `cu_seqlens` are host integers.

    A tensor is read with one `tolist`, which waits for the device if it is not on the host: pass host
    integers.
    """
    if cu_seqlens is None:
        return ((0, total),)
    values = cu_seqlens.tolist() if isinstance(cu_seqlens, np.ndarray | Tensor) else cu_seqlens
    bounds = tuple(int(x) for x in values)
    if len(bounds) < 1 or bounds[0] != 0 or bounds[-1] != total or any(a > b for a, b in pairwise(bounds)):
        shown = bounds if len(bounds) <= 8 else (*bounds[:4], "...", *bounds[-3:])
        raise InputError(f"cu_seqlens is {shown}; it must rise from 0 to the number of tokens, {total}")
    return tuple(pairwise(bounds))
