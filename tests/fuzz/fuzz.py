"""`make fuzz`: random plans and random tensor cases, as many as asked for, in as many minutes as there are.

    python tests/fuzz/fuzz.py --plans 100000 --tensors 1000 --minutes 60      goes on where it was left; prints failures
    python tests/fuzz/fuzz.py --only tensors:1234                             one case again

A case is determined by the seed and its number. How far a seed has come is kept in a small file, also when the run is
interrupted; cases that have failed are tried again first. Exit code: 0 if nothing failed, 1 if something did.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fuzz_paths import ROOT  # isort: split

from fuzz_draw import draw
from fuzz_plans import check_plan, plans
from fuzz_tensors import check_tensors, tensor_cases

from longweave.launch import Ranks

Check = Callable[[object], None]
STRATEGIES = {"plans": plans(), "tensors": tensor_cases()}
TURN = {"plans": 50, "tensors": 2}  # cases between two looks at the clock
SAVE_EVERY = 5.0  # seconds


@dataclass
class Progress:
    """How far one seed has come: cases tried, and what failed, by kind."""

    path: Path | None
    seed: int
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STRATEGIES, 0))
    failed: dict[str, dict[int, str]] = field(default_factory=lambda: {kind: {} for kind in STRATEGIES})

    @classmethod
    def load(cls, path: Path | None, seed: int) -> Progress:
        """What an earlier run of this seed has left; nothing if it was another seed."""
        fresh = cls(path, seed)
        if path is None or not path.exists():
            return fresh
        kept = json.loads(path.read_text())
        if kept["seed"] != seed:
            return fresh
        failed = {kind: {int(i): text for i, text in some.items()} for kind, some in kept["failed"].items()}
        return cls(path, seed, kept["done"], failed)

    def save(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_suffix(".part")
            beside.write_text(json.dumps({"seed": self.seed, "done": self.done, "failed": self.failed}))
            os.replace(beside, self.path)


class Fuzz:
    """Cases of one seed, checked one by one."""

    def __init__(self, progress: Progress, checks: dict[str, Check]) -> None:
        self.progress, self.checks = progress, checks
        self._saved = time.monotonic()

    def try_one(self, kind: str, index: int) -> bool:
        """Check a case; a failure is printed and noted."""
        seed, failed = self.progress.seed, self.progress.failed[kind]
        case: object = "(could not be drawn)"
        try:
            case = draw(STRATEGIES[kind], seed, kind, index)
            self.checks[kind](case)
        except Exception as error:
            failed[index] = "".join(traceback.format_exception_only(error)).strip()
            where = "".join(traceback.format_tb(error.__traceback__)[-2:])
            print(f"FAILED {kind}:{index}\n  {case}\n{where}{failed[index]}", flush=True)
            print(f"  again: python tests/fuzz/fuzz.py --seed {seed} --only {kind}:{index}\n", flush=True)
            return False
        failed.pop(index, None)
        return True

    def run(self, wanted: dict[str, int], deadline: float) -> None:
        """Whichever kind is further behind goes next, until all are done or time is up."""
        done = self.progress.done
        for kind, failed in self.progress.failed.items():
            for index in [*failed]:
                self.try_one(kind, index)
        while time.monotonic() < deadline:
            behind = {kind: done[kind] / count for kind, count in wanted.items() if done[kind] < count}
            if not behind:
                break
            kind = min(behind, key=lambda kind: behind[kind])
            for index in range(done[kind], min(done[kind] + TURN[kind], wanted[kind])):
                self.try_one(kind, index)
                done[kind] = index + 1
            self._note(wanted)
        self.progress.save()

    def _note(self, wanted: dict[str, int]) -> None:
        if time.monotonic() - self._saved > SAVE_EVERY:
            self._saved = time.monotonic()
            self.progress.save()
            if sys.stdout.isatty():
                print("  " + self.summary(wanted), end="\r", flush=True)

    def summary(self, wanted: dict[str, int]) -> str:
        done, failed = self.progress.done, self.progress.failed
        return ", ".join(f"{done[k]} of {wanted[k]} {k}, {len(failed[k])} failed" for k in wanted)


@contextmanager
def checks_on(pool: int) -> Iterator[dict[str, Check]]:
    """What checks each kind of case; ranks start with the first tensor case."""
    with Ranks(pool) as ranks:
        yield {"plans": check_plan, "tensors": lambda case: check_tensors(case, ranks)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=100_000, help="how many random plans in all")
    parser.add_argument("--tensors", type=int, default=1_000, help="how many random tensor cases in all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after that many minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--progress", type=Path, default=ROOT / "out" / "fuzz.json", help="where progress is kept")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    parser.add_argument("--only", action="append", metavar="KIND:NUMBER", help="only this case, such as tensors:1234")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    wanted = {"plans": options.plans, "tensors": options.tensors}
    with checks_on(8) as checks:
        if options.only:
            fuzz = Fuzz(Progress(None, options.seed), checks)
            cases = [(kind, int(index)) for kind, _, index in (text.partition(":") for text in options.only)]
            good = sum(fuzz.try_one(kind, index) for kind, index in cases)
            print(f"{good} of {len(cases)} cases are right")
            return int(good < len(cases))
        progress = Progress(options.progress, options.seed) if options.fresh else None
        fuzz = Fuzz(progress or Progress.load(options.progress, options.seed), checks)
        begin = time.monotonic()
        try:
            fuzz.run(wanted, begin + 60 * options.minutes)
        except KeyboardInterrupt:
            fuzz.progress.save()
            print("interrupted; run it again to go on")
            return 130
    print(f"seed {options.seed}: {fuzz.summary(wanted)}; {time.monotonic() - begin:.0f} s in this run")
    lines = [f"{k}:{i} {text.splitlines()[0]}" for k, some in fuzz.progress.failed.items() for i, text in some.items()]
    print("\n".join(lines) or "nothing failed")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
