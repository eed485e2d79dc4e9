"""Is all that the step makes finite? If not: which tokens and documents, and what was the first.

A NaN spreads: from a weight or a token through its document to the loss, and from there into every gradient. So modules
are named in the order in which they return, and gradients only where the forward pass is finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longweave.comm.exchange import is_sharded
from longweave.errors import named
from longweave.tools.audit.probes import counts, first_tokens
from longweave.tools.audit.report import AuditFinding, faulty, right
from longweave.tools.audit.steps import plain_name
from longweave.tools.audit.trial import StepFailedError, Trial, listed

Modules = Mapping[str, tuple[Tensor | None, Tensor]]


@dataclass(frozen=True)
class NotFinite:
    """What one rank has that is not finite."""

    weights: tuple[str, ...]
    module: tuple[int, str] | None  # the first, and how many had returned before
    tokens: tuple[int, ...]
    gradients: tuple[str, ...]


def finite(trial: Trial) -> Iterator[AuditFinding]:
    """Weights, loss, outputs and gradients of the first run."""
    here = trial.base.here
    grads = here.gradients or {}
    mine = NotFinite(
        _weights(trial),
        _first_module(here.modules),
        _tokens(here.outputs, here.tokens),
        tuple(name for name, g in grads.items() if g is not None and not _is_finite(g)),
    )
    found = trial.everyone(mine)
    labels = counts(trial.inputs, ~first_tokens(trial.cu))  # without any, a mean over them is NaN
    losses = [rank for rank, loss in enumerate(trial.base.losses) if not isfinite(loss) and labels]
    weights, gradients = (_names(found, kind) for kind in ("weights", "gradients"))
    tokens = sorted({token for theirs in found for token in theirs.tokens})
    seen = {
        "weights": len(weights),
        "the loss": len(losses),
        "outputs": len(tokens),
        "gradients": len(gradients),
    }
    if not any(seen.values()):
        yield right("finite", "weights, loss, outputs and gradients, as far as the step returns them")
        return
    modules = [theirs.module for theirs in found if theirs.module]
    first, alone = _in_one_process(trial)
    first = min(modules)[1] if modules else first
    yield faulty(
        "finite",
        "not finite",
        f"NaN or infinite: {', '.join(_counted(name, count) for name, count in seen.items() if count)}",
        "; ".join(_places(trial, weights, first if tokens or losses else "", tokens, losses, gradients)),
        _cause(bool(weights), alone),
    )


def _places(
    trial: Trial, weights: list[str], module: str, tokens: list[int], losses: list[int], gradients: list[str]
) -> Iterator[str]:
    if weights:
        yield f"weights {listed(weights)}"
    if module:
        yield f"the first module is {module}"
    if tokens:
        documents = np.unique(np.searchsorted(trial.cu, tokens, side="right") - 1).tolist()
        yield f"outputs of {_these('token', tokens)} in {_these('document', documents)}"
    if losses:
        yield f"the loss of {named(losses)}"
    if gradients and not losses:
        yield f"gradients of {listed(gradients)}"


def _cause(weights: bool, alone: bool | None) -> str:
    if weights:
        return "a damaged checkpoint, parameters that were never initialised, or an update with gradients like that"
    if alone:
        return (
            "one process has it, too, so it is in the model or the batch: a division by zero, a logarithm or root of "
            "what is not positive, numbers that 16 bits do not hold"
        )
    one = "one process has finite numbers: " if alone is False else ""
    return (
        f"{one}a rank or document without labels divides 0 by 0, a softmax over a row that may see nothing, memory "
        "that was received or made and never filled"
    )


def _in_one_process(trial: Trial) -> tuple[str, bool | None]:
    """The first module there, and whether anything is not finite; None if that is not known. On all ranks alike."""
    if trial.step.reference is None:
        return "", None
    try:
        found = trial.rounded
    except StepFailedError:
        return "", None
    module = _first_module(found.modules)
    gradients = [grad for grad in (found.gradients or {}).values() if grad is not None]
    bad = not isfinite(float(found.loss)) or bool(module) or bool(_tokens(found.outputs, found.tokens))
    bad = bad or not all(map(_is_finite, gradients))
    return trial.everyone((module[1] if module else "", bad))[0]


# -- what is not finite ----------------------------------------------------------------------------------


def _weights(trial: Trial) -> tuple[str, ...]:
    """Parameters, and buffers with NaN: masks are kept as infinities. Of what is sharded, this rank's part."""
    model = trial.step.model
    if model is None:
        return ()
    bad = [name for name, p in model.named_parameters() if not _is_finite(p)]
    bad += [name for name, x in model.named_buffers() if bool(_local(x).isnan().any())]
    return tuple(map(plain_name, bad))


def _first_module(modules: Modules) -> tuple[int, str] | None:
    return next(((i, name) for i, (name, (_, y)) in enumerate(modules.items()) if bool(_poisoned(y).any())), None)


def _tokens(outputs: Tensor | None, tokens: Any) -> tuple[int, ...]:
    """Of the batch; a step may name others, which is a fault of its own."""
    if outputs is None or tokens is None or not outputs.numel():
        return ()
    bad = _poisoned(outputs).reshape(len(outputs), -1).any(1)
    return tuple(tokens[bad.cpu()].tolist())


def _poisoned(x: Tensor) -> Tensor:
    """−inf is how logits and scores are masked: it makes no NaN of a loss."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.isnan() | x.isposinf()


def _is_finite(x: Tensor) -> bool:
    return bool(_local(x).isfinite().all())


def _local(x: Any) -> Tensor:
    part: Tensor = x.detach().to_local() if is_sharded(x) else x.detach()
    return part


def _names(found: list[NotFinite], kind: str) -> list[str]:
    return [*dict.fromkeys(name for theirs in found for name in getattr(theirs, kind))]


def _counted(name: str, count: int) -> str:
    return name if name == "the loss" else f"{count} {name if count > 1 else name.removesuffix('s')}"


def _these(name: str, numbers: list[int]) -> str:
    return f"{name}{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
