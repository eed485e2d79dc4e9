"""The all-gather through the store on real ranks: order, keys that go, ranks that do not come or come late."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import longweave as lw
from longweave.comm import ledger, store_gather
from longweave.comm.exchange import Comm, resolve
from longweave.comm.store_gather import store_all_gather
from longweave.launch import Ranks

ODD = 1  # the rank that does not come, or comes late


def gather(message: bytes, wait: float = 20.0, group: Any = None) -> list[bytes]:
    return store_all_gather(resolve(group), message, wait, "the test")


def catch(call: Callable[[], object]) -> str:
    try:
        call()
    except lw.GroupError as error:
        return str(error)
    return "nothing raised"


def test_a_single_process_needs_no_store() -> None:
    assert not dist.is_initialized()
    assert store_all_gather(Comm.alone(), b"mine", 0.001, "the test") == [b"mine"]
    assert gather(b"") == [b""]


# -- messages and keys -------------------------------------------------------------------------------


def in_order() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    everything = bytes(range(256))
    for message_of in (
        lambda r: f"rank {r}".encode(),
        lambda r: b"",
        lambda r: b"-" if r % 2 else b"+",  # what the places are marked with
        lambda r: everything * 500 * r,  # of very different sizes
        lambda r: b"" if r == 0 else everything,
    ):
        assert gather(message_of(rank)) == [message_of(r) for r in range(world)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_messages_come_in_rank_order(ranks: Ranks, size: int) -> None:
    ranks.run(in_order, size=size, timeout=30)


def many_calls(calls: int) -> tuple[int, list[int]]:
    """How many keys more the store has than before, and which calls still have keys."""
    rank, world = dist.get_rank(), dist.get_world_size()
    comm = resolve(None)
    gather(b"the first")
    dist.barrier()
    store = dist.group.WORLD.get_group_store()
    before = store.num_keys()
    dist.barrier()
    for i in range(calls):
        assert gather(f"{i} {rank}".encode()) == [f"{i} {r}".encode() for r in range(world)], i
    dist.barrier()
    grown = store.num_keys() - before
    numbers = range(1, comm.ledger.gathers + 1)
    left = [n for n in numbers if any(store.check([key]) for key in store_gather._keys(comm.ledger, n, world))]
    dist.barrier()
    return grown, left


def test_hundreds_of_calls_leave_the_keys_of_the_last(ranks: Ranks) -> None:
    for grown, left in ranks.run(many_calls, 300, size=3, timeout=60):
        assert grown == 0
        assert left == [301]


# -- ranks that do not come --------------------------------------------------------------------------


def one_late(wait: float, late: float) -> tuple[str, float, list[bytes]]:
    """What was said at the call and how long it took; then the ranks go on together."""
    rank = dist.get_rank()
    gather(b"all is well")
    begun = time.monotonic()
    if rank == ODD:
        time.sleep(late)
    said = catch(lambda: gather(b"x", wait))
    took = time.monotonic() - begun
    return said, took, gather(f"{rank} again".encode())


def test_a_rank_that_does_not_come_is_named_and_comes_too_late(ranks: Ranks) -> None:
    for rank, (said, took, after) in enumerate(ranks.run(one_late, 1.0, 1.8, size=3, timeout=30)):
        if rank == ODD:
            assert said.startswith("rank 1 came too late: rank ")
            assert said.endswith(" of the group waited 1 s in front of the test and gave up")
        else:
            start = f"rank 1 of the group has not come to the test within 1 s (call 2; I am rank {rank})."
            assert said.startswith(start), said
            assert 0.9 < took < 1.7, "as soon as the time is over"
        assert after == [b"0 again", b"1 again", b"2 again"], "the next call is one of all ranks"


def several_absent() -> str:
    dist.barrier()
    return catch(lambda: gather(b"x", 0.3)) if dist.get_rank() in (1, 3) else ""


def test_all_that_do_not_come_are_named(ranks: Ranks) -> None:
    found = ranks.run(several_absent, size=5, timeout=30)
    for rank in (1, 3):
        start = "ranks 0, 2, 4 of the group have not come to the test within 0.3 s (call 1;"
        assert found[rank].startswith(start), found[rank]


def at_the_last_moment() -> list[bytes] | str:
    """Rank ODD comes just after rank 0 has looked for it and before rank 0 gives up."""
    missing = store_gather._missing
    dist.barrier()
    if dist.get_rank() == 0:

        def looked_too_early(*args: Any) -> list[int]:
            missing(*args)
            time.sleep(0.3)  # rank ODD has read all places by now
            return [ODD]

        store_gather._missing = looked_too_early
    try:
        return gather(f"{dist.get_rank()}".encode())
    except lw.GroupError as error:
        return str(error)
    finally:
        store_gather._missing = missing


def test_all_ranks_go_on_or_none(ranks: Ranks) -> None:
    assert ranks.run(at_the_last_moment, size=2, timeout=30) == [[b"0", b"1"]] * 2


def longer_than_one_request() -> list[bytes]:
    first, store_gather.FIRST_WAIT = store_gather.FIRST_WAIT, 0.1
    try:
        if dist.get_rank() == ODD:
            time.sleep(0.5)
        return gather(f"{dist.get_rank()}".encode())
    finally:
        store_gather.FIRST_WAIT = first


def test_waiting_goes_on_after_the_first_request(ranks: Ranks) -> None:
    assert ranks.run(longer_than_one_request, size=2, timeout=30) == [[b"0", b"1"]] * 2


# -- groups and stores -------------------------------------------------------------------------------


def in_halves() -> list[bytes]:
    """Two groups at the same time, which make different numbers of calls."""
    rank = dist.get_rank()
    pair, others = dist.new_group([0, 3]), dist.new_group([1, 2, 4])
    own = pair if rank in (0, 3) else others
    for i in range(20):
        found = gather(f"{i} {rank}".encode(), group=own)
        if own is pair:
            assert gather(b"one more", group=own) == [b"one more"] * 2
    assert len(gather(b"x")) == 5, "the default group counts by itself"
    return found


def test_groups_do_not_mix(ranks: Ranks) -> None:
    found = ranks.run(in_halves, size=5, timeout=30)
    for rank in range(5):
        members = [0, 3] if rank in (0, 3) else [1, 2, 4]
        assert found[rank] == [f"19 {r}".encode() for r in members]


def absent_from_a_group() -> str:
    group = dist.new_group([1, 2, 3])
    dist.barrier()
    return catch(lambda: gather(b"x", 0.3, group)) if dist.get_rank() in (1, 3) else ""


def test_ranks_are_named_as_the_group_counts_them(ranks: Ranks) -> None:
    found = ranks.run(absent_from_a_group, size=4, timeout=30)
    for rank, own in ((1, 0), (3, 2)):
        start = f"rank 1 of the group has not come to the test within 0.3 s (call 1; I am rank {own})"
        assert found[rank].startswith(start), found[rank]


def made_anew() -> None:
    """As after destroy_process_group and another init: the ranks count from 1, and the store has the last keys."""
    rank = dist.get_rank()
    for life in range(3):
        for i in range(1 + life):
            if rank == ODD:
                time.sleep(0.05)  # who does not wait for this rank reads what it said before
            assert gather(f"{life} {i} {rank}".encode()) == [f"{life} {i} {r}".encode() for r in range(2)]
        dist.barrier()
        del ledger._ledgers[dist.group.WORLD]


def test_a_group_made_anew_reads_no_old_messages(ranks: Ranks) -> None:
    ranks.run(made_anew, size=2, timeout=30)


@pytest.mark.parametrize("kind", ["file", "hash", "tcp"])
def test_any_store_tells_who_is_missing(kind: str, tmp_path: Path) -> None:
    if kind == "tcp":
        store: dist.Store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    else:
        store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 1)
    store.set("b", "here")
    assert store_gather._missing(store, ["a", "b", "c"], 0.1, lambda: None) == [0, 2]
    assert store_gather._put(store, "a", b"+") == b"+"
    assert store_gather._put(store, "b", b"-") == b"here", "who comes first stays"
    assert store_gather._missing(store, ["a", "b"], 0.1, lambda: None) == []


def waits_elsewhere(limit: float, late: float) -> tuple[str, float]:
    """Rank 0 waits for an exchange that rank 1 does not make, because it has gone on to the next gather."""
    lw.set_wait(limit)
    try:
        pack = lw.Pack([0, 40], layout="zigzag")
        q = torch.randn(pack.tokens, 2, 8)
        for _ in range(3):
            pack = lw.Pack([0, 40], layout="zigzag")
            lw.attention(q, q, q, pack)
            gather(b"x")
        begun = time.monotonic()
        if dist.get_rank() == 0:
            said = catch(lambda: lw.attention(q, q, q, pack))
        else:
            time.sleep(late)
            said = catch(lambda: gather(b"x", 60.0))
        return said, time.monotonic() - begun
    finally:
        lw.set_wait(None)


def test_ranks_that_wait_here_count_as_waiting(ranks: Ranks) -> None:
    """A rank whose exchange is not answered meanwhile says so after the limit, and ends the wait in the gather."""
    for said, took in ranks.run(waits_elsewhere, 2.0, 0.0, size=2, timeout=60):
        assert "the ranks wait in different calls" in said
        assert "rank 0 waits in attention, forward" in said
        assert "rank 1 waits in the test" in said
        assert took < 20


def in_no_call(limit: float, late: float) -> list[bytes]:
    """The limit of waits for exchanges is not that of this gather: rank 1 is in no call for longer."""
    lw.set_wait(limit)
    try:
        lw.Pack([0, 40])
        lw.Pack([0, 40])
        gather(b"x")
        time.sleep(late if dist.get_rank() else 0.0)
        return gather(b"y", 30.0)
    finally:
        lw.set_wait(None)


def test_a_rank_in_no_call_is_waited_for_as_long_as_was_asked(ranks: Ranks) -> None:
    assert ranks.run(in_no_call, 1.0, 5.0, size=3, timeout=60) == [[b"y"] * 3] * 3
