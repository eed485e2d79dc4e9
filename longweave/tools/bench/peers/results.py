"""What a race of peers found: times of each, ratios round by round, and what that says about the bars.

Ratios are the peer's seconds over ours in the same round: above 1 we are faster. CPU time, that of the rank with the
most, is without waiting, whether for ranks, messages or other programs: on a machine that others use it is nearer to
the truth.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OURS = "longweave"
ZIGZAG, LLAMA3 = "ring-flash-attention zigzag", "ring-flash-attention llama3"
CONTEXT_PARALLEL = "torch context_parallel"
HUGGING_FACE = "Hugging Face's torch form"
DDP = "plain DDP"
ONE_PROCESS = "one process, all threads"
KERNEL = "the kernel's own rate"

DOCUMENT, PACKED, STEP = "one causal document", "packed documents", "training step"
DELTA_FORWARD, DELTA = "delta rule, forward", "delta rule"

BAR_TOKENS, DELTA_TOKENS = 8192, 4096
QUIET = 0.85  # of its cores for our ranks: with less, the machine is busy otherwise
BARS: dict[tuple[str, int, str], float] = {  # (case, ranks, peer): the least ratio, at the tokens above
    (DOCUMENT, 2, ZIGZAG): 1.05,
    (DOCUMENT, 4, ZIGZAG): 1.05,
    (DOCUMENT, 2, KERNEL): 0.95,
    (DOCUMENT, 4, KERNEL): 0.95,
    (PACKED, 2, LLAMA3): 1.6,
    (PACKED, 4, LLAMA3): 1.5,
    (DELTA_FORWARD, 1, HUGGING_FACE): 2.0,
    (DELTA, 1, HUGGING_FACE): 5.0,
}


@dataclass(frozen=True)
class Spread:
    """Quartiles of some values."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Rounds:
    """Of every round: seconds of the slowest rank, and CPU seconds of the rank with the most."""

    seconds: tuple[float, ...]
    busy: tuple[float, ...]


@dataclass(frozen=True)
class PeerTime:
    """One side of a race, and ours in the same rounds."""

    case: str
    ranks: int
    tokens: int
    who: str
    rounds: Rounds
    ours: Rounds

    @property
    def time(self) -> Spread:
        return Spread.of(self.rounds.seconds)

    @property
    def ratio(self) -> Spread:
        return _ratio(self.rounds.seconds, self.ours.seconds)

    @property
    def busy_ratio(self) -> Spread | None:
        """Of CPU time; None where one process has that of several threads."""
        return None if self.who == ONE_PROCESS else _ratio(self.rounds.busy, self.ours.busy)

    @property
    def core(self) -> float:
        """Of a core, what the busiest rank had."""
        return statistics.median(cpu / wall for cpu, wall in zip(self.rounds.busy, self.rounds.seconds, strict=True))

    @property
    def bar(self) -> float | None:
        """The least ratio that is wanted; None where there is none, or not for that many tokens."""
        tokens = DELTA_TOKENS if self.case in (DELTA, DELTA_FORWARD) else BAR_TOKENS
        return BARS.get((self.case, self.ranks, self.who)) if self.tokens == tokens else None

    def as_json(self) -> dict[str, Any]:
        found = {"case": self.case, "ranks": self.ranks, "tokens": self.tokens, "who": self.who}
        return found | {
            "seconds": list(self.rounds.seconds),
            "cpu_seconds": list(self.rounds.busy),
            "time": vars(self.time),
            "ratio": vars(self.ratio),
            "cpu_ratio": vars(self.busy_ratio) if self.busy_ratio else None,
            "bar": self.bar,
        }


@dataclass(frozen=True)
class Missing:
    """A peer that did not take part, and why."""

    case: str
    ranks: int
    who: str
    reason: str


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> Spread:
    return Spread.of([a / max(b, 1e-9) for a, b in zip(theirs, ours, strict=True)])


def race_times(case: str, ranks: int, tokens: int, found: dict[str, Rounds]) -> list[PeerTime]:
    return [PeerTime(case, ranks, tokens, who, rounds, found[OURS]) for who, rounds in found.items()]


def _judged(ratio: Spread, bar: float) -> str:
    """Another run could fall on the other side of a bar that lies between the quartiles."""
    if ratio.low < bar < ratio.high:
        return f"not decided: {bar:.2f} lies between {ratio.low:.2f} and {ratio.high:.2f}"
    return f"the bar of {bar:.2f} is {'met' if ratio.median >= bar else 'missed'}"


def verdict(times: Sequence[PeerTime], cores: int) -> list[str]:
    """How each bar is met or missed, or that it is not decided, in words, and whether the machine had other work."""
    found = []
    for line in times:
        if line.bar is None:
            continue
        where = f"{line.case}, {line.ranks} rank{'s' if line.ranks > 1 else ''}"
        spread = f"{line.ratio.low:.2f} to {line.ratio.high:.2f}"
        by_cpu = f"; {line.busy_ratio.median:.2f} by CPU time" if line.busy_ratio else ""
        found.append(
            f"{where}: {line.ratio.median:.2f} of {line.who} ({spread}{by_cpu}); {_judged(line.ratio, line.bar)}"
        )
    if not found:
        found.append(f"no bars: they are for {BAR_TOKENS} tokens on 2 and 4 ranks, and for peers that are here")
    # The ranks of a training step wait for each other's gradients.
    own = [line for line in times if line.who == OURS and line.case != STEP]
    had = min((line.core / min(1, cores / line.ranks) for line in own), default=1.0)
    if had < QUIET:
        found.append(
            f"other programs took cores (our ranks had down to {had:.0%} of theirs): times say little, and less the "
            "more ranks are busy at once; CPU times are nearer to the truth"
        )
    return found
