"""Has a device got on with the exchanges before it? Its process does not wait for it, so marks between its work tell.

    process   exchange 7 ─ mark   exchange 8 ─ mark   exchange 9 ─ mark      runs ahead
    device    ────────────▶ reached                                          the watch looks at the next one

A mark keeps nothing of its exchange alive.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

from longweave.comm.ledger import NotedCall

MARKS = 64  # of the last exchanges, that are kept


class Mark(NamedTuple):
    event: torch.Event
    since: float  # by time.monotonic()
    at: NotedCall  # whose exchange the device waits for

    def is_reached(self) -> bool:
        try:
            return self.event.query()
        except RuntimeError:  # a device that cannot be asked any more: the process learns of it by itself
            return True


class DeviceMarks:
    """The process sets marks, and the thread that watches asks for them: neither changes what the other does."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque(maxlen=MARKS)
        self._next: Mark | None = None  # that the watch looks at until it is reached
        self._got_on = 0.0  # when the last one was

    def set(self, device: torch.device, at: NotedCall) -> None:
        """Behind an exchange that the device's stream waits for."""
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        self._marks.append(Mark(event, time.monotonic(), at))

    def waits(self) -> tuple[float, NotedCall] | None:
        """Since when the device has not got on, and for which call; None if it has reached everything."""
        if self._next is not None and self._next.is_reached():
            self._next, self._got_on = None, time.monotonic()
        if self._next is None:
            self._next = next((mark for mark in list(self._marks) if not mark.is_reached()), None)
        return None if self._next is None else (max(self._next.since, self._got_on), self._next.at)
