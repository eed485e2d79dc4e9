"""`longweave doctor`: does this installation compute what it should on this machine, and how fast?

    CHECKS ──▶ each on every rank (`examine`) ──▶ outcomes of all ranks, merged ──▶ Diagnosis: table, JSON, exit code
               LocalRanks    processes that are started here, one for each GPU, or a few on the CPU
               JoinedRanks   the ranks that torchrun has started

Nothing hangs and nothing stops the rest: a case that raises is a row with the error's text. Local ranks that die or do
not come back in time are a row, too, and new ones are started for the next check. Under torchrun nobody can start
others: a check that does not come back ends the run, with everything found so far in the report.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from math import isfinite
from typing import Any, Protocol

import torch
import torch.distributed as dist

import longweave
from longweave.launch import Ranks
from longweave.tools.doctor import across, kernels, speed, whole
from longweave.tools.doctor.checks import ABSENT, FAIL, NOT_HERE, OK, SKIPPED, Check, Outcome, merged, site_of

CHECKS: tuple[Check, ...] = (
    Check("environment", "what is installed, and what each rank runs on", kernels.environment),
    Check("collectives", "what ranks send arrives, also uneven and empty parts", across.collectives),
    Check("attention kernels", "every backend gives what the reference gives", kernels.attention_backends, 600),
    Check("automatic choice", "which backend serves when nobody names one", kernels.automatic_choice),
    Check("strategies", "attention over ranks is that of one process", across.strategies, 240),
    Check("linear mixers", "documents cut over ranks are mixed as whole ones", across.linear_mixers, 240),
    Check("convolution", "a cut document is convolved as a whole one", across.convolution),
    Check("model", "loss and gradients over ranks are those of one process", whole.model, 240),
    Check("determinism", "two runs give the same bits", whole.determinism),
    Check("memory", "a pack frees what it held", whole.memory),
    Check("kernel times", "attention on one rank, forward + backward", speed.kernel_times, 300),
    Check("strategy times", "attention over all ranks, forward + backward", speed.strategy_times),
    Check("overlap", "an exchange runs while the device computes", speed.overlap),
)

MOST_RANKS = 64  # that are started here


# -- what was found ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A row of the table: the cases of one thing that a check looks at."""

    check: Check
    cases: tuple[Outcome, ...]

    @property
    def name(self) -> str:
        return self.cases[0].row

    @property
    def verdict(self) -> str:
        """FAIL if one case failed; ok if one was fine; else why there was nothing to see."""
        found = {case.verdict for case in self.cases}
        return next(verdict for verdict in (FAIL, OK, SKIPPED, ABSENT) if verdict in found)

    @property
    def seconds(self) -> float:
        return sum(case.seconds for case in self.cases)

    @property
    def worst(self) -> Outcome:
        """The case that says most about the verdict."""
        decisive = [case for case in self.cases if case.verdict == self.verdict]
        return max(decisive, key=lambda case: (case.value or 0.0) / (case.limit or 1.0))

    @property
    def figure(self) -> str:
        """What there is to read: how many cases, the worst error and where, notes."""
        worst, several = self.worst, len(self.cases) > 1
        notes = [*dict.fromkeys(case.note for case in self.cases if case.verdict == self.verdict and case.note)]
        if self.verdict in (ABSENT, SKIPPED):  # where it does not run at all, nothing else matters
            return "; ".join([note for note in notes if note.startswith(NOT_HERE)] or notes)
        if worst.value is None:
            parts = [worst.case if self.verdict == FAIL else "", *notes]
        elif worst.unit:  # the note has it in words
            parts = notes
        elif worst.value == 0:
            parts = ["exact", *notes]
        else:
            parts = [f"worst error {worst.value:.1e} (limit {worst.limit or 0:.0e})", worst.case]
            parts += [worst.note] if self.verdict == FAIL else notes
        return "; ".join(part for part in (_counted(self.cases) if several else "", *parts) if part)


def _counted(cases: Sequence[Outcome]) -> str:
    """ "12 cases, 3 skipped"."""
    counts = {verdict: sum(case.verdict == verdict for case in cases) for verdict in (FAIL, SKIPPED, ABSENT)}
    words = {FAIL: "failed", SKIPPED: "skipped", ABSENT: "not served"}
    others = [f"{count} {words[verdict]}" for verdict, count in counts.items() if count]
    return ", ".join([f"{len(cases)} cases", *others])


@dataclass
class Diagnosis:
    """All that was found, in the order of the checks."""

    device: str
    ranks: int
    asked_for: str  # "auto", "cuda" or "cpu"
    model: str = ""  # the family that was asked for
    hosts: tuple[str, ...] = ()  # that have ranks
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, check: Check, outcomes: Iterable[Outcome]) -> list[Finding]:
        rows: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            rows.setdefault(outcome.row, []).append(outcome)
        new = [Finding(check, tuple(cases)) for cases in rows.values()]
        self.findings += new
        return new

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == FAIL]

    @property
    def exit_code(self) -> int:
        """0: all that could be checked is right. 1: something failed. 3: CUDA was asked for, and there is none.

        (2 is what the command line has for arguments that it does not understand.)
        """
        if self.failed or not self.findings:
            return 1
        return 3 if (self.asked_for, self.device) == ("cuda", "cpu") else 0

    def headline(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if self.device == "cuda":
            return f"checking CUDA, {ranks}, NCCL"
        why = "" if self.asked_for == "cpu" else "no CUDA device here: "
        return f"{why}checking the CPU, {ranks}, gloo"

    def summary(self) -> str:
        counts = [
            (verdict, sum(f.verdict == verdict for f in self.findings)) for verdict in (OK, FAIL, SKIPPED, ABSENT)
        ]
        text = ", ".join(f"{count} {verdict}" for verdict, count in counts if count)
        end = "; CUDA was asked for and is absent: exit code 3" if self.exit_code == 3 else ""
        return f"{text} in {self.seconds:.0f} s{end}"

    def as_json(self) -> str:
        rows = [
            {
                "check": finding.check.name,
                "proves": finding.check.proves,
                "row": finding.name,
                "verdict": finding.verdict,
                "figure": finding.figure,
                "seconds": round(finding.seconds, 4),
                "cases": [_plain(case) for case in finding.cases],
            }
            for finding in self.findings
        ]
        head: dict[str, Any] = {
            "longweave": longweave.__version__,
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "argv": sys.argv,
            "hosts": self.hosts,
            "model": self.model,
            "asked_for": self.asked_for,
            "device": self.device,
            "ranks": self.ranks,
            "seconds": round(self.seconds, 2),
            "exit_code": self.exit_code,
        }
        return json.dumps({**head, "rows": rows}, indent=1, allow_nan=False)


def _plain(case: Outcome) -> dict[str, Any]:
    """JSON has no infinity: an error that is not finite is a text."""
    value = case.value if case.value is None or isfinite(case.value) else str(case.value)
    return {**asdict(case), "value": value}


# -- on a rank -----------------------------------------------------------------------------------------


def examine(check: Check, device: str, family: str) -> list[Outcome]:
    """One check on one rank. What it found before it died counts."""
    found: list[Outcome] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, on every rank, into the middle of the table
            site = site_of(device, family, check.limit)
            for outcome in check.run(site):
                found.append(outcome)
            site.leave()
    except Exception as error:
        found.append(_broken(f"{type(error).__name__}: {error}", traceback.format_exc()))
    return found


def _broken(note: str, detail: str = "") -> Outcome:
    return Outcome("the check itself", "", FAIL, note=note, detail=detail)


def _count_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


# -- ranks ---------------------------------------------------------------------------------------------


class Party(Protocol):
    """The ranks that are checked."""

    device: str
    size: int
    hosts: tuple[str, ...]

    def outcomes(self, check: Check, family: str) -> list[Outcome]: ...

    def close(self) -> None: ...


class LocalRanks:
    """Processes that are started here."""

    def __init__(self, asked_for: str, ranks: int | None) -> None:
        self._pool = Ranks(MOST_RANKS)
        self.hosts: tuple[str, ...] = (platform.node(),)
        self.device, devices = "cpu", 0
        if asked_for != "cpu":
            try:
                devices = self._pool.run(_count_devices, size=1, timeout=120)[0]
            except Exception:  # a driver that kills or hangs who asks: there is no CUDA to check
                devices = 0
        self.device = "cuda" if devices else "cpu"
        most = devices or MOST_RANKS
        self.size = min(ranks or (devices or 2), most)
        self._pool.threads = max(1, (os.cpu_count() or 1) // self.size)

    def outcomes(self, check: Check, family: str) -> list[Outcome]:
        try:
            by_rank = self._pool.run(examine, check, self.device, family, size=self.size, timeout=check.limit)
        except Exception as error:  # a rank died, or did not come back
            self._renew()
            return [_broken(str(error).splitlines()[0] if str(error) else type(error).__name__, str(error))]
        if any(outcome.detail for found in by_rank for outcome in found):
            self._renew()
        return merged(by_rank)

    def _renew(self) -> None:
        """After an error a GPU may be of no use to a process that saw it. On the CPU the pool replaces who is gone."""
        if self.device == "cpu":
            return
        threads = self._pool.threads
        self._pool.close()
        self._pool = Ranks(MOST_RANKS, threads=threads)

    def close(self) -> None:
        self._pool.close()


class JoinedRanks:
    """The ranks that torchrun has started; every one of them makes this object and runs the same checks."""

    def __init__(self, asked_for: str, give_up: Callable[[Check, list[Outcome]], None]) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=1800))
        self.size = dist.get_world_size()
        devices: list[int] = [0] * self.size
        dist.all_gather_object(devices, 0 if asked_for == "cpu" else _count_devices())
        self.device = "cuda" if all(devices) else "cpu"
        hosts: list[str] = [""] * self.size
        dist.all_gather_object(hosts, platform.node())
        self.hosts: tuple[str, ...] = tuple(dict.fromkeys(hosts))
        self._give_up = give_up

    def outcomes(self, check: Check, family: str) -> list[Outcome]:
        rank, most = dist.get_rank(), 2 * check.limit

        def too_late() -> None:
            self._give_up(check, [_broken(f"rank {rank} or one that it waits for is not done after {most:.0f} s")])
            os._exit(1)

        # Rank 0 first: when a rank ends, torchrun ends the others, and rank 0 has to write the report.
        timer = threading.Timer(most + (5.0 if rank else 0.0), too_late)
        timer.daemon = True
        timer.start()
        try:
            by_rank: list[Any] = [None] * self.size
            dist.all_gather_object(by_rank, examine(check, self.device, family))
            return merged(by_rank)
        finally:
            timer.cancel()

    def close(self) -> None:
        dist.destroy_process_group()


# -- all of it -----------------------------------------------------------------------------------------


def diagnose(
    asked_for: str = "auto",
    ranks: int | None = None,
    family: str = "qwen3_5",
    checks: Sequence[Check] = CHECKS,
    *,
    begin: Callable[[Diagnosis, Check], None] = lambda diagnosis, check: None,
    end: Callable[[Diagnosis, list[Finding]], None] = lambda diagnosis, findings: None,
) -> Diagnosis:
    """Run checks; `begin` and `end` are told of each.

    asked_for: "cuda", "cpu", or "auto": CUDA if there is any. ranks: local ones to start, by default one for each GPU
        or 2 on the CPU; under torchrun the ranks are those that are there.
    """
    started = time.perf_counter()
    found = Diagnosis("cpu", 0, asked_for, family)

    def give_up(check: Check, outcomes: list[Outcome]) -> None:
        found.seconds = time.perf_counter() - started
        end(found, found.add(check, outcomes))

    joined = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    party: Party = JoinedRanks(asked_for, give_up) if joined else LocalRanks(asked_for, ranks)
    try:
        found.device, found.ranks, found.hosts = party.device, party.size, party.hosts
        for check in checks:
            begin(found, check)
            new = found.add(check, party.outcomes(check, family))
            found.seconds = time.perf_counter() - started
            end(found, new)
    finally:
        party.close()
    return found
