"""The watch over waits where a store is slow or ends, or a device waits; mostly without ranks, with a fake clock."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import longweave as lw
from longweave.comm import agreement, device, exchange, store_gather, watch, whereabouts
from longweave.comm.exchange import Comm, received_on_host
from longweave.comm.ledger import Ledger, RecordedCall
from longweave.comm.positions import Position
from longweave.comm.watch import Watcher, wait_for
from longweave.comm.whereabouts import LIFE, Whereabouts, life_of
from longweave.launch import Ranks

CU = [0, 7, 24]
CUDA = torch.device("cuda")


class Clock:
    """In the place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Group:
    """What a `Whereabouts` and a life need of a process group."""

    _device_types = ()

    def __init__(self, rank: int, store: Any) -> None:
        self._rank, self._store = rank, store

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def get_group_store(self) -> Any:
        return self._store


class Watched:
    """A ledger on rank 0 of two, the store, and what rank 1 publishes there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, packs: int = 2) -> None:
        self.store = dist.HashStore()
        self.group = Group(0, self.store)
        self.ledger = Ledger(self.group)  # type: ignore[arg-type]
        self.ledger.packs, self.ledger.is_watched = packs, True
        self.ledger.whereabouts = self.whereabouts = Whereabouts(self.ledger, self.group)  # type: ignore[arg-type]
        self.watcher = Watcher()
        self.beat = 0
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
        monkeypatch.setattr(watch, "_hang_up", lambda ledger: None)
        self.watcher._ledgers = [weakref.ref(self.ledger)]

    def call(self, times: int = 1) -> None:
        for _ in range(times):
            with RecordedCall(self.ledger, "attention of q").forward():
                pass

    def other(self, **changes: Any) -> None:
        """Rank 1 publishes once more."""
        self.beat += 1
        here = {"number": 7, "name": "attention", "phase": "forward", "description": "attention of q", "is_over": True}
        position = Position(**{"beat": self.beat, **here, "host": "b", "pid": 2, **changes})
        self.store.set(self.whereabouts._keys[1], position.text())


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.fixture(autouse=True)
def _no_limit_of_others() -> Iterator[None]:
    yield
    lw.set_wait(None)


def run(loop: Callable[[], None], watched: Watched, seconds: float, *, publish: bool = True) -> float:
    """A thread's loop, until the group was given up, or for so long. Returns how long it took."""
    thread = threading.Thread(target=loop, daemon=True)
    begin = time.monotonic()
    watched.ledger.waiting = begin
    thread.start()
    while watched.ledger.broken is None and time.monotonic() < begin + seconds:
        if publish:
            watched.other()
        time.sleep(0.05)
    took = time.monotonic() - begin
    watched.watcher._stop.set()
    thread.join(5)
    return took


# -- a slow store ----------------------------------------------------------------------------------------


@pytest.fixture
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT", 0.1)
    monkeypatch.setattr(whereabouts, "BEAT", 0.1)
    monkeypatch.setattr(watch, "PAUSED", 0.3)
    monkeypatch.setattr(watch, "STORE_ANSWERS", 0.6)
    monkeypatch.setattr(whereabouts, "RETRY", 0.1)


def slow(watched: Watched, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    texts = watched.whereabouts._texts

    def after_a_while() -> dict[int, bytes]:
        time.sleep(seconds)
        return texts()

    monkeypatch.setattr(watched.whereabouts, "_texts", after_a_while)


@pytest.mark.usefixtures("_short_times")
class TestStore:
    def test_a_slow_one_does_not_switch_the_watch_off(self, watched: Watched, monkeypatch: Any) -> None:
        lw.set_wait(0.8)
        watched.call(8)
        slow(watched, monkeypatch, 0.6)  # longer than PAUSED
        run(watched.watcher._watch, watched, 15)
        assert str(watched.ledger.broken).startswith("rank 1 did not come to attention, forward, call 8, within")

    def test_a_slow_one_accuses_nobody_of_silence(self, watched: Watched, monkeypatch: Any) -> None:
        """Rank 1 lives, makes call after call, and every answer takes almost as long as the limit."""
        lw.set_wait(0.7)
        watched.call(8)
        slow(watched, monkeypatch, 0.65)
        number = iter(range(100, 1000))
        other = watched.other
        monkeypatch.setattr(watched, "other", lambda: other(number=next(number)))
        run(watched.watcher._watch, watched, 4)
        assert watched.ledger.broken is None

    def test_one_that_answers_is_not_said_to_be_gone(self, watched: Watched, monkeypatch: Any) -> None:
        lw.set_wait(0.3)

        def guard() -> None:
            while not watched.watcher._stop.wait(0.5):  # nearly as long as STORE_ANSWERS
                watched.whereabouts.look(watched.ledger)

        threading.Thread(target=guard, daemon=True).start()
        run(watched.watcher._guard, watched, 3)
        assert watched.ledger.broken is None

    def test_one_that_fails_once_is_asked_again(self, watched: Watched, monkeypatch: Any) -> None:
        lw.set_wait(0.8)
        watched.call(8)
        publish, failures = watched.whereabouts.publish, []

        def fails_first(ledger: Ledger) -> None:
            if not failures:
                failures.append(1)
                raise RuntimeError("Broken pipe")
            publish(ledger)

        monkeypatch.setattr(watched.whereabouts, "publish", fails_first)
        monkeypatch.setattr(watched.whereabouts, "_retry_in", 0.2)
        run(watched.watcher._watch, watched, 15)
        assert failures
        assert "rank 1 did not come" in str(watched.ledger.broken)

    def test_one_that_has_ended_is_said_to(self, watched: Watched, monkeypatch: Any) -> None:
        lw.set_wait(0.3)
        monkeypatch.setattr(watched.whereabouts, "publish", lambda ledger: 1 / 0)
        threading.Thread(target=watched.watcher._watch, daemon=True).start()
        took = run(watched.watcher._guard, watched, 15)
        assert took > 0.7
        assert watched.whereabouts.is_lost
        assert "the store of the process group does not answer for" in str(watched.ledger.broken)
        assert watched.ledger.whereabouts is not None

    def test_a_pause_of_this_process_accuses_nobody(self, watched: Watched, monkeypatch: Any) -> None:
        """Both ranks were stopped, this one while its thread slept."""
        watched.call(8)
        watched.other()
        watched.whereabouts.look(watched.ledger)
        begin = time.monotonic()
        monkeypatch.setattr(watched.watcher._stop, "wait", lambda seconds: time.sleep(seconds + 0.7))
        assert watched.watcher._sleep(0.1)
        assert watched.watcher._resumed > begin + 0.7
        seen = watched.whereabouts.look(watched.ledger)[1]
        assert seen.silent < 0.3
        assert seen.unchanged < 0.3

    def test_after_a_cut_that_heals_nobody_was_silent(self, watched: Watched) -> None:
        watched.other()
        watched.whereabouts.look(watched.ledger)
        watched.whereabouts.lost()
        assert not watched.whereabouts.is_connected()
        time.sleep(0.7)
        assert watched.whereabouts.is_connected()
        assert watched.whereabouts.look(watched.ledger)[1].silent < 0.3

    def test_who_gathers_through_the_store_needs_no_connection_of_the_watch(
        self, watched: Watched, monkeypatch: Any
    ) -> None:
        watched.call()
        watched.other(gave_up="rank 1 had enough")
        assert watch.trouble(watched.ledger) == "rank 1 had enough"
        monkeypatch.setattr(watched.whereabouts, "_texts", raises(RuntimeError("Broken pipe")))
        assert watch.trouble(watched.ledger) is None
        watched.whereabouts.lost()
        monkeypatch.setattr(watched.whereabouts, "_texts", raises(AssertionError("asked on a lost connection")))
        assert watch.trouble(watched.ledger) is None


def raises(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


class StandsStill(dist.HashStore):
    """Its process was stopped: requests are not answered."""

    def compare_set(self, *_: Any) -> bytes:
        time.sleep(20)
        return b""


def test_a_store_that_stands_still_ends_a_gather(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STORE_ANSWERS", 0.4)
    lw.set_wait(0.2)
    comm = Comm(None, 0, 2, watched.ledger)
    begin = time.monotonic()
    with pytest.raises(lw.GroupError, match=r"the store .* does not answer: .* \(no answer for 0.4 s\)"):
        store_gather._gather(comm, StandsStill(), b"x", 600.0, "the test", "")
    assert time.monotonic() - begin < 5


def test_a_store_that_stands_still_ends_the_first_call_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STORE_ANSWERS", 0.4)
    monkeypatch.setattr(watch, "_backends", lambda group: [])
    lw.set_wait(0.2)
    group = Group(0, StandsStill())
    with pytest.raises(lw.GroupError, match=r"the store .* does not answer"):
        watch.begin(Ledger(group))  # type: ignore[arg-type]


def test_who_has_ended_is_named_in_front_of_a_gather(watched: Watched, clock: Clock) -> None:
    watched.call()
    watched.other()
    assert watch.trouble(watched.ledger) is None
    clock.now += 31
    assert "rank 1 gave no sign of life for 31 s" in str(watch.trouble(watched.ledger))


def loses_its_store(port: int) -> tuple[str, float]:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    lw.set_wait(2)
    try:
        for _ in range(2):
            pack = lw.Pack(CU, layout="zigzag")
            x = torch.randn(pack.tokens, 2, 8)
            lw.attention(x, x, x, pack, strategy="ring")
        if rank == 0:
            store.set("end", "now")
        time.sleep(2)
        begin = time.monotonic()
        if rank == 1:
            time.sleep(10)
            return "", 0.0
        try:
            lw.attention(x, x, x, pack, strategy="ring")
        except lw.GroupError as error:
            return str(error), time.monotonic() - begin
        return "nothing raised", time.monotonic() - begin
    finally:
        lw.set_wait(None)


def test_a_store_that_ends_ends_waits(ranks: Ranks) -> None:
    """It is kept by a third process, this one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port

    def keep(store: dist.TCPStore) -> None:
        while not store.check(["end"]):
            time.sleep(0.2)

    keeper = threading.Thread(target=keep, args=(store,), daemon=True)
    keeper.start()
    del store  # it ends with its keeper
    said, seconds = ranks.run(loses_its_store, port, size=2, timeout=90)[0]
    assert "the store of the process group does not answer" in said
    assert seconds < 9.5


# -- a device waits --------------------------------------------------------------------------------------


class Event:
    """That a test decides about."""

    reached = False

    def __init__(self, device: torch.device) -> None:
        assert device == CUDA

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.reached


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """For a device without any: events and time are the test's."""
    found = Clock()
    for module in (watch, whereabouts, device):
        monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    return found


def test_silence_is_what_is_sure_of_it(watched: Watched, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer takes three seconds, and nobody knows when in between the store has looked."""
    texts = watched.whereabouts._texts
    monkeypatch.setattr(watched.whereabouts, "_texts", lambda: (clock.sleep(3), texts())[1])
    watched.other()
    watched.whereabouts.look(watched.ledger)
    clock.now += 1
    seen = watched.whereabouts.look(watched.ledger)[1]
    assert (seen.silent, seen.unchanged) == (1.0, 1.0)
    watched.other()
    seen = watched.whereabouts.look(watched.ledger)[1]
    assert (seen.silent, seen.unchanged) == (0.0, 4.0)


@pytest.mark.parametrize(
    ("changes", "text", "earliest", "latest"),
    [
        ({"departures": 1, "left": 8, "departure": "attention, call 8 with MemoryError: no"}, "rank 1 left", 0, 2),
        ({"history": [(8, "shift, forward", 1)]}, "call 8 of rank 1 was shift", 0, 2),
        ({}, "rank 1 did not come to attention, forward, call 8", 500, 600),
        ({"number": 21, "waits": True, "is_over": False}, "the ranks wait in different calls", 500, 600),
        (
            {"departures": 1, "left": 9, "departure": "attention, call 9 with MemoryError: no"},
            "rank 1 did not",
            500,
            600,
        ),
    ],
)
def test_a_device_that_waits(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, changes: dict[str, Any], text: str, earliest: float, latest: float
) -> None:
    """With the default limit, and NCCL's own timeout of 600 seconds. The process has run ahead to call 20."""
    watched = Watched(monkeypatch, packs=5)
    watched.whereabouts._timeout = 600.0
    watched.call(8)
    wait_for([SimpleNamespace(wait=lambda: None)], watched.ledger, CUDA)  # type: ignore[list-item]
    watched.call(12)
    begin = clock.now
    while watched.ledger.broken is None and clock.now < begin + 2000:
        watched.other(**changes)
        watched.watcher._attend(watched.ledger, watched.whereabouts)
        clock.now += 0.5
    assert text in str(watched.ledger.broken)
    assert earliest <= clock.now - begin <= latest


def test_a_device_that_gets_on_waits_for_nobody(watched: Watched, clock: Clock) -> None:
    marks = watched.whereabouts.device
    for _ in range(3 * device.MARKS):  # the process runs far ahead
        watched.call()
        clock.now += 0.01
        marks.set(CUDA, watched.ledger.at)
    assert len(marks._marks) == device.MARKS
    since, at = marks.waits() or (0.0, None)
    assert at is not None
    assert at.number == 2 * device.MARKS + 1
    clock.now += 5
    assert marks.waits() == (since, at), "it has not got on"
    marks._marks[0].event.reached = True  # type: ignore[misc]
    since, at = marks.waits() or (0.0, None)
    assert at is not None
    assert (since, at.number) == (clock.now, 2 * device.MARKS + 2)
    for mark in marks._marks:
        mark.event.reached = True  # type: ignore[misc]
    assert marks.waits() is None


def test_what_is_remembered_keeps_no_buffer(watched: Watched, clock: Clock) -> None:
    buffer = torch.empty(8)
    work = SimpleNamespace(wait=lambda: None, buffer=buffer)
    gone = weakref.ref(buffer)
    wait_for([work], watched.ledger, CUDA)  # type: ignore[list-item]
    del work, buffer
    gc.collect()
    assert gone() is None
    unwatched = Ledger(None)
    unwatched.is_watched = True
    wait_for([SimpleNamespace(wait=lambda: None)], unwatched, CUDA)  # type: ignore[list-item]
    assert unwatched.whereabouts is None


# -- what a device brings after its exchange was ended ---------------------------------------------------


class Arrives:
    """An exchange that is ended while a device waits for it: nothing arrived in this memory."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def wait(self) -> torch.Tensor:
        self.ledger.broken = "rank 1 gave no sign of life for 600 s"
        return torch.full((2, 5), 123456789)


def test_garbage_is_not_taken_for_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(None)
    comm = Comm("x", 0, 2, ledger)
    comm.__dict__["device_types"] = {"cpu"}
    monkeypatch.setattr(agreement, "all_gather_v", lambda *args: Arrives(ledger))
    with pytest.raises(lw.GroupError, match="no sign of life for 600 s"):
        agreement.compare(comm, [agreement.same_calls("attention of q")])


def test_nothing_is_read_from_a_group_that_was_given_up() -> None:
    comm = Comm("x", 0, 2, Ledger(None))
    assert received_on_host(torch.ones(2), comm).tolist() == [1.0, 1.0]
    comm.ledger.broken = "rank 1 ended"
    with pytest.raises(lw.GroupError, match="rank 1 ended"):
        received_on_host(torch.ones(2), comm)


def test_an_exchange_of_a_group_that_was_given_up_meanwhile_raises() -> None:
    """So `lw.reduce_gradients` does, if it is known by then."""
    ledger = Ledger(None)
    ledger.is_watched = True
    with pytest.raises(lw.GroupError, match="rank 1 ended"):
        wait_for([SimpleNamespace(wait=lambda: setattr(ledger, "broken", "rank 1 ended"))], ledger, CUDA)  # type: ignore[list-item]


# -- errors of our own -----------------------------------------------------------------------------------


def after_destroy(by_messages: bool) -> tuple[list[str], float]:
    """As a device exchanges, forced on gloo where `by_messages` is False: every collective on a group that is gone."""
    with pytest.MonkeyPatch.context() as patch:
        if not by_messages:
            patch.setattr(exchange, "_by_messages", lambda x: False)
        group = dist.new_group()
        comm = exchange.resolve(group)
        x = torch.ones(4, 3)
        calls: list[Callable[[], object]] = [
            lambda: exchange.all_to_all_v(x, [2, 2], [2, 2], comm).wait(),
            lambda: exchange.all_gather_v(x, [4, 4], comm).wait(),
            lambda: exchange.reduce_scatter_v(x, [2, 2], comm).wait(),
            lambda: list(exchange.all_reduce_sum([x], comm)),
            lambda: exchange.send_next(x, torch.empty_like(x), 1 - comm.rank, 1 - comm.rank, comm).wait(),
        ]
        for call in calls:
            call()
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group
        begin, said = time.monotonic(), []
        for call in calls:
            try:
                call()
                said.append("nothing raised")
            except lw.GroupError as error:
                said.append(str(error))
        return said, time.monotonic() - begin


@pytest.mark.parametrize("by_messages", [True, False])
def test_a_group_that_was_destroyed_is_nobodys_fault(ranks: Ranks, by_messages: bool) -> None:
    for said, seconds in ranks.run(after_destroy, by_messages, size=2, timeout=60):
        assert all(text.startswith("the process group of this pack was destroyed") for text in said), said
        assert seconds < 3, "without a roll call"


# -- lives -----------------------------------------------------------------------------------------------


class Life:
    """The groups that two ranks make one after another on one store, by one name."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.groups: list[Group] = []

    def begin(self) -> None:
        """Whatever held the groups before, they have been destroyed."""
        self.groups = [Group(rank, self.store) for rank in range(2)]
        self.ledgers = [Ledger(group) for group in self.groups]  # type: ignore[arg-type]

    def of(self, rank: int) -> str:
        return life_of(self.ledgers[rank])


@pytest.mark.parametrize("asked_before", [[0], [1], [0, 1], [1, 0], []])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_ranks_meet_whoever_asked_in_the_group_before(asked_before: list[int], order: list[int]) -> None:
    life = Life(dist.HashStore())
    before = set()
    for _ in range(3):
        life.begin()
        before |= {life.of(rank) for rank in asked_before}
    life.begin()
    lives = {life.of(rank) for rank in order}
    assert len(lives) == 1
    assert not lives & before
    assert {life.of(rank) for rank in order} == lives, "asked once"


def test_ranks_that_all_asked_meet_even_if_somebody_holds_the_groups_before() -> None:
    life, held, seen = Life(dist.HashStore()), [], set()
    for count in range(1, 4):
        life.begin()
        held.append(life.groups)
        found = {life.of(rank) for rank in (0, 1)}
        assert len(found) == 1
        seen |= found
        assert len(seen) == count
    del held
    gc.collect()
    assert life.store.get(LIFE).decode() in found, "the end of a group before takes nothing from the one that lives"


def test_a_store_that_is_gone_does_not_keep_the_end_of_a_group() -> None:
    class Gone:
        def compare_set(self, *args: str) -> bytes:
            if args[2]:
                return args[2].encode()
            time.sleep(5)
            raise RuntimeError("Broken pipe")

        def add(self, *args: object) -> int:
            return 1

    life = Life(Gone())
    life.begin()
    life.of(0)
    begin = time.monotonic()
    life.groups.clear()
    assert time.monotonic() - begin < 3


def test_the_timeout_of_a_group_is_known(ranks: Ranks) -> None:
    assert ranks.run(timeout_of_this, size=2, timeout=60, wait=47.0) == [47.0, 47.0]
    assert whereabouts._timeout_of(Group(0, None)) == math.inf  # type: ignore[arg-type]


def timeout_of_this() -> float:
    assert dist.group.WORLD is not None
    return whereabouts._timeout_of(dist.group.WORLD)
