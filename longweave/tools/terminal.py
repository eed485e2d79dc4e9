"""What all commands share: where they print, a clock while they work, and an orderly end on SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from longweave.errors import InputError

_WIDE = (
    None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
)  # tables in pipes are not squeezed to 80 columns
console = Console(width=_WIDE)
errors = Console(stderr=True, soft_wrap=True)


def will_be_written(path: Path | None) -> Path | None:
    """Of a file that is written at the end: one that cannot be is refused now, not after minutes of work."""
    if path is not None:
        try:
            check_writable(path)
        except InputError as error:
            raise typer.BadParameter(str(error)) from error
    return path


def check_writable(path: Path) -> None:
    """Raise `InputError` unless the file can be made or overwritten; its folder is made. Leaves no empty file."""
    was_there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}; give another file") from error


@contextmanager
def running_clock(text: str) -> Iterator[None]:
    """On a terminal a spinner, the text and the time since the start, as long as the block runs; in a pipe nothing."""
    if not console.is_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield


def end_on_sigterm() -> None:
    """From now on SIGTERM ends a command as Ctrl-C does: `with` blocks are left, so ranks end and nothing stays behind.

    The exit code is the one that shells expect.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
