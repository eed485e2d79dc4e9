"""Long commands: a clock on a terminal within 2 seconds, nothing of it in a pipe, and Ctrl-C leaves nothing."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watched import Watched

COMMAND = [sys.executable, "-m", "longweave", "bench", "linear", "4096"]
SHOWN = b"bench linear: measuring"


def until(terminal: int, wanted: bytes, seconds: float) -> bytes:
    seen, deadline = b"", time.monotonic() + seconds
    while wanted not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 4096)
            except OSError:  # the other end was closed
                break
    return seen


def test_a_terminal_shows_a_clock_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    began = time.monotonic()
    process = subprocess.Popen(
        COMMAND, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, start_new_session=True
    )
    os.close(theirs)
    try:
        seen = until(ours, SHOWN, 30)
        assert SHOWN in seen, seen
        print(f"shown after {time.monotonic() - began:.1f} s")
        assert b"0:00:01" in until(ours, b"0:00:01", 30), "the clock runs while torch is loaded"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(10) != 0
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        os.close(ours)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_pipe_has_nothing_of_it(tmp_path: Path) -> None:
    watched = Watched(COMMAND, tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not watched.ranks() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert watched.text() == ""
        watched.signal(signal.SIGINT, group=True)
        assert watched.wait(10) != 0
        watched.assert_nothing_is_left(5)
    finally:
        watched.end()
