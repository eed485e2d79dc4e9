"""An all-gather of a few bytes through the process group's store: all ranks come within a bounded time, or are named.

    rank 0   set call 7, rank 0 ─┐
    rank 1   set call 7, rank 1 ─┼─▶ store ──▶ every rank reads all of call 7, and goes on
    rank 2   (still elsewhere)   ┘             or after `wait` seconds: "rank 2 did not come to call 7"

A collective that not all ranks make hangs until the group's timeout, and one that meets another collective may abort
the process. So a place that ranks may fail to reach together asks here first, where waiting costs nothing and disturbs
nobody. It also spares GPUs a wait for the host: small numbers never go to a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from longweave.comm.exchange import Comm
from longweave.comm.ledger import Ledger, RecordedCall
from longweave.comm.watch import NO_STORE, store_limit, trouble
from longweave.comm.whereabouts import answer, life_of
from longweave.errors import GroupError, named

T = TypeVar("T")

FIRST_WAIT = 5.0  # seconds in one request; afterwards the store is asked now and then, so that Ctrl-C is heard
PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two questions: first, later

_HERE, _GAVE_UP = b"+", b"-"


def store_all_gather(comm: Comm, message: bytes, wait: float, what: str, hint: str = "") -> list[bytes]:
    """The messages of all ranks, in rank order. `what` says in an error's text what the ranks are about to do, `hint`
    why a rank might not come.

    A rank that others wait for elsewhere learns it from them, after their limit. Raises `GroupError` on every rank if
    one of them does not come within `wait` seconds: also on that one, later.
    """
    group = comm.group
    if group is None or comm.size == 1:
        return [message]
    with RecordedCall(comm.ledger, what, what).meeting():
        return _gather(comm, group.get_group_store(), message, wait, what, hint)


def _gather(comm: Comm, store: Store, message: bytes, wait: float, what: str, hint: str) -> list[bytes]:
    ledger = comm.ledger
    ledger.gathers += 1
    number = ledger.gathers
    try:
        if ledger.life is None:
            _answered(lambda: life_of(ledger))
        keys = _keys(ledger, number, comm.size)
        # Either a rank puts its message in its place, or another one marks the place: whoever reads it later finds the
        # same, so all ranks go on or none.
        place = _put(store, keys[comm.rank], _HERE + message)
        if place.startswith(_GAVE_UP):
            who = named([int(place.removeprefix(_GAVE_UP))])
            raise GroupError(
                f"rank {comm.rank} came too late: {who} of the group waited {wait:g} s in front of {what} and gave up"
            )
        observer = ledger.observer
        if observer is not None:
            observer.wait_begins()
        ledger.is_at_store = True
        try:
            missing = _missing(store, keys, wait, lambda: trouble(ledger))
        finally:
            ledger.is_at_store = False
            if observer is not None:
                observer.wait_ends()
        for rank in missing:
            _put(store, keys[rank], _GAVE_UP + str(comm.rank).encode())
        found = _answered(lambda: store.multi_get(keys))
        absent = [rank for rank, text in enumerate(found) if text.startswith(_GAVE_UP)]
        if absent:
            raise GroupError(
                f"{_absent(absent)} {what} within {wait:g} s (call {number}; I am rank {comm.rank}). All ranks of the "
                "group must make this call equally often: no rank may skip a batch, evaluate by itself, or "
                "have fewer batches than the others, and each runs as many backward passes as the others, which it may "
                f"still be waiting in. {hint}If a rank really needs longer, raise wait="
            )
        if number > 1:  # all ranks have read the call before this one
            _answered(lambda: store.delete_key(_keys(ledger, number - 1, comm.size)[comm.rank]))
    except (dist.DistError, TimeoutError) as error:
        raise GroupError(f"{NO_STORE} ({error}): see its output") from error
    return [text.removeprefix(_HERE) for text in found]


def _put(store: Store, key: str, value: bytes) -> bytes:
    """What lies there then: the value, or what somebody was faster to put there."""
    return _answered(lambda: store.compare_set(key, "", value))  # type: ignore[arg-type]


def _missing(store: Store, keys: Sequence[str], wait: float, trouble_of_others: Callable[[], str | None]) -> list[int]:
    """Which ranks have not come, after `wait` seconds at most. Raises if one of them has left, or given up."""
    deadline = time.monotonic() + wait
    try:
        store.wait(list(keys), timedelta(seconds=min(wait, FIRST_WAIT)))
        return []
    except RuntimeError:  # that of a FileStore is no DistStoreError
        pass
    pause = PAUSE
    while not _answered(lambda: store.check(list(keys))):
        if time.monotonic() >= deadline:
            return _answered(lambda: [rank for rank, key in enumerate(keys) if not store.check([key])])
        reason = trouble_of_others()
        if reason is not None:
            raise GroupError(reason)
        time.sleep(min(pause, max(deadline - time.monotonic(), 0)))
        pause = min(1.5 * pause, LONGEST_PAUSE)
    return []


def _answered(request: Callable[[], T]) -> T:
    """The store's answer; `TimeoutError` if none comes within the wait limit."""
    return answer(store_limit(), request)


def _keys(ledger: Ledger, number: int, size: int) -> list[str]:
    return [f"longweave/{ledger.life}/{number}/{rank}" for rank in range(size)]


def _absent(ranks: Sequence[int]) -> str:
    return f"{named(ranks)} of the group {'has' if len(ranks) == 1 else 'have'} not come to"
