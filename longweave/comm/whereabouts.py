"""Where the ranks of a group stand, through the store of the group: published by each, read by those that wait.

    longweave/{life}/at/0    {"number": 118, "name": "attention", "phase": "backward", "waits": true, …}
    longweave/{life}/at/1    {"number": 117, …}

A connection to the store of its own: torch's own requests may hold the common one for minutes.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple, TypeVar
from uuid import uuid4

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from longweave.comm.device import DeviceMarks
from longweave.comm.ledger import Ledger, NotedCall
from longweave.comm.positions import Position, Seen, described, reason_to_give_up

T = TypeVar("T")

BEAT = 0.5  # seconds between two publications of a rank; more where there are many ranks, whom one store serves
RANKS_PER_BEAT = 64
SILENT_BEATS = 6  # without a sign of life, once a connection has failed
HISTORY = 16  # calls that a rank tells the others
RETRY, LONGEST_RETRY = 2.0, 8.0  # seconds until a connection that was lost is tried again: first, later
CONNECT = timedelta(seconds=1)  # to try it
REQUEST = timedelta(seconds=30)  # to answer a request
LIFE = "longweave/life"
FAREWELL = 1.0  # seconds that the end of a group waits for the store at most


def interval() -> float:
    """Seconds between two publications of this process, and of every other one."""
    try:
        return BEAT * max(1.0, dist.get_world_size() / RANKS_PER_BEAT)
    except (RuntimeError, ValueError):  # there is no default group any more
        return BEAT


class Sighting(NamedTuple):
    """What was last seen of a rank, and since when it has been that."""

    beat: int
    alive: float
    standing: object
    moved: float


class Whereabouts:
    """The ranks of one group, as this one sees them."""

    def __init__(self, ledger: Ledger, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.device = DeviceMarks()
        self.answered = time.monotonic()  # when the store last did
        self._timeout = _timeout_of(group)
        self._keys = [f"longweave/{life_of(ledger)}/at/{rank}" for rank in range(self.size)]
        self._store: Store = group.get_group_store()
        self._has_own_store = False
        with suppress(RuntimeError):  # not every store can do that
            self._store, self._has_own_store = self._store.clone(), True  # type: ignore[attr-defined]
            self._store.set_timeout(REQUEST)
        self._retry_at: float | None = None  # while there is no connection
        self._retry_in = RETRY
        self._beat = 0
        self._sightings: dict[int, Sighting] = {}
        self._not_before = 0.0  # what was seen before says nothing

    def lost(self) -> None:
        """A request has failed: the store has ended with its process, or the way there is cut."""
        self._retry_at = time.monotonic() + self._retry_in
        self._retry_in = min(2 * self._retry_in, LONGEST_RETRY)

    def is_connected(self) -> bool:
        """If the connection was lost, a new one is tried now and then. Raises what comes of that."""
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            if self._has_own_store:
                self._store.set_timeout(CONNECT)
                self._store = self._store.clone()  # type: ignore[attr-defined]
                self._store.set_timeout(REQUEST)
            self._retry_at, self._retry_in = None, RETRY
            self.forget()  # others were cut off, too, and may come back later
        return not self.is_lost

    @property
    def is_lost(self) -> bool:
        return self._retry_at is not None

    def publish(self, ledger: Ledger) -> None:
        self._beat += 1
        self._store.set(self._keys[self.rank], self._own(ledger).text())

    def _own(self, ledger: Ledger) -> Position:
        at = ledger.at
        position = Position(
            self._beat,
            at.number,
            at.name,
            at.phase,
            at.description,
            ledger.waiting is not None or ledger.is_at_store,
            ledger.current is None,
            ledger.departures,
            ledger.left,
            ledger.departure,
            ledger.gave_up,
            tuple((noted.number, noted.title, noted.mark) for noted in list(ledger.last)[-HISTORY:]),
            socket.gethostname(),
            os.getpid(),
        )
        # Another thread may have begun a call in between: what belongs to which is then not known.
        return position if ledger.at is at else replace(position, waits=False, is_over=False)

    def look(self, ledger: Ledger, on_device: NotedCall | None = None) -> dict[int, Seen]:
        """All ranks. Those that have not published yet have done nothing yet.

        on_device: the call that a device of this process waits in, if the process itself does not.
        """
        asked = time.monotonic()
        texts = self._texts()
        self.answered = time.monotonic()
        found = {}
        for rank in range(self.size):
            position = Position.read(texts[rank]) if rank in texts else Position()
            if rank == self.rank:
                position = self._own(ledger)
                position = position if on_device is None else _waiting_in(on_device, position)
            beat, alive, standing, moved = self._sightings.get(rank, Sighting(-1, asked, None, asked))
            # News came with the answer; that there was none is known of the time of the question. So a slow store
            # accuses nobody.
            alive = alive if position.beat == beat else self.answered
            moved = moved if position.standing == standing else self.answered
            self._sightings[rank] = Sighting(position.beat, alive, position.standing, moved)
            since = [max(time_seen, self._not_before) for time_seen in (alive, moved)]
            found[rank] = Seen(position, max(asked - since[0], 0.0), max(asked - since[1], 0.0))
        return found

    def _texts(self) -> dict[int, bytes]:
        """What ranks have published."""
        present = list(range(self.size))
        if not self._store.check(self._keys):  # one request, once all have published
            present = [rank for rank in present if self._store.check([self._keys[rank]])]
        return dict(zip(present, self._store.multi_get([self._keys[rank] for rank in present]), strict=True))

    def forget(self) -> None:
        """What was seen before says nothing about now."""
        self._not_before = time.monotonic()

    def verdict(
        self, ledger: Ledger, waited: float, limit: float, silent_after: float, patient: bool,
        on_device: NotedCall | None = None,
    ) -> str | None:  # fmt: skip
        """Why this rank should wait no longer, and where everybody is; None while it should."""
        ranks = self.look(ledger, on_device)
        reason = reason_to_give_up(
            self.rank, ranks, waited, limit, silent_after, patient, self._timeout, on_device is not None
        )
        if reason is None or any(seen.position.gave_up == reason for seen in ranks.values()):
            return reason
        return f"{reason}: {described(self.rank, ranks, silent_after)}"

    def roll_call(self, ledger: Ledger) -> str:
        """An exchange has failed, so somebody has ended or hung up: who? Ranks that live publish once a beat."""
        self.forget()
        silent_after = SILENT_BEATS * interval()
        for _ in range(SILENT_BEATS + 3):
            told = self.verdict(ledger, math.inf, math.inf, silent_after, patient=True)
            if told is not None:
                return told
            time.sleep(interval())
        return f"an exchange with another rank has failed: {described(self.rank, self.look(ledger), silent_after)}"


def _waiting_in(call: NotedCall, position: Position) -> Position:
    """Where a rank stands whose device waits in a call that its process has long left."""
    return replace(
        position,
        number=call.number,
        name=call.name,
        phase=call.phase,
        description=call.description,
        waits=True,
        is_over=False,
    )


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which the group's own waits end, NCCL's with their processes."""
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    found = [getattr(option, "_timeout", None) for option in options]
    return min((timeout.total_seconds() for timeout in found if timeout is not None), default=math.inf)


# -- lives -----------------------------------------------------------------------------------------------

# Keys of its own for every group: groups that processes make one after another may have one store and one name.
#
#     longweave/life                   "5f0c…"    of the group that lives; drawn by the first rank that asks
#     longweave/5f0c…/asked/{rank}     1          a second time: this rank is in a later group, and a new life is drawn
#     longweave/5f0c…/…                           what this group has to say
#
# A rank that has asked empties the first key when its group ends, which is before it makes the next one. So a rank that
# did not ask in the group before does not take that group's life for its own.


def life_of(ledger: Ledger) -> str:
    """The same on all ranks of a group, and another for every group. Ranks need not come together for it."""
    if ledger.life is None:
        group = ledger.group
        assert group is not None
        store, rank = group.get_group_store(), group.rank()
        life = _life_after("", store)
        while store.add(f"longweave/{life}/asked/{rank}", 1) > 1:
            life = _life_after(life, store)
        ledger.life = life
        weakref.finalize(group, _end, life, store).atexit = False
    return ledger.life


def _life_after(before: str, store: Store) -> str:
    """The life that is in the store, unless that is `before`: then a new one."""
    found = store.compare_set(LIFE, before, uuid4().hex).decode()
    return found or _life_after("", store)  # emptied just now, by the end of the group before


def _end(life: str, store: Store) -> None:
    with suppress(RuntimeError):  # of a process that ends
        within(FAREWELL, lambda: store.compare_set(LIFE, life, ""))


# -- requests that may wait for a process that stands still ------------------------------------------------


def answer(seconds: float, request: Callable[[], T]) -> T:
    """What it returns or raises; `TimeoutError` if that takes longer. Most requests to a store have no limit."""
    found: list[T] = []
    problems: list[Exception] = []

    def ask() -> None:
        try:
            found.append(request())
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=ask, name="longweave-ask", daemon=True)
    thread.start()
    thread.join(min(seconds, threading.TIMEOUT_MAX))
    if problems:
        raise problems[0]
    if not found:
        raise TimeoutError(f"no answer for {seconds:g} s")
    return found[0]


def within(seconds: float, request: Callable[[], T]) -> T | None:
    """The same; None if it raises or takes longer."""
    with suppress(Exception):
        return answer(seconds, request)
    return None
