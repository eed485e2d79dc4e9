"""Ctrl-C of every command and SIGTERM of the launcher: they end within 5 seconds and leave nothing behind."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from watched import LONGWEAVE, Watched

FULL = bool(os.environ.get("LONGWEAVE_FULL"))
LIMIT = 5.0


@dataclass(frozen=True)
class Command:
    """`ranks`: it is interrupted when it has so many; `after`: so many seconds later, deep in its work."""

    args: tuple[str, ...]
    ranks: int
    after: float = 3.0


DOCUMENTS = tuple(str(1000 + 37 * i % 9000) for i in range(3000))
COMMANDS = {
    "plan": Command(
        (*LONGWEAVE, "plan", *DOCUMENTS, "--ranks", "64", "--strategy", "ring", "--layout", "zigzag"), 0, 1.5
    ),
    "train": Command((*LONGWEAVE, "train", "--steps", "100000", "--out", "out"), 2, 6.0),
    "train, starting": Command((*LONGWEAVE, "train", "--steps", "100000", "--out", "out"), 1, 0.0),
    "doctor": Command((*LONGWEAVE, "doctor"), 1),
    "bench attention": Command((*LONGWEAVE, "bench", "attention"), 1),
    "bench packed": Command((*LONGWEAVE, "bench", "packed"), 1),
    "bench compare": Command((*LONGWEAVE, "bench", "compare"), 1, 0.5),
    "bench plan": Command((*LONGWEAVE, "bench", "plan"), 0, 2.0),
    "bench host": Command((*LONGWEAVE, "bench", "host", "--rounds", "100000"), 1),
    "bench linear": Command((*LONGWEAVE, "bench", "linear"), 1),
    "bench pool": Command((*LONGWEAVE, "bench", "pool"), 1),
    "demo": Command((sys.executable, "-m", "longweave.tools.demo"), 2),
}
QUICK = [
    ("train", signal.SIGINT),
    ("train", signal.SIGTERM),
    ("plan", signal.SIGINT),
    ("train, starting", signal.SIGINT),
]
EVERY = [(name, how) for name in COMMANDS for how in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(("name", "how"), EVERY if FULL else QUICK)
def test_it_ends_and_leaves_nothing(name: str, how: signal.Signals, tmp_path: Path) -> None:
    command = COMMANDS[name]
    watched = Watched(command.args, tmp_path)
    try:
        deadline = time.monotonic() + 60
        while len(watched.ranks()) < command.ranks:
            assert watched.process.poll() is None, watched.text()
            assert time.monotonic() < deadline, watched.text()
            time.sleep(0.05)
        time.sleep(command.after)
        assert watched.process.poll() is None, f"it was over too soon: {watched.text()}"
        begin = time.monotonic()
        watched.signal(how, group=how == signal.SIGINT)
        code = watched.wait(LIMIT)
        watched.assert_nothing_is_left(LIMIT - (time.monotonic() - begin))
        assert code != 0
        assert "Traceback" not in watched.text()
    finally:
        watched.end()
