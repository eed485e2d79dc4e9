"""What a check is, and what it finds.

    Check     a function of a `Site` with a name and what it proves; `examine` calls it on every rank
    Site      where it runs: a device, the group of all ranks, and a group of this rank alone
    Outcome   one case: a verdict, its worst error or figure, the text of what went wrong

A case that raises becomes an outcome with the error's text, and the next one still runs. Errors are relative to the
largest number of the tensor that is compared. What ranks find is held against one process on the CPU, in float64.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf, isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from longweave.errors import BackendError

# Absent is what is not installed or does not run on this device: the row says which.
OK, FAIL, ABSENT, SKIPPED = "ok", "FAIL", "absent", "skipped"
NOT_HERE = "does not run on"  # begins the reason, before the name of the device

# The worst error that is taken for rounding. A mask, a scale or a sum that is wrong is off by far more.
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def site_of(device: str, family: str, limit: float) -> Site:
    """On a rank of the default group: groups of its own for one check, so that a broken one is nobody else's."""
    rank, timeout = dist.get_rank(), timedelta(seconds=limit)
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
        torch.cuda.set_device(place)
    backend = "nccl" if device == "cuda" else "gloo"
    group = dist.new_group(backend=backend, timeout=timeout)
    alone, alone_here = (
        dist.new_group([rank], backend=name, timeout=timeout, use_local_synchronization=True)
        for name in ("gloo", backend)
    )
    return Site(place, group, alone, alone_here, family, timeout)


class SkipCase(Exception):  # noqa: N818 - no error
    """Raised by a case that cannot run here; says why."""


@dataclass(frozen=True)
class Site:
    """Where a check runs, seen from one rank."""

    device: torch.device
    group: dist.ProcessGroup  # all ranks; carries tensors of the device
    alone: dist.ProcessGroup  # this rank only, for CPU tensors: what runs on it is one process
    alone_here: dist.ProcessGroup  # this rank only, for tensors of the device
    family: str  # of the model that is checked
    timeout: timedelta  # of groups

    def leave(self) -> None:
        """When a check has come back. Communicators hold memory of the device."""
        for group in (self.group, self.alone, self.alone_here):
            dist.destroy_process_group(group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What is trained in on this device."""
        return (torch.float32, torch.bfloat16) if self.device.type == "cuda" else (torch.float32,)

    def subgroup(self, members: list[int]) -> dist.ProcessGroup:
        """A further group of some ranks; all ranks make it."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        group: dist.ProcessGroup = dist.new_group(members, backend=backend, timeout=self.timeout)
        return group

    def wait(self) -> None:
        """Until the device has done all that it was given: an error of a kernel shows here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Outcome:
    """What one case found. Cases with the same `row` share a line of the table."""

    row: str
    case: str
    verdict: str = OK
    value: float | None = None
    limit: float | None = None  # of value
    unit: str = ""  # of value; none is a relative error
    note: str = ""
    detail: str = ""  # a traceback
    seconds: float = 0.0


@dataclass(frozen=True)
class Check:
    """Something that is looked at on every rank."""

    name: str
    proves: str
    run: Callable[[Site], Iterable[Outcome]]
    limit: float = 120.0  # seconds, after which it counts as hanging


def attempt(site: Site, row: str, case: str, limit: float | None, measure: Callable[[], Outcome | float]) -> Outcome:
    """The outcome of one case: `measure` returns its worst error, or an outcome of its own."""
    begin = time.perf_counter()
    try:
        found = measure()
        site.wait()
    except SkipCase as reason:
        found = Outcome(row, case, SKIPPED, note=str(reason))
    except BackendError as reason:
        found = Outcome(row, case, ABSENT, note=_why_absent(reason))
    except Exception as error:
        found = Outcome(row, case, FAIL, note=f"{type(error).__name__}: {error}", detail=traceback.format_exc())
    if not isinstance(found, Outcome):
        good = isfinite(found) and (limit is None or found <= limit)
        found = Outcome(row, case, OK if good else FAIL, found, limit)
    return replace(found, row=row, case=case, seconds=time.perf_counter() - begin)


def _why_absent(refusal: BackendError) -> str:
    """The reason alone: which backend it was says the row, and nobody is to choose another."""
    text = str(refusal)
    reason = (text.partition(": ")[2] or text).partition("; use 'auto' or ")[0]
    return reason.replace("tensors are on", NOT_HERE)


def error_of(found: Tensor, wanted: Tensor, largest: Tensor | None = None) -> float:
    """The largest difference, relative to the largest number that is wanted (or of the whole that it is a part of)."""
    if found.shape != wanted.shape:
        raise AssertionError(f"the shape is {tuple(found.shape)}, not {tuple(wanted.shape)}")
    if not found.numel():
        return 0.0
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    same = found == wanted  # infinities too
    differences = torch.where(same, 0.0, (found - wanted).abs())
    whole = wanted if largest is None else largest.detach().double().cpu()
    scale = torch.where(whole.isfinite(), whole.abs(), 0.0).max().clamp_min(1e-3)
    worst = float(differences.max() / scale)
    return worst if isfinite(worst) else inf


def worst_error(found: Sequence[Tensor], wanted: Sequence[Tensor], own: Tensor | None = None) -> float:
    """Over several tensors. `own`: what was found are these rows of what is wanted."""
    pairs = zip(found, wanted, strict=True)
    return max(error_of(x, y if own is None else y[own], y) for x, y in pairs)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def merged(by_rank: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """What all ranks found, as one list: of each case the worst, and which rank that was."""
    cases: dict[tuple[str, str], list[tuple[int, Outcome]]] = {}
    for rank, outcomes in enumerate(by_rank):
        for outcome in outcomes:
            cases.setdefault((outcome.row, outcome.case), []).append((rank, outcome))
    return list(_worst(cases.values()))


def _worst(cases: Iterable[list[tuple[int, Outcome]]]) -> Iterator[Outcome]:
    order = [FAIL, OK, SKIPPED, ABSENT]
    for found in cases:
        rank, worst = min(found, key=lambda pair: (order.index(pair[1].verdict), -(pair[1].value or 0.0)))
        where = f"rank {rank}: " if worst.verdict == FAIL and len(found) > 1 else ""
        yield replace(worst, note=f"{where}{worst.note}", seconds=max(outcome.seconds for _, outcome in found))
