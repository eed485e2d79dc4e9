"""Every parameter's gradient against one process, and what a wrong one is a multiple of.

ratio       of the step's gradient to the true one, by least squares
residual    what is left of the step's gradient when that multiple is taken away; 0: nothing but the scale is wrong
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longweave.comm.exchange import all_reduce_sum
from longweave.tools.audit.report import AuditFinding, faulty, follows, right, skipped
from longweave.tools.audit.trial import Trial, listed
from longweave.tools.audit.values import NO_REFERENCE

SMALL = (
    1e-2  # of the largest gradient: below, errors are relative to this; sums that nearly cancel round like their terms
)
MULTIPLE = 1e-2  # residual of a gradient that is a multiple of the true one


@dataclass(frozen=True)
class GradientError:
    """One parameter."""

    error: float  # relative to the largest entry
    ratio: float
    residual: float
    missing: bool  # no gradient, or zeros, where there should be one


Errors = dict[str, GradientError]


def gradients(trial: Trial) -> Iterator[AuditFinding]:
    """As the optimizer finds them."""
    if trial.step.reference is None:
        yield skipped("gradients", NO_REFERENCE)
        return
    found = trial.base.here.gradients or {}
    wanted = trial.wanted.gradients or {}
    if not any(trial.everyone(bool(found))) or not wanted:
        yield skipped("gradients", "the step returns none: return them by name, or give lw.audit(…, model=model)")
        return
    if not any(grad is not None and bool(grad.any()) for grad in wanted.values()):
        yield skipped("gradients", "those of one process are zero everywhere: begin with other weights")
        return
    if trial.step.gradients != "same":
        found = _over_ranks(trial, found, wanted, trial.step.gradients)
    by_rank = trial.everyone(_errors(found, wanted))
    limits = _limits(trial, wanted)
    wrong = {name for errors in by_rank for name, e in errors.items() if not e.error <= limits[name]}
    names = [name for name in wanted if name in wrong]
    worst = max(((e.error, name) for errors in by_rank for name, e in errors.items()), default=(0.0, ""))
    figure = f"{len(by_rank[0])} parameters, worst error {worst[0]:.1e} at {worst[1]} (limit {trial.limit:.0e})"
    if not names:
        yield right("gradients", figure)
        return
    figure = f"{len(names)} of {len(by_rank[0])} parameters are off, worst error {worst[0]:.1e} at {worst[1]}"
    others = [root for root in trial.roots if root != "loss scale"]
    if others:
        yield follows("gradients", figure, trial.roots)
        return
    yield from _explained(trial, found, wanted, by_rank, names, figure)


def _explained(
    trial: Trial,
    found: Mapping[str, Tensor | None],
    wanted: Mapping[str, Tensor | None],
    by_rank: list[Errors],
    names: list[str],
    figure: str,
) -> Iterator[AuditFinding]:
    if trial.step.gradients == "same" and trial.comm.size > 1:
        unlike = [name for name in names if _unlike([errors[name] for errors in by_rank])]
        if unlike:
            yield from _unreduced(trial, found, wanted, unlike, figure)
            names = [name for name in names if name not in unlike]
    errors = by_rank[0]
    missing = [name for name in names if errors[name].missing]
    if missing:
        yield faulty(
            "gradients",
            "gradients missing",
            f"{len(missing)} parameters have no gradient, or zeros",
            listed(missing),
            "they are frozen, detached or not used: a kernel that takes no sinks or biases, a tensor that was "
            "made again without its graph, a backward that does not reach them",
        )
    multiple = max(MULTIPLE, 2 * trial.limit)
    scaled: dict[float, list[str]] = {}
    rest = []
    for name in names:
        e = errors[name]
        if e.missing:
            continue
        if e.residual > multiple or _near(e.ratio, 1.0, multiple):
            rest.append(name)
        else:
            scaled.setdefault(_round(e.ratio, trial.comm.size, multiple / 4), []).append(name)
    for ratio, some in scaled.items():
        if "loss scale" in trial.roots and trial.base.loss and _near(ratio, trial.base.loss / float(trial.wanted.loss)):
            yield follows("gradients", f"{len(some)} parameters have {_times(ratio)} their gradient", trial.roots)
            continue
        yield faulty(
            "gradients",
            "gradient scale",
            f"{len(some)} of {len(errors)} parameters have {_times(ratio, trial.comm.size)} their gradient",
            "every parameter" if len(some) == len(errors) else listed(some),
            _cause_of(ratio, trial.comm.size, len(some) == len(errors)),
        )
    if rest:
        first = max(rest, key=lambda name: errors[name].error)
        yield faulty(
            "gradients",
            "gradients",
            figure,
            f"{listed(rest)}; worst {first}",
            "outputs and loss are right, so it is in backward: gradients of keys, values, states or halos that do not "
            "go back to the rank that holds them, parts that are lost, or stale ones that were added",
        )


def _unreduced(
    trial: Trial,
    found: Mapping[str, Tensor | None],
    wanted: Mapping[str, Tensor | None],
    names: list[str],
    figure: str,
) -> Iterator[AuditFinding]:
    """Gradients that differ between ranks."""
    some = {name: wanted[name] for name in names}
    fits = {}
    for how in ("sum", "mean"):
        errors = _errors(_over_ranks(trial, found, some, how), some, _scale(wanted))
        fits[how] = trial.everyone(max(e.error for e in errors.values()) <= 10 * trial.limit)[0]
    how = next((how for how, fit in fits.items() if fit), "")
    text = f"; their {'SUM' if how == 'sum' else 'mean'} over ranks is right" if how else ""
    yield faulty(
        "gradients",
        "gradients not reduced",
        f"{len(names)} parameters have other gradients on other ranks{text}",
        listed(names),
        (
            f"they are never {'summed' if how == 'sum' else 'averaged'} over the ranks of the group before the update: "
            f"call lw.reduce_gradients(model, group), or wrap the model in DDP or FSDP, which average. "
            f'If the audited step stops before that, audit with gradients="{how}"'
        )
        if how
        else "they are reduced over another group than the audited one, or on some ranks only",
    )


# -- numbers -------------------------------------------------------------------------------------------


def _over_ranks(
    trial: Trial, found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], how: str
) -> dict[str, Tensor | None]:
    """The SUM or mean over ranks; a parameter without a gradient on this rank has zeros."""
    names = [name for name, w in wanted.items() if w is not None]
    parts = []
    for name in names:
        g, w = found.get(name), wanted[name]
        assert w is not None
        parts.append(torch.zeros_like(w, dtype=torch.float64) if g is None else g.to(w.device, torch.float64))
    divide = trial.comm.size if how == "mean" else 1
    return {name: total / divide for name, total in zip(names, all_reduce_sum(parts, trial.comm), strict=True)}


def _scale(wanted: Mapping[str, Tensor | None]) -> float:
    """The largest entry of all gradients."""
    return max((float(w.abs().max()) for w in wanted.values() if w is not None and w.numel()), default=0.0)


def _errors(
    found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], scale: float | None = None
) -> Errors:
    scale = _scale(wanted) if scale is None else scale
    return {name: _error(found.get(name), w, SMALL * scale) for name, w in wanted.items()}


def _error(found: Tensor | None, wanted: Tensor | None, small: float) -> GradientError:
    if wanted is None or not wanted.numel():
        size = 0.0 if found is None or not found.numel() else float(found.abs().max())
        return GradientError(0.0 if size <= small else size / max(small, 1e-12), 1.0, 1.0, False)
    w = wanted.double().cpu().reshape(-1)
    if found is None or found.shape != wanted.shape:
        g = torch.zeros_like(w)
    else:
        g = found.double().cpu().reshape(-1)
    scale = max(float(w.abs().max()), small, 1e-30)
    error = float((g - w).abs().max()) / scale
    ratio = float(g @ w / (w @ w).clamp_min(1e-60))
    residual = float((g - ratio * w).norm() / g.norm().clamp_min(1e-30))
    silent = not bool(g.any()) and bool(w.any())
    return GradientError(error, ratio, residual, silent)


def _limits(trial: Trial, wanted: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Twice what one process is off by, or the limit of the dtype. Rank 0's: all ranks decide alike."""
    rounding = _errors(trial.rounded.gradients or {}, wanted)
    mine = {name: trial.allowed(rounding[name].error) for name in wanted}
    return trial.everyone(mine)[0]


def _unlike(errors: list[GradientError]) -> bool:
    """Do the ranks' gradients of a parameter differ among each other? Equal ones are off in equal ways."""
    first = errors[0]
    return any(
        abs(e.ratio - first.ratio) > 1e-6 * max(abs(first.ratio), 1.0) or abs(e.residual - first.residual) > 1e-6
        for e in errors[1:]
    )


def _near(a: float, b: float, within: float = 2.5e-3) -> bool:
    return abs(a - b) <= within * abs(b)


def _round(ratio: float, ranks: int, within: float) -> float:
    """The multiple of P that it is near to, so that rounding does not make groups of its own."""
    known = (float(ranks), 1 / ranks, float(ranks**2), 1 / ranks**2)
    return next((value for value in known if _near(ratio, value, within)), float(f"{ratio:.2g}"))


def _times(ratio: float, ranks: int = 1) -> str:
    names = {} if ranks == 1 else {
        float(ranks): f"P = {ranks} times", 1 / ranks: f"1/P = 1/{ranks} of",
        float(ranks**2): f"P² = {ranks**2} times", 1 / ranks**2: f"1/P² = 1/{ranks**2} of",
    }  # fmt: skip
    return names.get(ratio, f"{ratio:.4g} times")


def _cause_of(ratio: float, ranks: int, every: bool) -> str:
    if ranks > 1 and ratio in (float(ranks), float(ranks**2)):
        return (
            "the loss of every rank is already that of the whole batch and gradients are summed over ranks, it is "
            "multiplied by lw.loss_scale though nothing averages, or gradients are summed twice"
            if every
            else "the gradients of these are summed over ranks twice, or they were whole on every rank and were summed"
        )
    if ranks > 1 and ratio in (1 / ranks, 1 / ranks**2):
        return (
            "DDP or FSDP averages gradients though each rank's loss is only its part of the batch's: multiply the loss "
            "by lw.loss_scale(mesh) before backward"
            if every
            else "the gradients of these are averaged over ranks where the others' are summed"
        )
    return "a scale of the loss that is not undone: gradient accumulation, loss scaling, clipping, or another divisor"
