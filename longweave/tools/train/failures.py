"""What a failed run says: one line that names the rank and what to do; the rest goes to a file.

local ranks   the parent has heard every rank: who raised first, who died, who is stopped
torchrun      each rank has only its own error. One that waited in vain asks through the store who else has given
              up: whoever does not answer there is named with its host
"""

from __future__ import annotations

import re
import socket
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from longweave.errors import GroupError, InputError, LongweaveError
from longweave.launch import FailedRun, RankError
from longweave.tools.train import checkpoints
from longweave.tools.train.together import RunFileError

LONGEST = 400  # characters of an error's text in the line
ANSWER_WITHIN = 8.0  # seconds for the other ranks to notice, too, that a wait has ended

# What gloo says when a rank did not come or has gone: it is seldom the rank's own fault.
_WAITED = re.compile(r"timed out|connection (closed|reset|refused)|broken pipe|socket timeout", re.IGNORECASE)
_REMEDIES = (
    (re.compile(r"MemoryError|allocate memory|out of memory"), "take fewer --tokens, more --ranks or --checkpointing"),
    (re.compile(r"SIGKILL"), "the kernel ends processes so when memory is short: see dmesg, and take fewer --tokens"),
    (re.compile(r"No space left"), "make room there, or give another --out"),
)


class TrainingError(LongweaveError, RuntimeError):
    """A run has failed on its ranks. The text is one line."""


def waited(error: BaseException) -> bool:
    """Did this rank only wait for another one?"""
    return (
        isinstance(error, RuntimeError) and not isinstance(error, LongweaveError) and bool(_WAITED.search(str(error)))
    )


def of_local_ranks(error: Exception, failed: FailedRun, ranks: int, out: Path | None) -> TrainingError:
    """What `Ranks.run` raised, in one line."""
    own = _first_line(error) if isinstance(error, RankError) else f"rank {failed.rank}: {_first_line(error)}"
    stopped = [rank for rank, state in failed.silent.items() if state == "stopped"]
    in_vain = waited(error) or (isinstance(error, GroupError) and bool(stopped))  # we know more than the rank did
    lost = [
        f"rank {rank} of {ranks} does not answer: it is {'stopped' if rank in stopped else 'still at work'}"
        # After an error of its own a rank's peers are mostly just waiting for it.
        for rank in (failed.silent if waited(error) or failed.rank is None else stopped)
    ]
    if not lost or (not in_vain and failed.rank is not None):
        facts = [own, *lost]
    else:
        facts = [*lost, *([f"rank {failed.rank} waited for it"] if failed.rank is not None else [])]
    parts = [f"--- rank {rank}\n{text}" for rank, text in sorted((failed.traces | failed.stacks).items())]
    return _compose("; ".join(facts), "\n".join([str(error), *parts]), out, "error.log")


def of_this_rank(error: Exception, hosts: list[str], out: Path | None) -> TrainingError:
    """What one of torchrun's ranks raised, in one line."""
    rank = dist.get_rank()
    me = f"rank {rank} of {len(hosts)} on {hosts[rank]}"
    text = f"{me}: {_first_line(error)}"
    if waited(error):
        text = f"{me} waited in vain: {_blame(hosts)} ({_first_line(error)})"
    return _compose(text, "".join(traceback.format_exception(error)), out, f"error-rank-{rank}.log")


def gather_hosts() -> list[str]:
    """The host of every rank, asked while all of them are well."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def _blame(hosts: list[str]) -> str:
    """Who has not given up as well, and is therefore what everybody waits for."""
    answer: list[list[int]] = []
    # In a thread: a store whose host is gone may never answer, not even that time is up.
    asking = threading.Thread(target=_ask, args=(dist.get_rank(), len(hosts), answer), daemon=True)
    asking.start()
    asking.join(ANSWER_WITHIN + 1)
    if not answer:
        return f"{hosts[0]}, where rank 0 and the store are, cannot be reached"
    if not answer[0]:
        return "all ranks have given up, see their lines"
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in answer[0]) + " is silent"


def _ask(me: int, size: int, answer: list[list[int]]) -> None:
    """Say that this rank gave up; the answer is who does not say so in time. None comes if there is no store."""
    store = _get_default_store()
    keys = [f"longweave/gave-up/{rank}" for rank in range(size)]
    deadline = time.monotonic() + ANSWER_WITHIN
    with suppress(RuntimeError):
        store.set(keys[me], "1")
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.1)
        answer.append([rank for rank, key in enumerate(keys) if not store.check([key])])


def _compose(facts: str, trace: str, out: Path | None, name: str) -> TrainingError:
    parts = [facts, *(remedy for pattern, remedy in _REMEDIES if pattern.search(facts))]
    parts.append(f"the traceback is in {_log(trace, out, name)}")
    kept = checkpoints.newest(out) if out else None
    if kept and str(kept) not in facts:  # else it is the one that cannot be resumed from
        parts.append(f"--resume {out} goes on from {kept.name}")
    return TrainingError("; ".join(parts))


def _log(trace: str, out: Path | None, name: str) -> Path:
    try:
        if out is None:
            raise FileNotFoundError
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(trace)
        return out / name
    except OSError:
        with tempfile.NamedTemporaryFile("w", prefix="longweave-", suffix=f"-{name}", delete=False) as file:
            file.write(trace)
        return Path(file.name)


def _first_line(error: BaseException) -> str:
    text = " ".join((str(error).strip().splitlines() or [""])[0].split())
    kind = "" if isinstance(error, RankError | InputError | RunFileError) else type(error).__name__
    return ": ".join(part for part in (kind, text[:LONGEST]) if part)
