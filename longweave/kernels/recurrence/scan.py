"""The scan over chunks that every linear mixer shares, in stages that a caller may run one by one.

    forward     factors ──> summary (M, U) ──┐ states travel ┌──> run(initial_state) ──> out, final_state
                       └─────────────────────┴───────────────┘
    backward    factors ──> backward_summary C ──┐ gradients of states ┌──> backward_run ──> input gradients
                                                 └── dS_in = Mᵀ dS + C ┘

With one rank nothing travels: `run`, then `backward_run`. With many, a span is summed up, summaries are exchanged
and composed, and the span runs with its true incoming state. Forward and backward of one chunk, in the letters of
`mixer.py`:

    V' = T (U − W S)                dV' = Aᵀ dO + K dS'             T = (I + L)⁻¹
    O  = Q S + A V'                 dU  = Tᵀ dV'
    S' = D S + Kᵀ V'                dS  = D dS' + Qᵀ dO − Wᵀ dU
    dQ = dO Sᵀ     dA = dO V'ᵀ     dW = −dU Sᵀ     dL = −dU V'ᵀ     dK = V' dS'ᵀ     dD = <dS', S>

The backward recurrence needs no S, so `backward_summary` needs no forward. Only states at block borders are
kept for backward; those inside a block are computed again, next to where they are used: one more thin matmul
per chunk, for a block of 8 chunks an eighth of the memory.

States are float32 (float64 for float64 inputs) whatever the inputs are, and autocast is off in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from longweave.kernels.recurrence.chunks import Block, Piece
from longweave.kernels.recurrence.factors import ChunkedInputs, SolvedFactors
from longweave.kernels.recurrence.mixer import Factors

_Stage = TypeVar("_Stage", bound=Callable[..., Any])


def _exact(stage: _Stage) -> _Stage:
    """Stages are not traced by autograd, and autocast must not round their matmuls."""

    @wraps(stage)
    def wrapped(chunked: ChunkedInputs, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch.autocast(chunked.device.type, enabled=False):
            return stage(chunked, *args, **kwargs)

    return cast("_Stage", wrapped)


@dataclass
class Run:
    """What `run` gives: `out` (tokens, H, V), the final state per segment, and states for `backward_run`."""

    out: Tensor
    final_state: Tensor | None  # (segments, H, K, V)
    states: tuple[Tensor | None, ...]  # at the start of each block; None where they are zero, or not wanted


@_exact
def run(
    chunked: ChunkedInputs,
    initial_state: Tensor | None = None,
    *,
    out: Tensor | None = None,
    want_final: bool = True,
    want_states: bool = True,
) -> Run:
    """Outputs of every segment, started from `initial_state` (segments, H, K, V); None is zero.

    With `out` (tokens, H, V), results go to the tokens of the table's spans and others are left alone.
    """
    H = chunked.state_shape[0]
    out = chunked.empty_out() if out is None else out
    S = chunked.rows(initial_state)
    states: list[Tensor | None] = []
    for number, block in enumerate(chunked.blocks):
        solved = chunked.solve(number, last_use=True)
        f = solved.factors
        zero = initial_state is None and block.pieces[0].first
        states.append(S[_rows(block, H)].clone() if want_states and not zero else None)
        read, written = torch.empty_like(f.values), _room_for_written(f)
        for piece, now, row in _walk(block, H):
            s = None if initial_state is None and piece.first else S[row]
            _write(solved, now, s, written)
            if s is None:
                read[now] = 0
            else:
                torch.bmm(f.reads[now], s, out=read[now])
            going_on = now if want_final else _going_on(piece, H)
            count = going_on.stop - going_on.start
            if count:
                _advance(S[row][:count], f, going_on, written)
        read.baddbmm_(f.scores, written)
        block.scatter(read.view(block.n, H, *read.shape[1:]), out)
    return Run(out, chunked.segments(S) if want_final else None, tuple(states))


@_exact
def summary(chunked: ChunkedInputs) -> tuple[Tensor, Tensor | None]:
    """(U, M): the summaries of the segments. U (segments, H, K, V) is the final state from a zero state.

    M is in the form of the mixer's kind; None for the kind "none" and without segments.
    """
    H = chunked.state_shape[0]
    S = chunked.rows(None)
    M = _identity(chunked)
    for number, block in enumerate(chunked.blocks):
        solved = chunked.solve(number)
        written = _room_for_written(solved.factors)
        for piece, now, row in _walk(block, H):
            _write(solved, now, None if piece.first else S[row], written)
            _advance(S[row], solved.factors, now, written)
            if M is not None:
                _advance_transitions(M[row], solved, now, first=piece.first)
    return chunked.segments(S), None if M is None else chunked.segments(M)


@_exact
def backward_summary(chunked: ChunkedInputs, d_out: Tensor) -> Tensor:
    """C (segments, H, K, V): the gradient of each segment's incoming state if its final state had none."""
    H = chunked.state_shape[0]
    dS = chunked.rows(None)
    for number in reversed(range(len(chunked.blocks))):
        block = chunked.blocks[number]
        solved = chunked.solve(number)
        dO = block.gather(d_out, chunked.dtype).flatten(0, 1)
        d_written = torch.bmm(solved.factors.scores.mT, dO)
        dU = d_written if solved.T is None else torch.empty_like(d_written)
        for _, now, row in reversed(list(_walk(block, H))):
            _retreat(dS[row], solved, now, dO, d_written, dU)
    return chunked.segments(dS)


@_exact
def backward_run(
    chunked: ChunkedInputs,
    states: Sequence[Tensor | None],
    d_out: Tensor,
    d_final_state: Tensor | None = None,
    *,
    grads: Sequence[Tensor] | None = None,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of the inputs (each like its input) and of the initial state (segments, H, K, V).

    `chunked` must be one with `pullbacks`, `states` those of `run`. With `grads`, results go to the tokens
    of the table's spans in these tensors.
    """
    H, K, V = chunked.state_shape
    grads = chunked.empty_grads() if grads is None else grads
    dS = chunked.rows(d_final_state)
    for number in reversed(range(len(chunked.blocks))):
        block = chunked.blocks[number]
        solved = chunked.solve(number, last_use=True)
        f = solved.factors
        assert solved.pullback is not None, "backward_run needs ChunkedInputs(..., pullbacks=True)"
        dO = block.gather(d_out, chunked.dtype).flatten(0, 1)
        S, written = _replay(solved, block, H, states[number], (K, V))
        d_written = torch.bmm(f.scores.mT, dO)
        dU = d_written if solved.T is None else torch.empty_like(d_written)
        d_writes = torch.empty_like(f.writes)
        d_decay = None if f.decay is None else torch.empty_like(f.decay)
        for _, now, row in reversed(list(_walk(block, H))):
            ds = dS[row]
            torch.bmm(written[now], ds.mT, out=d_writes[now])
            if d_decay is not None:
                d_decay[now] = _decay_grad(ds, S[now], scalar=d_decay.shape[1] == 1)
            _retreat(ds, solved, now, dO, d_written, dU)
        d_factors = Factors(
            reads=torch.bmm(dO, S.mT),
            scores=torch.bmm(dO, written.mT),
            values=dU,
            writes=d_writes,
            erase=None if f.erase is None else torch.bmm(dU, S.mT).neg_(),
            within=None if f.within is None else torch.bmm(dU, written.mT).neg_().tril_(-1),
            decay=d_decay,
        )
        for dx, out in zip(solved.pullback(d_factors), grads, strict=True):
            block.scatter(dx, out)
    return tuple(grads), chunked.segments(dS)


# The steps of one piece. `now` are its rows of the factors; s and ds are views of its rows of the state.


def _walk(block: Block, H: int) -> Iterator[tuple[Piece, slice, slice]]:
    """(piece, its rows of the factors, its rows of the state), in the order of the scan."""
    for piece in block.pieces:
        yield piece, slice(piece.lo * H, piece.hi * H), slice(piece.row_lo * H, piece.row_hi * H)


def _rows(block: Block, H: int) -> slice:
    return slice(block.rows.start * H, block.rows.stop * H)


def _going_on(piece: Piece, H: int) -> slice:
    """Rows of the factors whose segments have a further chunk."""
    return slice(piece.lo * H, (piece.lo + piece.row_next - piece.row_lo) * H)


def _room_for_written(f: Factors) -> Tensor:
    return f.values if f.erase is None else torch.empty_like(f.values)


def _write(solved: SolvedFactors, now: slice, s: Tensor | None, written: Tensor) -> None:
    """V' = T (U − W s) for the rows `now` of `written`; None is s = 0. Without W, V' is U, and already
    there.
    """
    f = solved.factors
    if f.erase is None or solved.T is None:
        return
    X = f.values[now] if s is None else torch.baddbmm(f.values[now], f.erase[now], s, alpha=-1)
    torch.bmm(solved.T[now], X, out=written[now])


def _advance(s: Tensor, f: Factors, now: slice, written: Tensor) -> None:
    """s ← D s + Kᵀ V', in place."""
    if f.decay is not None:
        s.mul_(f.decay[now])
    s.baddbmm_(f.writes[now].mT, written[now])


def _retreat(ds: Tensor, solved: SolvedFactors, now: slice, dO: Tensor, d_written: Tensor, dU: Tensor) -> None:
    """dV' ← Aᵀ dO (there already) + K dS', dU ← Tᵀ dV', then ds ← D ds + Qᵀ dO − Wᵀ dU, all in place."""
    f = solved.factors
    d_written[now].baddbmm_(f.writes[now], ds)
    if f.decay is not None:
        ds.mul_(f.decay[now])
    ds.baddbmm_(f.reads[now].mT, dO[now])
    if f.erase is not None and solved.T is not None:
        torch.bmm(solved.T[now].mT, d_written[now], out=dU[now])
        ds.baddbmm_(f.erase[now].mT, dU[now], alpha=-1)


def _replay(
    solved: SolvedFactors, block: Block, H: int, start: Tensor | None, state: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """States at the start of every chunk of a block, and V'."""
    f = solved.factors
    S, written = f.values.new_empty((block.n * H, *state)), _room_for_written(f)
    S[: block.pieces[0].hi * H] = 0 if start is None else start
    for piece, now, _ in _walk(block, H):
        _write(solved, now, S[now], written)
        own = _going_on(piece, H)
        then = slice(now.stop, now.stop + own.stop - own.start)  # the chunks of the next step follow in the block
        if then.start < then.stop <= len(S):
            torch.mul(S[own], 1 if f.decay is None else f.decay[own], out=S[then])
            S[then].baddbmm_(f.writes[own].mT, written[own])
    return S, written


def _decay_grad(ds: Tensor, S: Tensor, *, scalar: bool) -> Tensor:
    """<dS', S> over what D multiplies: all of S, or its rows."""
    if scalar:  # a dot product without a K × V temporary
        return torch.bmm(ds.flatten(1).unsqueeze(1), S.flatten(1).unsqueeze(2))
    return (ds * S).sum(-1, keepdim=True)


def _identity(chunked: ChunkedInputs) -> Tensor | None:
    """An identity transition for each row of the state, in the form of the mixer's kind; None if there is nothing to
    hold.
    """
    kind, (H, K, _) = chunked.mixer.kind, chunked.state_shape
    batch = len(chunked.table.spans) * H
    if kind == "none" or batch == 0:
        return None
    one = torch.eye(K) if kind == "dense" else torch.ones((K if kind == "diagonal" else 1, 1))
    return one.to(chunked.device, chunked.dtype).repeat(batch, 1, 1)


def _advance_transitions(m: Tensor, solved: SolvedFactors, now: slice, *, first: bool) -> None:
    """m ← (D − Kᵀ T W) m, in place; m is still the identity at the first chunk."""
    f = solved.factors
    erased = None
    if f.erase is not None and solved.T is not None:
        erased = torch.bmm(solved.T[now], f.erase[now] if first else torch.bmm(f.erase[now], m))
    if f.decay is not None:
        m.mul_(f.decay[now])
    if erased is not None:
        m.baddbmm_(f.writes[now].mT, erased, alpha=-1)
