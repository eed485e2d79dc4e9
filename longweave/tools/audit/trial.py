"""One audit under way: runs of the step and of the reference, and what all ranks know of them.

What a check decides must be the same on every rank, so it decides by what was gathered: losses of all ranks, errors of
every token or parameter, the worst of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from longweave.comm.exchange import Comm
from longweave.tools.audit.probes import Ints
from longweave.tools.audit.steps import AuditedStep, Inputs, StepFunction, StepResult, counted_positions

T = TypeVar("T")
Floats = npt.NDArray[np.float64]

# Off by more than this, relative to the largest number, is no rounding. Hugging Face modules round to float32 inside
# whatever their dtype is, and both sides of the comparison round, through all layers. Where one process is further from
# itself with twice the bits, ranks may be, too (`Trial.allowed`).
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def everyone(comm: Comm, value: T) -> list[T]:
    """Of every rank. Tensors on a GPU would arrive on the sender's: send numbers, or copies on the CPU."""
    if comm.group is None or comm.size == 1:
        return [value]
    found: list[Any] = [None] * comm.size
    dist.all_gather_object(found, value, group=comm.group)
    return found


class StepFailedError(Exception):
    """The step or the reference raised on some rank; the text says where and what."""


@dataclass(frozen=True)
class StepRun:
    """One run of the step: the loss of the batch, and what this rank found."""

    loss: float
    losses: tuple[float, ...]  # of the ranks
    here: StepResult


@dataclass
class Trial:
    """The step, the batch, and the results that several checks look at."""

    step: AuditedStep
    inputs: Inputs  # the same on every rank
    comm: Comm
    tolerance: float | None = None
    roots: list[str] = field(default_factory=list)  # faults so far that change outputs or loss

    @property
    def cu(self) -> tuple[int, ...]:
        cu: tuple[int, ...] = self.inputs["cu_seqlens"]
        return cu

    # -- runs --------------------------------------------------------------------------------------

    def everyone(self, value: T) -> list[T]:
        """Of every rank."""
        return everyone(self.comm, value)

    def worst(self, value: float) -> float:
        """Of all ranks; what is not a number is worse than any."""
        return max(x if isfinite(x) else inf for x in self.everyone(value))

    def run(self, inputs: Inputs) -> StepRun:
        found = self._guarded("the step", self.step, inputs)
        losses = tuple(self.everyone(float(found.loss)))
        combined = sum(losses) / (len(losses) if self.step.loss == "mean" else 1)
        return StepRun(combined, losses, found)

    def expect(self, inputs: Inputs, reference: StepFunction | None = None) -> StepResult:
        """What one process makes of it. Every rank runs it; the loss is rank 0's."""
        reference = reference or self.step.reference
        assert reference is not None
        given = inputs if "position_ids" in inputs else {**inputs, "position_ids": counted_positions(self.cu)}
        reader = replace(self.step, model=None)
        found = self._guarded("the reference", lambda x: reader.read(reference(x)), given)
        return replace(found, loss=self.everyone(found.loss)[0])

    def _guarded(self, name: str, function: Any, inputs: Inputs) -> StepResult:
        found, problem = StepResult(0.0), ""
        try:
            found = function(dict(inputs))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problems = {rank: text for rank, text in enumerate(self.everyone(problem)) if text}
        if problems:
            rank, text = next(iter(problems.items()))
            raise StepFailedError(f"{name} raised on rank {rank}: {text.splitlines()[0]}")
        return found

    @cached_property
    def base(self) -> StepRun:
        return self.run(self.inputs)

    @cached_property
    def wanted(self) -> StepResult:
        """By the reference: with twice the bits, where it offers that and the model can."""
        return self._results[0]

    @cached_property
    def rounded(self) -> StepResult:
        """By the reference in the model's own dtype: the difference to `wanted` is what rounding alone does."""
        return self._results[1]

    @cached_property
    def _results(self) -> tuple[StepResult, StepResult]:
        rounded = self.expect(self.inputs)
        make = getattr(self.step.reference, "exact", None)
        exact = make() if make else None
        if exact is None:
            return rounded, rounded
        try:
            return self.expect(self.inputs, exact), rounded
        except StepFailedError:  # modules that insist on a dtype
            return rounded, rounded

    # -- numbers -----------------------------------------------------------------------------------

    @cached_property
    def limit(self) -> float:
        """For errors relative to the largest number."""
        if self.tolerance is not None:
            return self.tolerance
        here = self.base.here
        tensors = [here.outputs, *(here.gradients or {}).values()]
        dtypes = [x.dtype for x in tensors if x is not None and x.dtype in LIMITS]
        return self.worst(max((LIMITS[dtype] for dtype in dtypes), default=LIMITS[torch.float32]))

    def allowed(self, rounding: float) -> float:
        """Where one process is off by `rounding`, ranks may be off twice as far beyond the limit."""
        return self.limit + 2 * rounding

    def off(self, found: float, wanted: float) -> float:
        """How far a loss is off; a step may return NaN where no label counts."""
        if not isfinite(found):
            return 0.0 if wanted == 0 or not isfinite(wanted) else inf
        if not isfinite(wanted):
            return inf
        return abs(found - wanted) / max(abs(wanted), 1e-3)

    # -- tokens ------------------------------------------------------------------------------------

    @cached_property
    def shards(self) -> list[Ints] | None:
        """The tokens of every rank; None if the step does not say."""
        tokens = self.base.here.tokens
        found = self.everyone(None if tokens is None else tokens.numpy())
        return None if any(x is None for x in found) else [x for x in found if x is not None]

    @cached_property
    def has_outputs(self) -> bool:
        return all(self.everyone(self.base.here.outputs is not None))

    @cached_property
    def owners(self) -> Ints:
        """The rank of every token; -1 where nobody has it."""
        owner = np.full(self.cu[-1], -1, dtype=np.int64)
        for rank, tokens in enumerate(self.shards or []):
            owner[tokens] = rank
        return owner

    def by_token(self, tokens: Tensor | None, values: Tensor) -> Floats:
        """A number for each of this rank's tokens becomes one for every token; of two, the larger; NaN where none."""
        assert tokens is not None
        total = np.full(self.cu[-1], np.nan)
        for theirs, numbers in self.everyone((tokens.numpy(), values.double().cpu().numpy())):
            np.fmax.at(total, theirs, numbers)
        return total

    def output_error(self, found: StepResult, wanted: StepResult) -> Floats:
        """Of every token's output, relative to the largest output."""
        assert found.outputs is not None
        assert wanted.outputs is not None
        assert found.tokens is not None
        return self.by_token(found.tokens, row_errors(found.outputs, wanted.outputs, found.tokens))


def row_errors(found: Tensor, wanted: Tensor, tokens: Tensor) -> Tensor:
    """The largest difference in each row, relative to the largest number that is wanted anywhere."""
    whole = wanted.detach().cpu()
    if found.shape[1:] != whole.shape[1:]:
        return torch.full((len(found),), inf, dtype=torch.float64)
    return row_maxima(differences(found, whole[tokens])) / max(magnitude(whole), 1e-6)


def differences(found: Tensor, wanted: Tensor) -> Tensor:
    """Of every entry. None between equal infinities (masked logits) or two NaNs; infinite where only one is NaN."""
    x, y = found.detach().cpu().double(), wanted.detach().cpu().double()
    same = (x == y) | (x.isnan() & y.isnan())
    return (x - y).abs().nan_to_num(nan=inf, posinf=inf).masked_fill(same, 0.0)


def magnitude(x: Tensor) -> float:
    """The largest magnitude of its finite entries."""
    return largest(x.detach().double().abs().nan_to_num(nan=0.0, posinf=0.0))


def row_maxima(x: Tensor) -> Tensor:
    """Of (n, …): n numbers."""
    return x.reshape(len(x), -1).amax(1) if x.numel() else x.new_zeros(len(x))


def guilty_module(trial: Trial, found: Mapping[str, Any], wanted: Mapping[str, Any], tokens: Tensor | None) -> str:
    """The first whose output is off though its input is right; "" if modules were not recorded."""
    mine: dict[str, tuple[float, float]] = {}
    for name in wanted if tokens is not None else ():
        if name in found:
            assert tokens is not None
            (x, y), (x_wanted, y_wanted) = found[name], wanted[name]
            into = 0.0 if x is None or x_wanted is None else largest(row_errors(x, x_wanted, tokens))
            mine[name] = (into, largest(row_errors(y, y_wanted, tokens)))
    gathered = trial.everyone(mine)
    for name in wanted:
        errors = [theirs[name] for theirs in gathered if name in theirs]
        if errors and max(x for x, _ in errors) <= trial.limit < max(y for _, y in errors):
            return name
    return ""


def largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def listed(items: Sequence[object], most: int = 4) -> str:
    """ "a, b, c and 5 more"."""
    shown = ", ".join(str(item) for item in items[:most])
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown
