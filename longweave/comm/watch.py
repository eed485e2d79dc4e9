"""A wait that lasts too long ends with an error that says who is where, on every rank.

    rank 0   waits in attention, call 118 ── publishes ─▶ store ◀─ publishes ── rank 1   left call 118 with InputError
             reads all positions ◀─────────────────────────┘
             gives up: GroupError, and closes its connections, so that ranks that wait for it notice at once

A thread of each process publishes where the process stands, twice a second (`whereabouts.py`), and looks at the others'
positions only while the process waits; `positions.py` says what follows. Nothing of it is in the way of a good run: an
exchange is waited for as ever, and the thread ends such a wait by closing the connections of the group. With gloo that
is what a wait with a timeout does that has run out; NCCL aborts its communicator. The group cannot be used afterwards.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from longweave.comm.ledger import Ledger, NotedCall
from longweave.comm.whereabouts import BEAT, SILENT_BEATS, Whereabouts, answer, interval, within
from longweave.errors import GroupError, InputError, LongweaveError

log = logging.getLogger("longweave.comm")

DEFAULT_WAIT = 30.0  # seconds
STORE_ANSWERS = 5.0  # seconds within which the store does, unless its process stands still
PAUSED = 2.0  # seconds that a thread of this process may be late; more, and the process was stopped
DRAIN = 10.0  # seconds for exchanges that were under way when an error came

NO_STORE = (
    "the store of the process group does not answer: the process that keeps it, mostly rank 0 or the launcher, has "
    "ended or stands still, or its host cannot be reached"
)
WATCHED = {"gloo", "nccl"}  # backends whose waits can be ended


# -- how long -------------------------------------------------------------------------------------------

_set: list[float] = []  # by `set_wait`, for this process


def set_wait(seconds: float | None) -> None:
    """How long a rank waits for the others inside longweave before it raises a `GroupError` that says who is where.

    seconds: 30 by default, or the environment variable LONGWEAVE_WAIT; None goes back to that; `float("inf")` waits as
    long as the process group does. Ranks that get on are waited for, however slow they are; ranks that compute inside a
    call, or are at work between two packs or in the first step (they load data, save, evaluate, compile), 20 times as
    long, but no longer than nine tenths of the group's own timeout. Set it on all ranks.

        lw.set_wait(120)
    """
    _set[:] = [] if seconds is None else [_checked(seconds, "seconds")]


def wait_limit() -> float:
    """Seconds."""
    if _set:
        return _set[0]
    given = os.environ.get("LONGWEAVE_WAIT")
    return DEFAULT_WAIT if not given else _checked(given, "LONGWEAVE_WAIT")


def _checked(given: object, name: str) -> float:
    try:
        seconds = math.nan if isinstance(given, bool) else float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not seconds > 0:
        raise InputError(f"{name} is {given!r}; give a positive number of seconds")
    return seconds


# -- waiting --------------------------------------------------------------------------------------------


@contextmanager
def telling(ledger: Ledger) -> Iterator[None]:
    """An exchange that fails inside, because another rank has ended or hung up, says who is where."""
    try:
        yield
    except (torch.OutOfMemoryError, LongweaveError):
        raise
    except RuntimeError as error:
        raise group_error(ledger, error) from error


def wait_for(works: Sequence[dist.Work], ledger: Ledger, device: torch.device) -> None:
    """Wait until the works of an exchange are complete, or let the device wait where they are a device's.

    Raises `GroupError` where that cannot happen any more.
    """
    if not ledger.is_watched:
        begin(ledger)
    observer = ledger.observer
    if observer is not None:
        observer.wait_begins()
    ledger.waiting = time.monotonic()
    try:
        with telling(ledger):
            for work in works:
                work.wait()
    finally:
        ledger.waiting = None
        if observer is not None:
            observer.wait_ends()
    if device.type != "cpu" and ledger.whereabouts is not None:
        ledger.whereabouts.device.set(device, ledger.at)
    check_unbroken(ledger)


def check_unbroken(ledger: Ledger) -> None:
    """Raise if the group was given up meanwhile: a device then goes on, with memory in which nothing has arrived."""
    if ledger.broken is not None:
        raise GroupError(ledger.broken)


def begin(ledger: Ledger) -> None:
    """From now on this process tells where it stands on this group."""
    group = ledger.group
    wait_limit()  # a wrong setting is said now
    if group is not None and group.size() > 1 and {backend.name() for backend in _backends(group)} <= WATCHED:
        try:
            ledger.whereabouts = answer(store_limit(), lambda: _published(ledger, group))
        except TimeoutError as error:
            raise GroupError(f"{NO_STORE} ({error}); restart from the last checkpoint") from error
        ledger.on_departure = _tell_and_drain
        _watcher.watch(ledger)
    ledger.is_watched = True


def _published(ledger: Ledger, group: dist.ProcessGroup) -> Whereabouts:
    whereabouts = Whereabouts(ledger, group)
    whereabouts.publish(ledger)
    return whereabouts


def store_limit() -> float:
    """Seconds within which the store must answer."""
    return max(wait_limit(), STORE_ANSWERS)


def group_error(ledger: Ledger, error: BaseException) -> GroupError:
    """The error of a rank whose exchange has failed: says who is where. The group is unusable from then on."""
    if ledger.broken is None:
        whereabouts = ledger.whereabouts
        look = None
        if whereabouts is not None:
            look = within((SILENT_BEATS + 5) * interval() + STORE_ANSWERS, lambda: whereabouts.roll_call(ledger))
        give_up(ledger, look or f"an exchange has failed, and {NO_STORE} ({_first_line(error)})")
    return GroupError(f"{ledger.broken}")


def give_up(ledger: Ledger, reason: str) -> None:
    """Use the group no more, and let ranks that wait for this one notice."""
    if ledger.broken is None:
        ledger.gave_up = reason
        ledger.broken = (
            f"{reason}. All ranks must make the same calls in the same order. This process group cannot be used any "
            "more: restart from the last checkpoint. (lw.set_wait and LONGWEAVE_WAIT say how long ranks wait)"
        )
        _publish_soon(ledger)
        _hang_up(ledger)


def trouble(ledger: Ledger) -> str | None:
    """Did another rank give up, or end, or leave a call that this one did not leave?"""
    whereabouts: Whereabouts | None = ledger.whereabouts
    if whereabouts is None or whereabouts.is_lost:
        return None
    try:
        return whereabouts.verdict(ledger, 0.0, math.inf, _silent_after(), patient=True)
    except RuntimeError:  # the connection of the watch is lost; whoever asks has one of its own
        return None


def _silent_after() -> float:
    """Seconds. A limit of a few beats tells nothing of signs of life."""
    return max(wait_limit(), SILENT_BEATS * interval())


def _publish_soon(ledger: Ledger) -> None:
    whereabouts = ledger.whereabouts
    if whereabouts is not None:
        within(STORE_ANSWERS, lambda: whereabouts.publish(ledger))


def _tell_and_drain(ledger: Ledger) -> None:
    """An error has left a call. Ranks that wait for this one read it with their next look.

    Exchanges that were under way are completed: if all ranks raise alike, the group stays good. A rank that raises
    alone is given up by those that wait for it.
    """
    _publish_soon(ledger)
    limit = timedelta(seconds=min(wait_limit(), DRAIN))
    works = [work for some in ledger.pending.values() for work in some]
    ledger.pending.clear()
    try:
        for work in works:
            work.wait(limit)
    except RuntimeError:
        give_up(ledger, f"exchanges that were under way when this rank left {ledger.departure} cannot be completed")


# -- the threads of this process ------------------------------------------------------------------------


class Wait(NamedTuple):
    """This process waits, or a device for it."""

    since: float  # by time.monotonic()
    on_device: NotedCall | None  # the call that the device waits in
    patient: bool

    @classmethod
    def of(cls, ledger: Ledger, whereabouts: Whereabouts) -> Wait | None:
        since, on_device = ledger.waiting, whereabouts.device.waits()
        if since is not None:
            return cls(since, None, ledger.is_patient)
        # A device may have much to do before the exchange.
        return None if on_device is None else cls(*on_device, patient=True)


class Watcher:
    """Publishes positions and ends waits that last too long. One thread for all groups of this process, and one that
    notices when the store itself does not answer. They end with the process.
    """

    def __init__(self) -> None:
        self._ledgers: list[weakref.ref[Ledger]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._resumed = 0.0  # when this process went on after it had been stopped

    def watch(self, ledger: Ledger) -> None:
        with self._lock:
            self._ledgers = [ref for ref in self._ledgers if ref() is not None] + [weakref.ref(ledger)]
            for name, target in {"longweave-watch": self._watch, "longweave-store": self._guard}.items():
                if name not in self._threads or not self._threads[name].is_alive():
                    self._threads[name] = threading.Thread(target=target, name=name, daemon=True)
                    self._threads[name].start()

    def stop(self) -> None:
        """Before Python takes its modules apart: a thread that then comes back from C++ would abort the process."""
        self._stop.set()
        for thread in self._threads.values():
            thread.join(2 * STORE_ANSWERS)

    def _living(self) -> list[tuple[Ledger, Whereabouts]]:
        """Those whose group exists and can be used. A pack may outlive its group: then nothing is published or kept
        any more.
        """
        with self._lock:
            found = [ref() for ref in self._ledgers]
        for ledger in found:
            if ledger is not None and is_destroyed(ledger):
                ledger.whereabouts = None
        living = [ledger for ledger in found if ledger is not None and ledger.broken is None]
        return [(ledger, ledger.whereabouts) for ledger in living if ledger.whereabouts is not None]

    def _sleep(self, seconds: float) -> bool:
        """False where the process ends. If this process was stopped meanwhile, and others perhaps with it, then what
        was seen before says nothing, nor does waiting. Both threads look for that, since one may be in a request.
        """
        begin = time.monotonic()
        if self._stop.wait(seconds):
            return False
        if time.monotonic() - begin > seconds + PAUSED:
            self._resumed = time.monotonic()
            for _, whereabouts in self._living():
                whereabouts.forget()
        return True

    def _watch(self) -> None:
        while self._sleep(interval()):
            for ledger, whereabouts in self._living():
                try:
                    if whereabouts.is_connected():
                        self._attend(ledger, whereabouts)
                except Exception as error:
                    # The store has ended with its process, the way there is cut, or the group was destroyed just now.
                    log.debug("a position could not be published or read: %s", error)
                    whereabouts.lost()

    def _attend(self, ledger: Ledger, whereabouts: Whereabouts) -> None:
        """Publish; look at the others if this process, or a device for it, waits."""
        now, limit = time.monotonic(), wait_limit()
        whereabouts.publish(ledger)
        wait = Wait.of(ledger, whereabouts)
        waited = 0.0 if wait is None else now - max(wait.since, self._resumed)
        if wait is None or waited < BEAT:
            return
        reason = whereabouts.verdict(ledger, waited, limit, _silent_after(), wait.patient, wait.on_device)
        if reason is not None and Wait.of(ledger, whereabouts) == wait:
            give_up(ledger, reason)

    def _guard(self) -> None:
        """The other thread may hang in the store, if its process stands still, or not reach it any more."""
        while self._sleep(BEAT):
            for ledger, whereabouts in self._living():
                since = ledger.waiting
                late = 0.0 if since is None else time.monotonic() - max(since, self._resumed, whereabouts.answered)
                if late > max(wait_limit(), STORE_ANSWERS + interval()):
                    give_up(
                        ledger,
                        f"this rank waits in {ledger.at}, and the store of the process group does not answer for "
                        f"{late:.0f} s: the process that keeps it, mostly rank 0 or the launcher, has ended or stands "
                        "still, or its host cannot be reached",
                    )


def is_destroyed(ledger: Ledger) -> bool:
    """Also where somebody still holds the group."""
    group = ledger.group
    try:
        return group is None or not dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return True


_watcher = Watcher()
atexit.register(_watcher.stop)


# -- ending a wait --------------------------------------------------------------------------------------

HANG_UP = 0x7FFF_FFFF  # a tag that no message has


def _backends(group: dist.ProcessGroup) -> list[Any]:
    return [group._get_backend(device) for device in group._device_types]


def _hang_up(ledger: Ledger) -> None:
    """Close the connections of the group: waits on it fail, here and on the other ranks."""
    group = ledger.group
    for backend in [] if group is None else _backends(group):
        if backend.name() == "gloo":
            # A wait that runs out closes all connections of its group. Where a peer has hung up there is nothing to
            # wait for, and another one must do.
            for peer in range(backend.size()):
                if peer != backend.rank():
                    with suppress(RuntimeError):
                        backend.recv([torch.empty(1, dtype=torch.uint8)], peer, HANG_UP).wait(timedelta(milliseconds=1))
        else:
            with suppress(RuntimeError):
                backend.abort()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
