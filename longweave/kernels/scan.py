"""The scan over chunks that every linear mixer shares, in stages that a caller may run one by one.

    forward     prepare ──> summary (M, U) ──┐ states travel ┌──> run(initial_state) ──> out, final_state
                       └─────────────────────┴───────────────┘
    backward    prepare ──> backward_summary C ──┐ gradients of states ┌──> backward_run ──> input gradients
                                                 └── dS_in = Mᵀ dS + C ┘

With one rank nothing travels: `run`, then `backward_run`. With many, a span is summed up, pairs are exchanged
and composed (`affine.py`), and the span runs with its true incoming state. Forward and backward of one chunk,
in the letters of `mixer.py`:

    V' = U − W S                    dV' = Aᵀ dO + K dS'
    O  = Q S + A V'                 dS  = D dS' + Qᵀ dO − Wᵀ dV'
    S' = D S + Kᵀ V'                dQ = dO Sᵀ   dA = dO V'ᵀ   dU = dV'   dW = −dV' Sᵀ   dK = V' dS'ᵀ   dD = <dS', S>

The backward recurrence needs no S, so `backward_summary` needs no forward. Only states at block borders are
kept for backward; those inside a block are computed again, next to where they are used: one more thin matmul per
chunk, for a block of 8 chunks an eighth of the memory.

States are float32 (float64 for float64 inputs) whatever the inputs are, and autocast is off in here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from longweave.kernels.affine import Affine
from longweave.kernels.chunks import Block, ChunkTable, Piece
from longweave.kernels.mixer import Factors, Mixer, Pullback

CHUNK_HEADS_PER_BLOCK = {"cpu": 32}  # 32 × 64 tokens × 128 floats = 1 MiB per factor: measured best on CPU
CHUNK_HEADS_ELSEWHERE = 4096

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def _exact(stage: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Stages are not traced by autograd, and autocast must not round their matmuls."""

    def wrapped(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        prepared = args[0]
        assert isinstance(prepared, Prepared)
        with torch.no_grad(), torch.autocast(prepared.device.type, enabled=False):
            return stage(*args, **kwargs)

    wrapped.__name__, wrapped.__doc__ = stage.__name__, stage.__doc__
    return wrapped


@dataclass
class Prepared:
    """Inputs (tokens, heads, ...) of a mixer over the segments of a table.

    With `keep`, the factors made by one stage serve the next one too; without, they live for one block.
    Keep them when two stages follow each other: `summary` and `run`, or `backward_summary` and `backward_run`.
    """

    mixer: Mixer
    inputs: tuple[Tensor, ...]
    table: ChunkTable
    keep: bool = False
    _kept: dict[int, tuple[Factors, Pullback | None]] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of states, factors and summaries."""
        return torch.float64 if any(x.dtype == torch.float64 for x in self.inputs) else torch.float32

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.mixer.state_shape(self.inputs)

    @property
    def blocks(self) -> tuple[Block, ...]:
        size = CHUNK_HEADS_PER_BLOCK.get(self.device.type, CHUNK_HEADS_ELSEWHERE)
        return self.table.blocks(max(1, size // self.state_shape[0]))

    def factors(self, number: int) -> Factors:
        if number not in self._kept:
            factors = self.mixer.prepare(self._gather(number))
            if not self.keep:
                return factors
            self._kept[number] = (factors, None)
        return self._kept[number][0]

    def linearized(self, number: int) -> tuple[Factors, Pullback]:
        """Factors and pullback of a block."""
        factors, pullback = self._kept.get(number, (None, None))
        if factors is None or pullback is None:
            factors, pullback = self.mixer.linearize(self._gather(number))
            if self.keep:
                self._kept[number] = (factors, pullback)
        return factors, pullback

    def release(self, number: int) -> None:
        """Forget a kept block: its last use is over."""
        self._kept.pop(number, None)

    def _gather(self, number: int) -> list[Tensor]:
        block = self.blocks[number]
        return [block.gather(x, self.dtype) for x in self.inputs]

    def rows(self, per_segment: Tensor | None) -> Tensor:
        """(segments, H, K, V) or None for zeros -> a fresh (rows · H, K, V) in the dtype of states."""
        H, K, V = self.state_shape
        if per_segment is None:
            return torch.zeros((len(self.table.spans) * H, K, V), dtype=self.dtype, device=self.device)
        return self.table.to_rows(per_segment.to(self.dtype)).reshape(-1, K, V)

    def segments(self, rows: Tensor) -> Tensor:
        """(rows · H, ...) -> (segments, H, ...)."""
        return self.table.to_segments(rows.unflatten(0, (len(self.table.spans), self.state_shape[0])))


@dataclass
class Run:
    """What `run` gives: `out` (tokens, H, V), the final state per segment, and states for `backward_run`."""

    out: Tensor
    final_state: Tensor | None  # (segments, H, K, V)
    states: tuple[Tensor | None, ...]  # at the start of each block; None where they are zero, or not wanted


@_exact
def run(
    prepared: Prepared,
    initial_state: Tensor | None = None,
    *,
    out: Tensor | None = None,
    want_final: bool = True,
    want_states: bool = True,
) -> Run:
    """Outputs of every segment, started from `initial_state` (segments, H, K, V); None is zero.

    With `out` (tokens, H, V), results go to the tokens of the table's spans and others are left alone.
    """
    H, _, V = prepared.state_shape
    if out is None:
        x = prepared.inputs[0]
        make = torch.empty if prepared.table.covers(len(x)) else torch.zeros
        out = make((len(x), H, V), dtype=x.dtype, device=x.device)
    S = prepared.rows(initial_state)
    states: list[Tensor | None] = []
    for number, block in enumerate(prepared.blocks):
        f = prepared.factors(number)
        rows = slice(block.rows.start * H, block.rows.stop * H)
        fresh = initial_state is None and block.pieces[0].first
        states.append(S[rows].clone() if want_states and not fresh else None)
        read = torch.empty_like(f.values)
        written = f.values if f.erase is None else torch.empty_like(f.values)
        for piece, now, row in _walk(block, H):
            s = S[row]
            if initial_state is None and piece.first:
                read[now] = 0
                if f.erase is not None:
                    written[now] = f.values[now]
            else:
                if f.erase is not None:
                    torch.baddbmm(f.values[now], f.erase[now], s, alpha=-1, out=written[now])
                torch.bmm(f.reads[now], s, out=read[now])
            _advance(s, piece, H, f, now, written[now], only_next=not want_final)
        read.baddbmm_(f.scores, written)
        block.scatter(read.unflatten(0, (block.n, H)), out)
    return Run(out, prepared.segments(S) if want_final else None, tuple(states))


@_exact
def summary(
    prepared: Prepared, *, maps: Sequence[int] = (), all_maps: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(U, M): the affine maps of the segments. U (segments, H, K, V) is the final state from a zero state.

    M, in the form of the mixer's kind, only for the segments in `maps` and in that order (or all): the first
    segment of a document has no incoming state, so nobody asks for its M. None if the kind is "none" or none
    is asked for.
    """
    H, K, _ = prepared.state_shape
    table = prepared.table
    wanted = list(range(len(table.spans))) if all_maps else list(maps)
    row_of = {int(segment): row for row, segment in enumerate(table.order)}
    rows = sorted(row_of[segment] for segment in wanted)  # rows that are alive are a prefix here, too
    S = prepared.rows(None)
    M = _identity(prepared, len(rows) * H, K)
    for number, block in enumerate(prepared.blocks):
        f = prepared.factors(number)
        for piece, now, row in _walk(block, H):
            s = S[row]
            written = f.values[now]
            if f.erase is not None and not piece.first:
                written = torch.baddbmm(written, f.erase[now], s, alpha=-1)
            _advance(s, piece, H, f, now, written)
            lo, hi = bisect_left(rows, piece.row_lo), bisect_left(rows, piece.row_hi)
            if M is not None and lo < hi:
                chunks = [piece.lo + row - piece.row_lo for row in rows[lo:hi]]
                _advance_maps(M[lo * H : hi * H], f.take(_pick(chunks, H, M.device)), first=piece.first)
    if M is not None:
        slots = torch.tensor([rows.index(row_of[segment]) for segment in wanted])
        M = M.unflatten(0, (len(rows), H)).index_select(0, slots.to(M.device, non_blocking=True))
    return prepared.segments(S), M


@_exact
def backward_summary(prepared: Prepared, d_out: Tensor) -> Tensor:
    """C (segments, H, K, V): the gradient of each segment's incoming state if its final state had none."""
    H = prepared.state_shape[0]
    dS = prepared.rows(None)
    for number in reversed(range(len(prepared.blocks))):
        block = prepared.blocks[number]
        f = prepared.linearized(number)[0] if prepared.keep else prepared.factors(number)
        dO = block.gather(d_out, prepared.dtype).flatten(0, 1)
        dV = torch.bmm(f.scores.mT, dO)
        for _, now, row in reversed(list(_walk(block, H))):
            _retreat(dS[row], f, now, dO[now], dV[now])
    return prepared.segments(dS)


@_exact
def backward_run(
    prepared: Prepared,
    states: Sequence[Tensor | None],
    d_out: Tensor,
    d_final_state: Tensor | None = None,
    *,
    grads: Sequence[Tensor] | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of the inputs (each like its input) and of the initial state (segments, H, K, V).

    `states` are those of `run`. With `grads`, results go to the tokens of the table's spans in these tensors.
    """
    H = prepared.state_shape[0]
    if grads is None:
        make = torch.empty_like if prepared.table.covers(len(d_out)) else torch.zeros_like
        grads = [make(x, memory_format=torch.contiguous_format) for x in prepared.inputs]
    dS = prepared.rows(d_final_state)
    for number in reversed(range(len(prepared.blocks))):
        block = prepared.blocks[number]
        f, pullback = prepared.linearized(number)
        prepared.release(number)
        dO = block.gather(d_out, prepared.dtype).flatten(0, 1)
        S, written = _replay(f, block, H, states[number], dS.shape[-2:])
        dV = torch.bmm(f.scores.mT, dO)
        d_writes = torch.empty_like(f.writes)
        d_decay = None if f.decay is None else torch.empty_like(f.decay)
        for _, now, row in reversed(list(_walk(block, H))):
            ds = dS[row]
            torch.bmm(written[now], ds.mT, out=d_writes[now])
            if d_decay is not None:
                d_decay[now] = _decay_grad(ds, S[now], scalar=d_decay.shape[1] == 1)
            _retreat(ds, f, now, dO[now], dV[now])
        d_factors = Factors(
            reads=torch.bmm(dO, S.mT),
            scores=torch.bmm(dO, written.mT),
            values=dV,
            writes=d_writes,
            erase=None if f.erase is None else torch.bmm(dV, S.mT).neg_(),
            decay=d_decay,
        )
        for dx, out in zip(pullback(d_factors), grads, strict=True):
            if dx is not None:
                block.scatter(dx, out)
    return tuple(grads), prepared.segments(dS)


def _walk(block: Block, H: int) -> Iterator[tuple[Piece, slice, slice]]:
    """(piece, its rows of the factors, its rows of the state), in the order of the scan."""
    for piece in block.pieces:
        yield piece, slice(piece.lo * H, piece.hi * H), slice(piece.row_lo * H, piece.row_hi * H)


def _advance(
    s: Tensor, piece: Piece, H: int, f: Factors, now: slice, written: Tensor, *, only_next: bool = False
) -> None:
    """s ← D s + Kᵀ V', in place; with `only_next`, only for segments that go on."""
    if only_next:
        count = (piece.row_next - piece.row_lo) * H
        if count == 0:
            return
        s, now, written = s[:count], slice(now.start, now.start + count), written[:count]
    if f.decay is not None:
        s.mul_(f.decay[now])
    s.baddbmm_(f.writes[now].mT, written)


def _identity(prepared: Prepared, batch: int, K: int) -> Tensor | None:
    """`batch` identity maps in the form of the mixer's kind; None if there is nothing to hold."""
    kind = prepared.mixer.kind
    if kind == "none" or batch == 0:
        return None
    one = torch.eye(K) if kind == "dense" else torch.ones((K if kind == "diagonal" else 1, 1))
    return one.to(prepared.device, prepared.dtype).repeat(batch, 1, 1)


def _pick(chunks: list[int], H: int, device: torch.device) -> slice | Tensor:
    """Rows of the factors that belong to some chunks: a slice when these are neighbours."""
    if chunks[-1] - chunks[0] + 1 == len(chunks):
        return slice(chunks[0] * H, (chunks[-1] + 1) * H)
    index = torch.tensor(chunks).unsqueeze(1) * H + torch.arange(H)
    return index.flatten().to(device, non_blocking=True)


def _advance_maps(m: Tensor, f: Factors, *, first: bool) -> None:
    """m ← (D − Kᵀ W) m, in place; m is still the identity at the first chunk."""
    erased = f.erase if f.erase is None or first else torch.bmm(f.erase, m)
    if f.decay is not None:
        m.mul_(f.decay)
    if erased is not None:
        m.baddbmm_(f.writes.mT, erased, alpha=-1)


def _retreat(ds: Tensor, f: Factors, now: slice, dO: Tensor, dV: Tensor) -> None:
    """dV' ← Aᵀ dO (given) + K dS', then ds ← D ds + Qᵀ dO − Wᵀ dV', both in place."""
    dV.baddbmm_(f.writes[now], ds)
    if f.decay is not None:
        ds.mul_(f.decay[now])
    ds.baddbmm_(f.reads[now].mT, dO)
    if f.erase is not None:
        ds.baddbmm_(f.erase[now].mT, dV, alpha=-1)


def _replay(
    f: Factors, block: Block, H: int, start: Tensor | None, state: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """States at the start of every chunk of a block, and V'."""
    S = f.values.new_empty((block.n * H, *state))
    written = f.values if f.erase is None else torch.empty_like(f.values)
    S[: block.pieces[0].hi * H] = 0 if start is None else start
    for piece, now, _ in _walk(block, H):
        if f.erase is not None:
            torch.baddbmm(f.values[now], f.erase[now], S[now], alpha=-1, out=written[now])
        count = (piece.row_next - piece.row_lo) * H
        then = slice(now.stop, min(now.stop + count, len(S)))  # the next step's chunks follow in the block
        if then.stop > then.start:
            own = slice(now.start, now.start + count)
            S[then] = S[own] if f.decay is None else S[own] * f.decay[own]
            S[then].baddbmm_(f.writes[own].mT, written[own])
    return S, written


def _decay_grad(ds: Tensor, S: Tensor, *, scalar: bool) -> Tensor:
    """<dS', S> over what D multiplies: all of S, or its rows."""
    if scalar:  # a dot product without a K × V temporary
        return torch.bmm(ds.flatten(1).unsqueeze(1), S.flatten(1).unsqueeze(2))
    return (ds * S).sum(-1, keepdim=True)
