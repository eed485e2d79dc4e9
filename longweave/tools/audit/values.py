"""Outputs, labels and the loss against one process; what is off is held against references with one fault each."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import numpy as np

from longweave.tools.audit.probes import (
    counts,
    first_tokens,
    labels_at_borders,
    labels_of,
    only_labels,
    wrong_positions,
)
from longweave.tools.audit.report import AuditFinding, faulty, follows, right, skipped
from longweave.tools.audit.steps import StepResult
from longweave.tools.audit.trial import Trial, guilty_module, listed, row_errors

NO_REFERENCE = "needs a reference: lw.audit(…, reference=…)"


# -- outputs -------------------------------------------------------------------------------------------


def outputs(trial: Trial) -> Iterator[AuditFinding]:
    """Every token's output is that of one process."""
    if trial.step.reference is None:
        yield skipped("outputs", NO_REFERENCE)
        return
    if not trial.has_outputs:
        yield from _named_by_loss(trial)
        return
    here, wanted = trial.base.here, trial.wanted
    errors = trial.output_error(here, wanted)
    worst, allowed = trial.everyone((float(np.nanmax(errors)), trial.allowed(_rounding(trial))))[0]
    figure = f"worst error {worst:.1e} (limit {allowed:.0e})"
    if worst <= allowed:
        yield right("outputs", figure)
        return
    module = guilty_module(trial, here.modules, wanted.modules, here.tokens)
    if trial.roots:
        yield follows("outputs", figure + (f" from {module} on" if module else ""), trial.roots)
        trial.roots.append("outputs")
        return
    bad = trial.everyone(np.flatnonzero(errors > allowed).tolist())[0]
    ranks = sorted({int(trial.owners[t]) for t in bad})
    where = f"{len(bad)} of {trial.cu[-1]} tokens, on ranks {listed(ranks)}"
    where = f"{module}; {where}" if module else where
    yield _named(trial, "outputs", figure, where)


def _rounding(trial: Trial) -> float:
    """How far the outputs of one process are off."""
    if trial.rounded.outputs is None or trial.wanted.outputs is None:
        return 0.0
    tokens = trial.wanted.tokens
    return float(row_errors(trial.rounded.outputs, trial.wanted.outputs, tokens).max())


def _named_by_loss(trial: Trial) -> Iterator[AuditFinding]:
    """Without outputs: is the loss that of a reference with a fault?"""
    error = trial.off(trial.base.loss, float(trial.wanted.loss))
    if error <= trial.limit or trial.roots:
        yield skipped("outputs", "the step returns none")
        return
    found = _named(trial, "outputs", f"the loss is off by {error:.1e}", "the step returns no outputs to tell by")
    yield found if found.fault != "outputs" else skipped("outputs", "the step returns none")
    if found.fault == "outputs":
        trial.roots.remove("outputs")


def _named(trial: Trial, check: str, figure: str, where: str) -> AuditFinding:
    """The fault whose reference gives what the step gives."""
    for name, positions in wrong_positions(trial.shards, trial.cu).items() if trial.shards is not None else ():
        if _is(trial, trial.expect({**trial.inputs, "position_ids": positions})):
            trial.roots.append("positions")
            return faulty(
                check,
                "positions",
                f"{figure}; one process with positions {name} gives the same",
                where,
                "position_ids are made of the rank's own tokens; give each token its position in its whole document "
                "(pack.positions, batch.position_ids)",
            )
    for name, suspect in trial.step.suspects.items():
        if _is(trial, trial.expect(trial.inputs, suspect)):
            trial.roots.append(name)
            return faulty(
                check,
                name,
                f"{figure}; one process without {name} gives the same",
                where,
                "it is dropped: an attention function or kernel of this step does not take it, and does not say so",
            )
    trial.roots.append("outputs")
    return faulty(
        check,
        "outputs",
        figure,
        where,
        "none that is known here. With modules recorded, `where` names the first whose output is off though its input "
        "is right; look there for scale, mask, state or a convolution at shard borders",
    )


def _is(trial: Trial, suspect: StepResult) -> bool:
    """Does the step give what a reference with a fault gives, and nearer than the true one?"""
    if trial.has_outputs:
        found = float(np.nanmax(trial.output_error(trial.base.here, suspect)))
        true = float(np.nanmax(trial.output_error(trial.base.here, trial.wanted)))
    else:
        found = trial.off(trial.base.loss, float(suspect.loss))
        true = trial.off(trial.base.loss, float(trial.wanted.loss))
    found, true = trial.everyone((found, true))[0]
    return found <= trial.limit and found < true / 10


# -- labels --------------------------------------------------------------------------------------------


def labels(trial: Trial) -> Iterator[AuditFinding]:
    """Labels alone that lie behind a shard border, alone that do not, and alone that nobody should predict."""
    if trial.step.reference is None:
        yield skipped("labels", NO_REFERENCE)
        return
    starts = first_tokens(trial.cu)
    figure = "labels at the start of documents are not predicted"
    if counts(trial.inputs, starts):
        crossed = trial.run(only_labels(trial.inputs, starts)).loss
        if isfinite(crossed) and abs(crossed) > trial.limit * max(1.0, abs(float(trial.wanted.loss))):
            trial.roots.append("labels across documents")
            yield faulty(
                "labels",
                "labels across documents",
                f"with only the labels of first tokens the loss is {crossed:.4g}; it should be 0",
                "first tokens of documents",
                "labels are shifted through the whole packed sequence, so the last token of a document learns to "
                "predict the first of the next: shift inside documents, or set those labels to −100",
            )
            return
    if trial.shards is None:
        yield right("labels", f"{figure}; borders are not known, because the step does not return its tokens")
        return
    border = labels_at_borders(trial.owners, trial.cu)
    if not counts(trial.inputs, border):
        yield right("labels", f"{figure}; no document is cut between ranks")
        return
    at, inside = _alone(trial, border), _alone(trial, ~border & ~starts)
    if at <= trial.limit:
        yield right("labels", f"{figure}; the {int(border.sum())} behind shard borders count as they should")
        return
    text = f"with only the labels behind shard borders the loss is off by {at:.1e}"
    if inside > trial.limit:  # all labels are off: this is about something else
        root = trial.roots or ["loss"]
        yield follows("labels", f"{text}, with the others by {inside:.1e}", root)
        return
    trial.roots.append("labels at shard borders")
    yield faulty(
        "labels",
        "labels at shard borders",
        f"{text}, with all others it is right",
        f"labels of tokens {listed(np.flatnonzero(border).tolist())}",
        "labels are shifted after the sequence was divided, so that the last token of a shard has no target, or that "
        "of another place: shift first, then divide (lw.shard_batch does; lw.shift for labels that are divided)",
    )


def _alone(trial: Trial, keep: np.ndarray) -> float:
    if not counts(trial.inputs, keep):
        return 0.0
    inputs = only_labels(trial.inputs, keep)
    return trial.everyone(trial.off(trial.run(inputs).loss, float(trial.expect(inputs).loss)))[0]


# -- loss ----------------------------------------------------------------------------------------------


def loss(trial: Trial) -> Iterator[AuditFinding]:
    """The batch's loss, by the step's own convention."""
    found = trial.base.loss
    if trial.step.reference is None:
        yield skipped("loss", f"{found:.6g}; {NO_REFERENCE}")
        return
    wanted = float(trial.wanted.loss)
    rounding = trial.off(float(trial.rounded.loss), wanted)
    error = trial.off(found, wanted)
    figure = f"{found:.6g}, in one process {wanted:.6g}"
    if trial.everyone(error <= trial.allowed(rounding))[0]:
        yield right("loss", figure)
        return
    if trial.roots:
        yield follows("loss", figure, trial.roots)
        trial.roots.append("loss")
        return
    fault, text, cause = _loss_fault(trial, found, wanted)
    trial.roots.append(fault)
    yield faulty(
        "loss",
        fault,
        f"{figure}{text}",
        f"losses of the ranks {listed([f'{x:.4g}' for x in trial.base.losses], 8)}",
        cause,
    )


def _loss_fault(trial: Trial, found: float, wanted: float) -> tuple[str, str, str]:
    ranks = trial.comm.size
    how = trial.step.loss
    for factor, text in ((ranks, f": {ranks} times as much"), (1 / ranks, f": 1/{ranks} of it")):
        if ranks > 1 and trial.everyone(trial.off(found, factor * wanted) <= trial.limit)[0]:
            other = "mean" if how == "sum" else "sum"
            return (
                "loss scale",
                text,
                f"the ranks' losses were put together as their {how}. If your step's are to be taken as their {other}, "
                f'audit with loss="{other}"; else its loss is scaled by the number of ranks',
            )
    if trial.shards is not None and ranks > 1:
        means = [_mean_of(trial, np.isin(np.arange(trial.cu[-1]), tokens)) for tokens in trial.shards]
        if trial.everyone(trial.off(found, sum(means) / ranks) <= trial.limit)[0]:
            return (
                "normalisation",
                ": the mean of the ranks' means",
                "each rank divides by the labels that count among its own tokens, and their number differs: divide by "
                "the number of all ranks (batch.loss, num_items_in_batch)",
            )
    return (
        "loss",
        f": {found / wanted:.4g} times as much" if wanted else "",
        (
            "outputs are right, so it is in the loss itself: which labels count, weights of tokens, what it is divided "
            "by, an auxiliary loss that the reference does not have"
            if trial.has_outputs
            else "outputs are not known: let the step return (loss, gradients, outputs, tokens), which tells whether "
            "it is in the model (positions, masks, states) or in the loss (which labels count, what it is divided by)"
        ),
    )


def _mean_of(trial: Trial, tokens: np.ndarray) -> float:
    """The loss of the labels that these tokens predict."""
    keep = labels_of(tokens, trial.cu)
    return float(trial.expect(only_labels(trial.inputs, keep)).loss) if counts(trial.inputs, keep) else 0.0
