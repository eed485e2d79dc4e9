"""`longweave bench peers`: ours beside what others have, with the same kernel, in the same run.

    round 1   A B C      every contestant is checked against ours first: outputs and all gradients.
    round 2   B C A      Then all of them run in turns, in the same processes, and the slowest rank counts.
    round 3   C A B      A ratio is that of two times of one round; of a peer it is the median of the rounds.

A peer that is not installed, cannot run on this machine or computes something else is listed with the reason.
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from longweave.errors import InputError
from longweave.launch import Ranks
from longweave.tools.bench import together
from longweave.tools.bench.packed import documents
from longweave.tools.bench.peers import contestants
from longweave.tools.bench.peers.flash_stand_in import AbsentError
from longweave.tools.bench.peers.results import (
    BAR_TOKENS,
    DELTA,
    DELTA_FORWARD,
    DELTA_TOKENS,
    DOCUMENT,
    OURS,
    PACKED,
    STEP,
    Missing,
    PeerTime,
    Rounds,
    race_times,
    verdict,
)

SAME = 1e-4  # of the largest value: the most by which float32 answers may differ
CASES = {"document": DOCUMENT, "packed": PACKED, "delta": DELTA, "step": STEP}  # by their names on the command line


@dataclass(frozen=True)
class Race:
    """One case: what is computed, by how many ranks."""

    case: str
    ranks: int
    cu: list[int]
    rounds: int


def races(tokens: int, ranks: Sequence[int], rounds: int, cases: Sequence[str]) -> list[Race]:
    """The delta rule, on one rank, has half the tokens."""
    if tokens < 2 * max(ranks):
        raise InputError(f"{tokens} tokens on {max(ranks)} ranks; give at least two for each rank")
    found = []
    for world in ranks:
        borders = {
            DOCUMENT: [0, tokens],
            PACKED: documents("giant", tokens),
            STEP: [rank * (tokens // world) for rank in range(world + 1)],
        }
        found += [Race(case, world, cu, rounds) for case, cu in borders.items() if case in cases]
    if DELTA in cases:
        length = tokens * DELTA_TOKENS // BAR_TOKENS
        found += [Race(case, 1, [0, length], rounds) for case in (DELTA_FORWARD, DELTA)]
    return found


def on_rank(race: Race) -> tuple[dict[str, Rounds], dict[str, str]]:
    """On one of the ranks: the rounds of each contestant with the CPU time of this rank, and why others are missing."""
    warnings.simplefilter("ignore")  # of peers, about what torch will rename
    racing, missing = {}, {}
    reference: contestants.Tensors | None = None
    for who, make in contestants.CONTESTANTS[race.case].items():
        reason = ""
        try:
            contestant = make(race.cu, race.case)
            answer = contestant.answer() if contestant.answer else None
            if answer is not None:
                reference = reference or answer
                reason = _difference(answer, reference)
        except AbsentError as error:
            reason = str(error)
        except Exception as error:  # whatever a peer raises
            if who == OURS:
                raise
            reason = f"does not run here: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if reason := _first_reason(reason):
            if who == OURS:
                raise RuntimeError(f"{race.case} cannot be measured: {reason}")
            missing[who] = reason
        else:
            racing[who] = contestant
    seconds: dict[str, list[float]] = {who: [] for who in racing}
    busy: dict[str, list[float]] = {who: [] for who in racing}
    names = list(racing)
    for contestant in racing.values():  # warm; who has an answer has run once already
        if contestant.answer is None:
            contestant.call()
    for number in range(race.rounds):
        first = number % len(names)  # nobody is always the first
        for who in names[first:] + names[:first]:
            begin = time.process_time()
            seconds[who].append(racing[who].share * together(racing[who].call))
            busy[who].append(racing[who].share * (time.process_time() - begin))
    return {who: Rounds(tuple(seconds[who]), tuple(busy[who])) for who in racing}, missing


def _difference(answer: contestants.Tensors, reference: contestants.Tensors) -> str:
    """In words; "" if they are the same."""
    if [x.shape for x in answer] != [x.shape for x in reference]:
        return "computes something else: its tensors have other shapes"
    off = [(x - y).abs().max() / y.abs().max().clamp(min=1e-30) for x, y in zip(answer, reference, strict=True)]
    worst = float(torch.stack(off).max())  # NaN if one is
    return "" if worst <= SAME else f"computes something else: values differ by {worst:.1e} of the largest"


def _first_reason(mine: str) -> str:
    """That of the first rank that has one: who is missing on one rank is missing on all."""
    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, mine)
    return next(filter(None, reasons), "")


@dataclass
class Comparison:
    """All that was found, growing race by race."""

    times: list[PeerTime] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    load: float = field(default_factory=lambda: os.getloadavg()[0])  # of the minute before the start

    @property
    def verdicts(self) -> list[str]:
        return verdict(self.times, os.cpu_count() or 1)

    @property
    def machine(self) -> str:
        cores = os.cpu_count()
        return f"{cores} cores ({platform.machine()}), torch {torch.__version__}, load {self.load:.2f} before the start"

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": {"cores": os.cpu_count(), "kind": platform.machine(), "load": self.load},
            "torch": torch.__version__,
            "times": [line.as_json() for line in self.times],
            "missing": [vars(peer) for peer in self.missing],
            "verdicts": self.verdicts,
        }


def run(wanted: Sequence[Race], into: Comparison) -> None:
    """The races one after the other; what they find goes `into` the comparison."""
    with Ranks(max(race.ranks for race in wanted), timeout=3600) as ranks:
        for race in wanted:
            answers = ranks.run(on_rank, race, size=race.ranks)
            found, missing = answers[0]
            for who, rounds in found.items():
                of_ranks = [other[who].busy for other, _ in answers]
                found[who] = Rounds(rounds.seconds, tuple(map(max, zip(*of_ranks, strict=True))))
            into.times += race_times(race.case, race.ranks, race.cu[-1], found)
            into.missing += [Missing(race.case, race.ranks, who, reason) for who, reason in missing.items()]
