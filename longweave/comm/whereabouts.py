"""Where the ranks of a group stand, through the store of the group: published by each, read by those that wait.

    longweave/{life}/at/0    {"number": 118, "name": "attention", "phase": "backward", "waits": true, …}
    longweave/{life}/at/1    {"number": 117, …}

A connection to the store of its own: torch's own requests may hold the common one for minutes.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from longweave.comm.ledger import Ledger
from longweave.comm.positions import Position, Seen, described, reason_to_give_up

BEAT = 0.5  # seconds between two publications of a rank; more where there are many ranks, whom one store serves
RANKS_PER_BEAT = 64
SILENT_BEATS = 6  # without a sign of life, once a connection has failed
HISTORY = 16  # calls that a rank tells the others


def interval() -> float:
    """Seconds between two publications of this process, and of every other one."""
    try:
        return BEAT * max(1.0, dist.get_world_size() / RANKS_PER_BEAT)
    except (RuntimeError, ValueError):  # there is no default group any more
        return BEAT


def life_of(ledger: Ledger) -> int:
    """How many groups had this store before. Groups that processes make one after another may have one store: each
    has keys of its own there. Every rank asks once.
    """
    if ledger.life is None:
        group = ledger.group
        assert group is not None
        ledger.life = (group.get_group_store().add("longweave/lives", 1) - 1) // group.size()
    return ledger.life


class Whereabouts:
    """The ranks of one group, as this one sees them."""

    def __init__(self, ledger: Ledger, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._keys = [f"longweave/{life_of(ledger)}/at/{rank}" for rank in range(self.size)]
        self._store: Store = group.get_group_store()
        with suppress(RuntimeError):
            self._store = self._store.clone()  # type: ignore[attr-defined]
        self._beat = 0
        # Of each rank: its last beat and since when it is that, its last standing and since when it is that
        self._known: dict[int, tuple[int, float, object, float]] = {}

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

    def look(self, ledger: Ledger) -> dict[int, Seen]:
        """All ranks. Those that have not published yet have done nothing yet."""
        present = list(range(self.size))
        if not self._store.check(self._keys):  # one request, once all have published
            present = [rank for rank in present if self._store.check([self._keys[rank]])]
        texts = dict(zip(present, self._store.multi_get([self._keys[rank] for rank in present]), strict=True))
        now, found = time.monotonic(), {}
        for rank in range(self.size):
            position = Position.read(texts[rank]) if rank in texts else Position()
            if rank == self.rank:
                position = self._own(ledger)
            beat, alive, standing, moved = self._known.get(rank, (-1, now, None, now))
            alive = alive if position.beat == beat else now
            moved = moved if position.standing == standing else now
            self._known[rank] = position.beat, alive, position.standing, moved
            found[rank] = Seen(position, now - alive, now - moved)
        return found

    def forget(self) -> None:
        """What was seen before says nothing about now."""
        self._known.clear()

    def verdict(self, ledger: Ledger, waited: float, limit: float, silent_after: float, patient: bool) -> str | None:
        """Why this rank should wait no longer, and where everybody is; None while it should."""
        ranks = self.look(ledger)
        reason = reason_to_give_up(self.rank, ranks, waited, limit, silent_after, patient)
        if reason is None or any(seen.position.gave_up == reason for seen in ranks.values()):
            return reason
        return f"{reason}: {described(self.rank, ranks, silent_after)}"

    def roll_call(self, ledger: Ledger) -> str:
        """An exchange has failed, so somebody has ended or hung up: who? Ranks that live publish once a beat."""
        self.forget()
        silent_after = SILENT_BEATS * interval()
        for _ in range(SILENT_BEATS + 3):
            told = self.verdict(ledger, float("inf"), float("inf"), silent_after, patient=True)
            if told is not None:
                return told
            time.sleep(interval())
        return f"an exchange with another rank has failed: {described(self.rank, self.look(ledger), silent_after)}"
