"""Keys of its own for every group: groups that processes make one after another may have one store and one name.

    longweave/life                   "5f0c…"    of the group that lives; drawn by the first rank that asks
    longweave/5f0c…/asked/{rank}     1          a second time: this rank is in a later group, and a new life is drawn
    longweave/5f0c…/…                           what this group has to say

A rank that has asked empties the first key when its group ends, which is before it makes the next one. So a rank that
did not ask in the group before does not take that group's life for its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from uuid import uuid4

from torch._C._distributed_c10d import Store

from longweave.comm.ledger import Ledger

T = TypeVar("T")

LIFE = "longweave/life"
FAREWELL = 1.0  # seconds that the end of a group waits for the store at most


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
    return store.compare_set(LIFE, before, uuid4().hex).decode()


def _end(life: str, store: Store) -> None:
    with suppress(RuntimeError):  # of a process that ends
        within(FAREWELL, lambda: store.compare_set(LIFE, life, ""))


def within(seconds: float, fn: Callable[[], T]) -> T | None:
    """What `fn` returns, or None if it raises or takes longer: what talks to a store may wait for a dead process."""
    found: list[T] = []

    def call() -> None:
        with suppress(Exception):
            found.append(fn())

    thread = threading.Thread(target=call, name="longweave-ask", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
