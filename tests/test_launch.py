"""The harness itself: results, errors with their rank, dead and hanging ranks, nothing left behind."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longweave.launch import RankError, Ranks, RankTimeoutError


def world() -> tuple[int, int, int, int]:
    x = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), int(x), torch.get_num_threads()


def fail_on(bad: int) -> int:
    if dist.get_rank() == bad:
        raise ValueError(f"bad luck {bad}")
    dist.barrier()  # the others wait for a rank that never comes
    return dist.get_rank()


def die_on(bad: int) -> None:
    if dist.get_rank() == bad:
        os._exit(7)
    dist.barrier()


def sleep_on(bad: int) -> None:
    if dist.get_rank() == bad:
        time.sleep(60)


def unpicklable() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("cannot travel")


class Poison:
    """Can be pickled, but not read back."""

    def __reduce__(self):
        return int, ("not a number",)


def poisoned(bad: int) -> object:
    return Poison() if dist.get_rank() == bad else "fine"


def pid() -> int:
    return os.getpid()


def test_every_run_has_its_own_world(ranks: Ranks) -> None:
    assert ranks.run(world) == [(r, 8, 36, 1) for r in range(8)]
    assert ranks.run(world, size=3) == [(r, 3, 6, 1) for r in range(3)]
    assert ranks.run(pid, size=2) == ranks.run(pid, size=2), "workers are started once"


def test_an_error_comes_back_with_its_rank_and_the_pool_goes_on(ranks: Ranks) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match="bad luck 1") as caught:
        ranks.run(fail_on, 1, size=3)
    assert time.monotonic() - begin < 30, "peers that wait in a collective must not wait for its timeout"
    note = "".join(caught.value.__notes__)
    assert "raised on rank 1" in note
    assert "in fail_on" in note
    assert len(ranks.run(world, size=3)) == 3


def test_an_error_that_cannot_be_pickled(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="LocalError: cannot travel"):
        ranks.run(unpicklable, size=1)


def test_a_result_that_cannot_be_read_does_not_spoil_the_next_run(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="not a number"):
        ranks.run(poisoned, 0, size=2)
    assert len(set(ranks.run(pid, size=2))) == 2
    assert [r for r, *_ in ranks.run(world, size=2)] == [0, 1]


def test_a_dead_rank_is_named_and_replaced(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 2 died with exit code 7"):
        ranks.run(die_on, 2, size=3)
    assert len(ranks.run(world, size=3)) == 3


def crash() -> None:
    faulthandler._sigsegv()


def test_a_rank_that_crashes_tells_where_it_was(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 0 died of SIGSEGV") as caught:
        ranks.run(crash, size=1)
    assert "in crash" in "".join(caught.value.__notes__)
    assert len(ranks.run(world, size=2)) == 2


def test_a_hanging_rank_is_named_with_its_stack(ranks: Ranks) -> None:
    with pytest.raises(RankTimeoutError, match=r"(?s)ranks \[.*1.*\] of 2 did not come back within 3 s.*sleep_on"):
        ranks.run(sleep_on, 1, size=2, timeout=3)
    assert len(ranks.run(world, size=2)) == 2


SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with it ignored
sys.path.insert(0, {tests!r})
from longweave.launch import Ranks
from test_launch import pid, sleep_on
if __name__ == "__main__":
    pool = Ranks(2)
    print(*pool.run(pid), flush=True)
    pool.run(sleep_on, 1)
"""


FIRST_PROCESSES = """
import sys
sys.path.insert(0, {tests!r})
from longweave.launch import Ranks
from test_launch import blocks_ctrl_c
if __name__ == "__main__":
    print(*Ranks(2).run(blocks_ctrl_c))
"""


def blocks_ctrl_c() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_ctrl_c_is_never_for_the_ranks(tmp_path: Path) -> None:
    """Not for the first one either, nor while it imports: it would print a traceback."""
    script = tmp_path / "parent.py"
    script.write_text(FIRST_PROCESSES.format(tests=str(Path(__file__).parent)))
    assert subprocess.check_output([sys.executable, str(script)], text=True).split() == ["True", "True"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_parent(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(n) for n in parent.stdout.readline().split()]
    assert len(children) == 2
    time.sleep(0.5)
    parent.send_signal(how)
    parent.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(_alive(child) for child in children):
        assert time.monotonic() < deadline, "a worker is still there"
        time.sleep(0.1)


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
