"""What this rank has called on a process group: a flight recorder, and a digest for the next comparison.

    call 116   attention of …           forward     ┐
    call 117   gated_delta_rule of …    forward     │ the last calls
    call 118   attention of …           backward  ◀─┘ running; its exchanges are numbered, and one may be waited for

Every operator notes its calls here, forward and backward. That costs about a microsecond and sends nothing. What is
noted serves two readers: the next pack compares the digest of all calls since the pack before (`agreement.py`), and a
rank that waits too long tells the others where it stands (`watch.py`). An `Observer` that is put here sees calls, waits
and exchanges as they happen (`tools/timeline.py`).
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from types import TracebackType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

FORWARD, BACKWARD, MEETING = "forward", "backward", ""  # a meeting: ranks compare what they hold
KEPT = 64  # calls that a ledger remembers

# Set inside `unchecked()` and reset when it ends.
_checking: ContextVar[bool] = ContextVar("longweave_checks", default=True)


@contextmanager
def unchecked() -> Iterator[None]:
    """Inside, ranks are trusted to hold equal packs and make equal calls: nothing is compared.

    Use it on all ranks or on none.
    """
    token = _checking.set(False)
    try:
        yield
    finally:
        _checking.reset(token)


def is_checking() -> bool:
    return _checking.get()


def digest(text: str) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class NotedCall(NamedTuple):
    """One call of the flight recorder."""

    number: int
    name: str  # of the operator
    description: str  # with dtypes, shapes and options
    phase: str
    mark: int  # digest of description and phase; 0 where it is not to be compared

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.name, self.phase)))

    def __str__(self) -> str:
        return f"{self.title}, call {self.number}"


NOTHING = NotedCall(0, "nothing yet", "", MEETING, 0)


class Observer(Protocol):
    """Sees what this rank does on a group, as it happens, on the thread that does it: it must be quick."""

    def call_begins(self, title: str) -> None: ...
    def call_ends(self) -> None: ...
    def wait_begins(self) -> None: ...
    def wait_ends(self) -> None: ...

    def sends(self, bytes_sent: int, peers: list[int]) -> None:
        """An exchange was started; `peers` are group ranks, none if the backend's collective chooses the way."""


class RecordedCall:
    """A kind of call: operator, dtypes, shapes and options. `with call.forward():` notes that it is made.

    name: of the operator, by default what stands before " of " in the description. is_patient: ranks may come late to
    it, because they have other things to do before.
    """

    __slots__ = ("description", "is_patient", "ledger", "mark", "name")

    def __init__(self, ledger: Ledger, description: str, name: str = "", is_patient: bool = False) -> None:
        self.ledger, self.description, self.mark = ledger, description, digest(description)
        self.name, self.is_patient = name or description.partition(" of ")[0], is_patient

    def forward(self) -> Running:
        return Running(self, FORWARD, self.mark)

    def backward(self) -> Running:
        return Running(self, BACKWARD, ~self.mark)

    def meeting(self) -> Running:
        """Recorded, but no part of the digest that ranks compare."""
        return Running(self, MEETING, 0)


class Running:
    """A call that is being made. An error that leaves it is told to the ranks that wait for this one."""

    __slots__ = ("_around", "_call", "_mark", "_phase")

    def __init__(self, call: RecordedCall, phase: str, mark: int) -> None:
        self._call, self._phase, self._mark = call, phase, mark
        self._around: RecordedCall | None = None

    def __enter__(self) -> None:
        ledger = self._call.ledger
        self._around, ledger.current = ledger.current, self._call
        ledger.note(self._call, self._phase, self._mark)
        if ledger.observer is not None:
            ledger.observer.call_begins(ledger.at.title)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ledger = self._call.ledger
        if error is not None and self._around is None:  # it leaves the outermost call
            ledger.leave(error)
        ledger.current = self._around
        if ledger.observer is not None:
            ledger.observer.call_ends()


def call_of(ledger: Ledger, name: str) -> RecordedCall:
    """The call that is running, for its backward; outside of any, one of this name."""
    return ledger.current or RecordedCall(ledger, name)


class Ledger:
    """What this rank does on one group. It lives as long as the group, and does not keep it alive."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None else weakref.ref(group)
        # What was called
        self.number = 0  # of the call that began last
        self.last: deque[NotedCall] = deque(maxlen=KEPT)
        self.current: RecordedCall | None = None
        self.running = 0  # digest of all calls since ranks last compared
        self.calls: Counter[str] = Counter()
        # What was exchanged
        self.exchanges = 0
        self.bytes_sent = 0  # to other ranks
        self.pending: dict[int, Any] = {}  # works of exchanges that nobody has waited for yet
        self.waiting: float | None = None  # for an exchange since when, by time.monotonic()
        self.is_at_store = False  # it waits there for the others, with a limit of its own
        self.observer: Observer | None = None  # as long as somebody records a step
        # Packs and gathers through the store
        self.packs = 0  # made so far
        self.asked = 0  # calls that were compared before they were made
        self.weights: Any = None  # checksum of a model's weights, a tensor, to be compared with the next pack
        self.gathers = 0
        self.life: str | None = None  # this group's name in its store, once somebody asked (`whereabouts.py`)
        # What went wrong
        self.departures = 0  # calls that an error has left
        self.left, self.departure = 0, ""  # number of the last of them, and what happened there
        self.gave_up = ""  # why this rank uses the group no more, as the others are told
        self.broken: str | None = None  # the same, as this rank's own callers are told
        # For those that watch over waits (`watch.py`)
        self.is_watched = False
        self.whereabouts: Any = None
        self.on_departure: Callable[[Ledger], None] | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None once it was destroyed."""
        return None if self._group is None else self._group()

    @property
    def at(self) -> NotedCall:
        """The call that began last."""
        return self.last[-1] if self.last else NOTHING

    def note(self, call: RecordedCall, phase: str, mark: int) -> None:
        """One more call begins. Calls inside `unchecked()` are recorded, and compared never."""
        self.number += 1
        mark = mark if _checking.get() else 0
        self.last.append(NotedCall(self.number, call.name, call.description, phase, mark))
        if mark:
            self.running = (self.running * 1_000_003 + mark) & 0x7FFF_FFFF_FFFF_FFFF
            self.calls[call.description if phase is FORWARD else f"{call.description}, {phase}"] += 1

    def take_calls(self) -> tuple[int, Counter[str]]:
        """The digest of the calls since this was last asked, and how often each was made."""
        taken = self.running, self.calls
        self.running, self.calls = 0, Counter()
        return taken

    def take_weights(self) -> float:
        """The checksum of a model's weights that was left here; NaN if there is none, ∞ if it is not finite."""
        weights, self.weights = self.weights, None
        if weights is None:
            return math.nan
        return float(weights) if math.isfinite(weights) else math.inf

    @property
    def is_patient(self) -> bool:
        """May other ranks have something else to do before they come to where this one is?"""
        return self.packs <= 1 or (self.current is not None and self.current.is_patient)

    def leave(self, error: BaseException) -> None:
        """An error leaves a call: other ranks may wait for what this one will not send."""
        if type(error).__name__ == "_StopRecomputationError":  # ends a checkpoint's recomputation, on every rank alike
            return
        if self.broken is not None:
            self.pending.clear()
            return
        self.departures += 1
        self.left, self.departure = self.number, f"{self.at} with {type(error).__name__}: {error}"
        if self.on_departure is not None:
            self.on_departure(self)


# A ledger lives as long as its process group.
_ledgers: WeakKeyDictionary[dist.ProcessGroup, Ledger] = WeakKeyDictionary()


def ledger_of(group: dist.ProcessGroup | None) -> Ledger:
    if group is None:
        return Ledger(None)  # a single process has nobody to differ from
    found = _ledgers.get(group)
    if found is None:
        found = _ledgers[group] = Ledger(group)
    return found
