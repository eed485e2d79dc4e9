"""Long commands: a clock on a terminal within 2 seconds, nothing of it in a pipe, and Ctrl-C leaves nothing."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watched import Watched

LONGWEAVE = [sys.executable, "-m", "longweave"]
COMMAND = [*LONGWEAVE, "bench", "linear", "4096"]
LIMIT = 5  # seconds until something is shown, of which 2 are meant: other programs may take the cores
SHOWN = {
    "bench": (COMMAND, b"bench linear: measuring"),
    "audit": ([*LONGWEAVE, "audit"], b"audit: loading torch"),
    "train": ([*LONGWEAVE, "train"], b"loading torch"),
    "doctor": ([*LONGWEAVE, "doctor"], b"loading torch"),
    "demo": ([sys.executable, "-m", "longweave.tools.demo"], b"loading torch"),
}


def until(terminal: int, wanted: bytes, seconds: float) -> bytes:
    seen, deadline = b"", time.monotonic() + seconds
    while wanted not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 4096)
            except OSError:  # the other end was closed
                break
    return seen


@pytest.mark.parametrize("name", SHOWN)
def test_a_terminal_is_told_at_once(name: str, tmp_path: Path) -> None:
    command, shown = SHOWN[name]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path)
    os.close(theirs)
    try:
        assert shown in until(ours, shown, LIMIT)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_terminal_shows_a_clock_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        COMMAND, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, start_new_session=True
    )
    os.close(theirs)
    try:
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


# -- a terminal and a pipe at once ---------------------------------------------------------------------


def screen(written: bytes) -> list[str]:
    """The lines that a terminal shows in the end."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\n|\r|[^\x1b\n\r]+", written.decode()):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith(("\x1b", "\r")):
            lines[row] += part
    return lines


def test_a_plan_is_not_printed_into_its_spinner(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*LONGWEAVE, "plan", "410", "137", "--html", "p.html"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path)
    os.close(theirs)
    try:
        seen = until(ours, b"never", 60)  # until it ends
        assert process.wait(10) == 0
    finally:
        process.kill()
        os.close(ours)
    assert b"planning" in seen
    shown = screen(seen)
    assert not [line for line in shown if "planning" in line]
    assert any(line.startswith("documents 0") for line in shown)
    assert "wrote p.html" in shown


def test_training_is_logged_by_lines_if_stdout_is_not_the_terminal(tmp_path: Path) -> None:
    """As in `longweave train | tee log`: while it runs, and nothing of a bar."""
    ours, theirs = pty.openpty()
    log = tmp_path / "log"
    with log.open("w") as out:
        command = [*LONGWEAVE, "train", "--model", "llama", "--tokens", "128", "--ranks", "1", "--steps", "100000"]
        process = subprocess.Popen(command, stdout=out, stderr=theirs, cwd=tmp_path, start_new_session=True)
    os.close(theirs)
    try:
        deadline = time.monotonic() + 120
        while "step " not in log.read_text() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
        assert process.poll() is None
        assert log.read_text().startswith("step    0  loss")
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(10)
        os.close(ours)
