"""SIGTERM ends a command as Ctrl-C does: `with` blocks are left, so ranks end and nothing stays behind."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType


def end_on_sigterm() -> None:
    """From now on SIGTERM raises `SystemExit` in the main thread, with the exit code that shells expect."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
