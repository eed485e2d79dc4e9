"""Where every rank stands, and what follows from it for a rank that waits. No ranks, no threads: values in, text out.

    another rank …                                                   I give up
    has given up                                                     at once
    left a call with an error, that I am in or past, and I did not   at once
    made another call than I under the same number                   at once
    gives no sign of life                                            when that has lasted for the limit
    waits too, in another call, and so do all                        when nothing has changed for the limit
    is not in a call, and makes none                                 when that has lasted for the limit; much later if I
                                                                     am patient: it may load data, save, compile
    is in a call, and computes                                       much later

"Much later" is PATIENCE times the limit, but before the group's own timeout. A rank that makes calls is never given up,
however far behind it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from longweave.errors import named

PATIENCE = 20
BEFORE_TIMEOUT = 0.9  # of the group's own timeout, which names nobody


@dataclass(frozen=True)
class Position:
    """Where a rank stands, as it tells the others."""

    beat: int = 0  # counts up while the process lives; 0 before its first exchange
    number: int = 0  # of the call that began last
    name: str = "nothing yet"  # of its operator
    phase: str = ""  # "forward", "backward", or "" where ranks compare what they hold
    description: str = ""  # of that call, with dtypes, shapes and options
    waits: bool = False
    is_over: bool = False  # that call has ended
    departures: int = 0  # calls that an error has left
    left: int = 0  # number of the last of them
    departure: str = ""  # and what happened there
    gave_up: str = ""  # why this rank uses the group no more
    history: tuple[tuple[int, str, int], ...] = ()  # of the last calls number, name with phase, and digest
    host: str = ""
    pid: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: bytes) -> Position:
        found = json.loads(text)
        return cls(**{**found, "history": tuple(map(tuple, found["history"]))})

    @property
    def call(self) -> str:
        return ", ".join(filter(None, (self.name, self.phase, f"call {self.number}")))

    @property
    def standing(self) -> tuple[int, bool, bool]:
        """What changes when the rank gets on."""
        return self.number, self.waits, self.is_over

    def is_in_call_of(self, other: Position) -> bool:
        mine, its = (self.number, self.phase, self.description), (other.number, other.phase, other.description)
        return not self.is_over and mine == its


@dataclass(frozen=True)
class Seen:
    """A position, with how long the rank has given no sign of life, and how long it has not got on."""

    position: Position
    silent: float = 0.0
    unchanged: float = 0.0


def reason_to_give_up(
    rank: int,
    ranks: Mapping[int, Seen],
    waited: float,
    limit: float,
    silent_after: float,
    patient: bool,
    timeout: float = math.inf,
    on_device: bool = False,
) -> str | None:
    """Why rank `rank`, which waits, should wait no longer; None while it should. All times are seconds.

    on_device: it is a device of this rank that has not got on, because it waits or because it computes.
    """
    much_later = max(limit, min(PATIENCE * limit, BEFORE_TIMEOUT * timeout))
    mine = ranks[rank].position
    others = {other: seen for other, seen in ranks.items() if other != rank}
    for seen in others.values():
        if seen.position.gave_up:
            return seen.position.gave_up
    left = [r for r, s in others.items() if s.position.departures > mine.departures and s.position.left <= mine.number]
    if left:
        return f"{named(left)} left {others[left[0]].position.departure}"
    difference = _other_history(rank, ranks)
    if difference is not None:
        return difference
    silent = _silent(others, silent_after)
    if silent:
        seconds = min(others[other].silent for other in silent)
        return f"{named(silent)} gave no sign of life for {seconds:.0f} s"
    at_work = [other for other, seen in others.items() if not seen.position.waits]
    for other in at_work:
        position, seconds = others[other].position, min(waited, others[other].unchanged)
        if seconds >= (limit if position.is_over and not patient else much_later):
            if position.is_in_call_of(mine):
                return f"rank {other} is in {mine.call}, for {seconds:.0f} s"
            return f"rank {other} did not come to {mine.call}, within {seconds:.0f} s"
    seconds = min([waited, *(seen.unchanged for seen in others.values())])
    if not at_work and seconds >= (much_later if on_device else limit):
        if not all(seen.position.is_in_call_of(mine) for seen in others.values()):
            return f"the ranks wait in different calls, for {seconds:.0f} s"
        if seconds >= much_later:
            return f"all ranks wait in {mine.call}, for {seconds:.0f} s"
    return None


def _other_history(rank: int, ranks: Mapping[int, Seen]) -> str | None:
    """The first call of mine that another rank made differently."""
    own = {number: (name, mark) for number, name, mark in ranks[rank].position.history if mark}
    for other, seen in ranks.items():
        for number, name, mark in seen.position.history:
            if mark and own.get(number, ("", mark))[1] != mark:
                also = "" if own[number][0] != name else ", with other dtypes, shapes or options"
                return f"call {number} of rank {other} was {name}, that of rank {rank} was {own[number][0]}{also}"
    return None


def _silent(ranks: Mapping[int, Seen], after: float) -> list[int]:
    return sorted(rank for rank, seen in ranks.items() if seen.position.beat and seen.silent >= after)


# -- as text -------------------------------------------------------------------------------------------


def described(rank: int, ranks: Mapping[int, Seen], silent_after: float) -> str:
    """Who is where, ranks that say the same together."""
    places = {(seen.position.call, seen.position.description) for seen in ranks.values()}
    calls = [call for call, _ in places]
    silent = _silent({other: seen for other, seen in ranks.items() if other != rank}, silent_after)
    by_text: dict[tuple[str, str], list[int]] = {}
    for other, seen in sorted(ranks.items()):
        position, place = seen.position, seen.position.call
        if calls.count(place) > 1:  # the difference is in its options
            place = place.replace(position.name, position.description, 1)
        has_left = position.departures > ranks[rank].position.departures
        by_text.setdefault(_whereabouts(position, place, other in silent, has_left), []).append(other)
    return "; ".join(f"{named(some)} {one if len(some) == 1 else many}" for (one, many), some in by_text.items())


def _whereabouts(position: Position, place: str, is_silent: bool, has_left: bool) -> tuple[str, str]:
    """What is said of one rank, and of several."""
    if not position.beat:
        text = "not exchanged anything on this group yet"
        return f"has {text}", f"have {text}"
    if is_silent:
        who = f" (process {position.pid} on host {position.host})"
        place = f"last seen in {place}" if position.number else "last heard of before its first call here"
        text = f"{place}{who}: ended, stopped, in one call that lets no Python run, or on a host that cannot be reached"
        return f"was {text}", f"were {text}"
    if has_left:
        return f"left call {position.left}", f"left call {position.left}"
    if position.waits:
        return f"waits in {place}", f"wait in {place}"
    if position.is_over:
        text = f"not in a call; the last was {place}"
        return f"is {text}", f"are {text}"
    return f"is in {place}", f"are in {place}"
