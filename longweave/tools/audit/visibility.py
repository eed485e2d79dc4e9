"""Who sees whom: one token is changed, and outputs move, or should have.

                       moves in the step          moves in one process
    documents          yes, in another document   no
    causality          yes, before the token      no
    window             yes, after the token       no
    exchange           no                         yes, after the token

Without outputs the losses of four sets of labels take their place (`probes.regions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longweave.tools.audit.probes import (
    Flags,
    changed,
    document_of,
    labels_of,
    may_notice,
    only_labels,
    regions,
    tokens_to_change,
)
from longweave.tools.audit.report import AuditFinding, faulty, right, skipped
from longweave.tools.audit.steps import StepResult
from longweave.tools.audit.trial import Floats, Trial, differences, listed, magnitude, row_maxima

NAMES = ("documents", "causality", "window", "exchange")


@dataclass(frozen=True)
class Movement:
    """How far each output moves when one token is changed, relative to the largest; NaN where it is not known."""

    token: int
    step: Floats
    reference: Floats | None


def visibility(trial: Trial) -> Iterator[AuditFinding]:
    """All of `NAMES`, over all tokens that are changed."""
    movements = [_movement(trial, token) for token in tokens_to_change(trial.cu)]
    for name, finder in (("documents", _documents), ("causality", _causality), ("window", _window)):
        yield _judged(trial, name, movements, finder)
    yield _judged(trial, "exchange", movements, _exchange)


# -- movements -----------------------------------------------------------------------------------------


def _movement(trial: Trial, token: int) -> Movement:
    if trial.has_outputs:
        after = trial.run(changed(trial.inputs, token)).here
        moved = _moved(trial, trial.base.here, after)
        if trial.step.reference is None:
            return Movement(token, moved, None)
        return Movement(token, moved, _moved(trial, trial.rounded, trial.expect(changed(trial.inputs, token))))
    step, reference = (np.full(trial.cu[-1], np.nan) for _ in range(2))
    for flags in regions(token, trial.cu).values():
        before = only_labels(trial.inputs, labels_of(flags, trial.cu))
        after_ = changed(before, token)
        step[flags] = trial.off(trial.run(after_).loss, trial.run(before).loss)
        if trial.step.reference is not None:
            reference[flags] = trial.off(float(trial.expect(after_).loss), float(trial.expect(before).loss))
    return Movement(token, step, None if trial.step.reference is None else reference)


def _moved(trial: Trial, before: StepResult, after: StepResult) -> Floats:
    """Of every token's output, as all ranks see it. Both runs have the same tokens on a rank."""
    assert before.outputs is not None
    assert after.outputs is not None
    assert before.tokens is not None
    largest = max(max(trial.everyone(magnitude(before.outputs))), 1e-6)
    rows = row_maxima(differences(after.outputs, before.outputs))
    return trial.by_token(before.tokens, rows / largest)


# -- verdicts ------------------------------------------------------------------------------------------


def _moves(trial: Trial, x: Floats) -> Flags:
    flags: Flags = np.nan_to_num(x, nan=0.0) > trial.limit / 10
    return flags


def _stays(trial: Trial, x: Floats) -> Flags:
    flags: Flags = x <= trial.limit / 10  # not where it is not known
    return flags


def _clearly_moves(trial: Trial, x: Floats) -> Flags:
    flags: Flags = np.nan_to_num(x, nan=0.0) > 10 * trial.limit
    return flags


def _own_document(trial: Trial, token: int) -> Flags:
    start, stop = document_of(token, trial.cu)
    at = np.arange(trial.cu[-1])
    return (at >= start) & (at < stop)


def _leaks(trial: Trial, movement: Movement) -> Flags:
    """Outputs that move and should not: as one process says, or else a causal model without windows."""
    still = ~may_notice(movement.token, trial.cu) if movement.reference is None else _stays(trial, movement.reference)
    return _moves(trial, movement.step) & still


def _documents(trial: Trial, movement: Movement) -> Flags:
    return _leaks(trial, movement) & ~_own_document(trial, movement.token)


def _causality(trial: Trial, movement: Movement) -> Flags:
    earlier = np.arange(trial.cu[-1]) < movement.token
    return _leaks(trial, movement) & _own_document(trial, movement.token) & earlier


def _window(trial: Trial, movement: Movement) -> Flags:
    later = np.arange(trial.cu[-1]) >= movement.token
    return _leaks(trial, movement) & _own_document(trial, movement.token) & later


def _exchange(trial: Trial, movement: Movement) -> Flags:
    """Outputs that should move and do not."""
    if movement.reference is None:
        return np.zeros(trial.cu[-1], dtype=bool)
    return _clearly_moves(trial, movement.reference) & _stays(trial, movement.step)


CAUSES = {
    "documents": "attention, a linear layer's state or a convolution goes on across document borders: cu_seqlens or "
    "a document mask does not reach it (packed SDPA with is_causal=True, a mask of ones, position_ids that go on)",
    "causality": "the causal mask is that of local indices, or of another order of the tokens than they lie in "
    "(zigzag shards masked as if they were contiguous), or there is none",
    "window": "the sliding window is dropped: an attention function or a strategy that has none was used",
    "exchange": "what ranks hold of a document is treated as a document of its own: keys and values, or the state of a "
    "linear layer, do not come from the other ranks (is the model parallel at all?)",
    "nearer": "the window is shorter than the model's, or tokens are masked that should be seen",
}
MEANS = {
    "documents": "outputs of other documents move",
    "causality": "outputs before the changed token move",
    "window": "outputs beyond the window move",
    "exchange": "outputs that should move stay",
}


def _judged(trial: Trial, name: str, movements: list[Movement], finder: object) -> AuditFinding:
    assert callable(finder)
    if name in ("window", "exchange") and trial.step.reference is None:
        return skipped(name, "needs a reference: only one process tells how far tokens see")
    found = trial.everyone([(m.token, np.flatnonzero(finder(trial, m)).tolist()) for m in movements])[0]
    hits = [(token, outputs) for token, outputs in found if outputs]
    how = f"{len(movements)} tokens changed" + ("" if trial.has_outputs else ", seen in the loss")
    if not hits:
        return right(name, f"{how}: {_fine(name)}")
    token, outputs = max(hits, key=lambda hit: len(hit[1]))
    trial.roots.append(name)
    where = f"token {token} changed{_held(trial, token)}: {len(outputs)} outputs, tokens {listed(outputs)}"
    cause = CAUSES[name]
    if name == "exchange" and trial.shards is not None and any(trial.owners[t] == trial.owners[token] for t in outputs):
        cause = CAUSES["nearer"]
    return faulty(name, name, f"{how}: {MEANS[name]}", where, cause)


def _held(trial: Trial, token: int) -> str:
    return f" (on rank {trial.owners[token]})" if trial.shards is not None else ""


def _fine(name: str) -> str:
    return {
        "documents": "no output of another document moves",
        "causality": "no output before moves",
        "window": "no output moves that one process leaves as it is",
        "exchange": "every output moves that one process moves",
    }[name]
