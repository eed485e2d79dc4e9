"""One random case from a seed and a number: a Hypothesis strategy that is fed the bytes of a seeded generator.

    (seed, "plans", 1234) ──▶ bytes ──▶ strategy ──▶ case        the same in every process

So the strategies of the tests serve here too. Bytes are read as the installed version of Hypothesis reads them: a line
to replay a case holds for that version, which is why a failure also shows the case itself.
"""

from __future__ import annotations

import random
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

T = TypeVar("T")

BYTES = 1 << 14  # more than any case reads
TRIES = 100


def draw(strategy: st.SearchStrategy[T], seed: int, kind: str, index: int) -> T:
    """The case with this number."""
    drawn: list[T] = []

    @settings(database=None)
    @given(strategy)
    def take(case: T) -> None:
        drawn.append(case)

    for attempt in range(TRIES):  # a strategy may refuse some bytes
        take.hypothesis.fuzz_one_input(random.Random(f"{seed} {kind} {index} {attempt}").randbytes(BYTES))
        if drawn:
            return drawn[0]
    raise RuntimeError(f"no case {kind}:{index} of seed {seed} in {TRIES} tries")
