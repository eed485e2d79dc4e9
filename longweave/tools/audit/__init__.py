"""`lw.audit`: is a training step across ranks right? Anybody's step, against one process.

    batch ─▶ step on every rank ─▶ loss · gradients · outputs ─┐
                                                               ├─▶ checks, in order ─▶ AuditReport, alike on all ranks
    batch ─▶ reference in one process ─────────────────────────┘

Each check says ok, names a fault with its place and likely cause, or is skipped and says why. A fault that changes
outputs or the loss changes what comes after it, too: that *follows* and is not named again. Adapters of models and of
Trainers are in `longweave.tools.audit`, beside `OneProcess`, the reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from longweave.comm.exchange import Comm, Group, resolve
from longweave.errors import GroupError, InputError, named, shown
from longweave.tools.audit import consistency, finite, gradients, values, visibility
from longweave.tools.audit.record import recorded
from longweave.tools.audit.references import OneProcess
from longweave.tools.audit.report import FAULT, AuditError, AuditFinding, AuditReport, faulty, skipped
from longweave.tools.audit.steps import IGNORE, AuditedStep, Inputs, StepFunction, StepResult, as_inputs
from longweave.tools.audit.subjects import parallelized, pooled, reference_of, subject_of, trainer
from longweave.tools.audit.trial import StepFailedError, Trial, everyone

__all__ = [
    "AuditError",
    "AuditFinding",
    "AuditReport",
    "AuditedStep",
    "OneProcess",
    "StepResult",
    "audit",
    "parallelized",
    "pooled",
    "recorded",
    "trainer",
]

T = TypeVar("T")
Checks = Callable[[Trial], Iterator[AuditFinding]]

FIRST: tuple[tuple[str, Checks], ...] = (("batch", consistency.same_batch), ("weights", consistency.same_weights))
# After a fault in one of FIRST or in these, nothing that follows could be believed.
ALONE: tuple[tuple[str, Checks], ...] = (
    ("finite", finite.finite),
    ("same twice", consistency.repeatable),
    ("labels used", consistency.labels_are_used),
    ("tokens", consistency.every_token),
)
STOPS = ("weights", "finite", "same twice", "labels used")
THEN: tuple[tuple[str, Checks], ...] = (
    ("visibility", visibility.visibility),
    ("outputs", values.outputs),
    ("labels", values.labels),
    ("loss", values.loss),
    ("gradients", gradients.gradients),
)


def audit(
    step: Any,
    batch: Any,
    *,
    reference: StepFunction | None = None,
    model: nn.Module | None = None,
    group: Group = None,
    loss: str | None = None,
    gradients: str | None = None,
    suspects: Mapping[str, StepFunction] | None = None,
    tolerance: float | None = None,
) -> AuditReport:
    """Is this training step right? Runs it some twenty times on a small batch, on every rank of the group.

    step: a function of a batch, longweave's or not, that runs forward and backward on this rank and returns its loss;
        better (loss, gradients, outputs, tokens) or a `longweave.tools.audit.StepResult`, with which more can be named.
        Or a model after `lw.parallelize` or `lw.pool`, or a transformers.Trainer.
    batch: {"input_ids": (tokens,), "cu_seqlens": […], "labels": (tokens,)}, the same on every rank; labels are not
        shifted, −100 does not count. A few hundred tokens in documents of different lengths show most; one that is
        cut between ranks, and one that is longer than the model's window, should be among them.
    reference: a function of a batch that does the same in one process, such as `OneProcess(model)`. By default an
        unmodified copy of `model`. It gets `position_ids` beside the rest.
    model: whose weights are compared between ranks and whose `.grad` is read where the step returns no gradients.
    loss: "mean" (default) or "sum", how the ranks' losses make the batch's. gradients: "same" (default) where they are
        reduced when the step returns, "sum" or "mean" where they have yet to be.
    suspects: references with a fault, by name: a step that equals one has that fault.
    tolerance: the largest error that is rounding, relative to the largest number; by default that of the dtype.

    Returns the same report on every rank. Raises `InputError` for arguments that do not fit; where they do not fit on
    some ranks only, the others raise `GroupError`.

        report = lw.audit(model, {"input_ids": ids, "cu_seqlens": cu_seqlens})   # lw.parallelize(model) before
        print(report)
        report.raise_if_faulty()
    """
    begin = time.perf_counter()
    comm = resolve(group)
    inputs = _on_all(comm, lambda: _checked(batch, tolerance))
    # After the batch: a Trainer wraps its model in DDP here, for which the ranks meet.
    subject = _on_all(comm, lambda: _subject(step, group, reference, model, loss, gradients, suspects))
    _compare_options(comm, subject, tolerance)
    trial = Trial(subject, inputs, comm, tolerance)
    with subject.gradients_kept():
        found: list[AuditFinding] = trial.everyone(list(_findings(trial)))[0]
    documents = len(trial.cu) - 1
    seconds = trial.everyone(time.perf_counter() - begin)[0]
    return AuditReport(comm.size, trial.cu[-1], documents, tuple(found), seconds)


def _compare_options(comm: Comm, subject: AuditedStep, tolerance: float | None) -> None:
    """With other ones, ranks would make other exchanges."""
    mine = {
        "tolerance": tolerance,
        "loss": subject.loss,
        "gradients": subject.gradients,
        "suspects": sorted(subject.suspects),
        "reference": "given" if subject.reference else None,
    }
    first, *others = everyone(comm, mine)
    for rank, theirs in enumerate(others, 1):
        other = [f"{name} is {first[name]!r} on rank 0 and {theirs[name]!r} on rank {rank}" for name in mine
                 if theirs[name] != first[name]]  # fmt: skip
        if other:
            raise GroupError(f"{'; '.join(other)}; give lw.audit the same on all ranks")


def _on_all(comm: Comm, make: Callable[[], T]) -> T:
    """What `make` returns, once it has on every rank; what it raises on one, with a GroupError on the others."""
    made: list[T] = []
    problem: Exception | None = None
    try:
        made.append(make())
    except Exception as error:
        problem = error
    texts = everyone(comm, f"{type(problem).__name__}: {problem}" if problem else "")
    try:
        if problem:
            raise problem
    finally:
        del problem  # whose traceback has this frame
    refused = [rank for rank, text in enumerate(texts) if text]
    if refused:
        raise GroupError(f"{named(refused)} of {comm.size} cannot be audited: {texts[refused[0]]}")
    return made[0]


def _checked(batch: Any, tolerance: float | None) -> Inputs:
    if tolerance is not None and not (isinstance(tolerance, float) and 0 < tolerance < 1):
        raise InputError(f"tolerance is {shown(tolerance)}; give a relative error between 0 and 1, such as 1e-4")
    inputs = as_inputs(batch)
    if inputs["cu_seqlens"][-1] < 2:
        raise InputError(f"the batch has {inputs['cu_seqlens'][-1]} tokens; give some documents of several tokens each")
    counting = int((inputs["labels"] != IGNORE).sum())
    if counting < 2:
        raise InputError(f"{counting} labels of the batch count; give labels, or most of a step is not looked at")
    return inputs


def _subject(
    step: Any,
    group: Group,
    reference: StepFunction | None,
    model: nn.Module | None,
    loss: str | None,
    gradients: str | None,
    suspects: Mapping[str, StepFunction] | None,
) -> AuditedStep:
    """The step with all that is known of it."""
    if not isinstance(model, nn.Module | None):
        raise InputError(f"model is {shown(model)}; give a torch.nn.Module")
    if not isinstance(suspects, Mapping | None) or not all(map(callable, (suspects or {}).values())):
        raise InputError(f"suspects is {shown(suspects)}; give functions of a batch by name")
    subject = subject_of(step, group, reference)
    if subject is None:
        if reference is None and model is not None:
            reference = reference_of(model)
        known = reference.suspects() if isinstance(reference, OneProcess) else {}
        subject = AuditedStep(step, model, reference, suspects=known)
    changes: dict[str, Any] = {"loss": loss, "gradients": gradients, "model": model}
    subject = replace(subject, **{name: value for name, value in changes.items() if value is not None})
    return replace(subject, suspects={**subject.suspects, **(suspects or {})})


def _cause_of(error: StepFailedError) -> str:
    if str(error).startswith("the reference"):
        return (
            "one process cannot be run like this: give reference=OneProcess(copy, forward), where forward(model, "
            "input_ids, position_ids) returns the logits of one document"
        )
    return "the step must take a full packed batch, twice"


def _findings(trial: Trial) -> Iterator[AuditFinding]:
    stopped = ""
    for name, check in (*FIRST, *ALONE, *THEN):
        if stopped:
            yield skipped(name, f"not looked at: {stopped} first")
            continue
        try:
            found = list(check(trial))
        except StepFailedError as error:
            found = [faulty(name, "error", str(error), "see the text", _cause_of(error))]
        yield from found
        if name == "batch":
            if any(f.verdict == FAULT for f in found):
                trial.inputs = consistency.rank_0s(trial)
        elif any(f.fault == "error" or (f.verdict == FAULT and name in STOPS) for f in found):
            stopped = found[0].fault
        elif any(f.verdict == FAULT and name == "tokens" for f in found):
            trial.roots.append("tokens")
