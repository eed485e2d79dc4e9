"""Start N local ranks and run functions on them: for training, benchmarks and tests, without GPUs and torchrun.

    from longweave.launch import Ranks

    def total(x):                                    # a function that the ranks can import
        y = torch.full((), float(x))
        dist.all_reduce(y)                           # the default group is gloo, with exactly the ranks of this run
        return y.item()

    with Ranks(4) as ranks:
        assert ranks.run(total, 2.0) == [8.0] * 4
        assert ranks.run(total, 2.0, size=3) == [6.0] * 3

The processes start once and serve every run; each run gets a fresh default process group, so a failed run leaves
nothing behind for the next. A run ends when all ranks have answered; when one fails, dies or hangs, the run raises and
the ranks that do not come back are replaced. No process outlives the parent, and there are no files that could.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_pipes
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from longweave.errors import InputError, shown
from longweave.plan.ranges import check_int, check_number

T = TypeVar("T")

MOST_RANKS = 1024  # processes on one machine
LONGEST = 1e9  # seconds of a timeout
GRACE = 5.0  # seconds for the other ranks to notice that one has failed
LONGEST_POLL = 3600.0  # seconds; the operating system's own limit is some weeks


class RankError(RuntimeError):
    """A rank failed in a way that cannot be re-raised as it was: it died, or its error cannot be pickled."""


class RankTimeoutError(RankError):
    """Some ranks did not come back in time; the message says which and where they were."""


@dataclass
class FailedRun:
    """What each rank had to say when a run failed: for those who show it in their own way."""

    rank: int | None  # whose error was raised; None if nobody raised and some did not come back
    traces: dict[int, str] = field(default_factory=dict)  # of ranks that raised or died
    silent: dict[int, str] = field(default_factory=dict)  # ranks that did not come back: "stopped" or "running"
    stacks: dict[int, str] = field(default_factory=dict)  # where the silent ones were


class Ranks:
    """`size` worker processes on this machine, one thread each unless told otherwise.

    Use it as a context manager, or call `close()`. Not for use from several threads at once.
    """

    def __init__(self, size: int, *, threads: int = 1, timeout: float = 120.0) -> None:
        self.size = check_int("size", size, f"give the number of ranks, 1 to {MOST_RANKS}", 1, MOST_RANKS)
        self.threads = check_int("threads", threads, f"give the threads of a rank, 1 to {MOST_RANKS}", 1, MOST_RANKS)
        self.timeout = _check_timeout(timeout)
        self._context = multiprocessing.get_context("spawn")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.failed: FailedRun | None = None  # of the last run
        self._workers: dict[int, _Worker] = {}
        self._runs = 0

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        size: int | None = None,
        timeout: float | None = None,
        wait: float | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Call `fn(*args, **kwargs)` on `size` ranks (default: all); returns their results in rank order.

        If ranks raise, the error of the one that failed first is raised here, with notes that name its rank, have its
        traceback, and say which ranks did not come back. After `timeout` seconds the ranks still at work are ended, and
        `RankTimeoutError` tells where they were. `wait` is the timeout of the process group, by default the same.
        """
        size = self.size if size is None else check_int("size", size, f"this pool has {self.size} ranks", 1, self.size)
        timeout = self.timeout if timeout is None else _check_timeout(timeout)
        wait = min(timeout if wait is None else _check_timeout(wait), LONGEST)
        if not callable(fn):
            raise InputError(f"fn is {shown(fn)}; give a function that the ranks can import")
        try:
            call = pickle.dumps((fn, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"{getattr(fn, '__qualname__', fn)} and its arguments cannot be sent to the ranks ({error}); give a "
                "function at the top of a module, and arguments that can be pickled"
            ) from error
        self._runs += 1
        self.failed = None
        try:
            for rank in range(size):
                if rank not in self._workers:
                    self._workers[rank] = self._start(rank)
            for rank in range(size):
                job = _Job(self._runs, rank, size, wait, tuple(sys.path), call)
                with suppress(OSError):  # a worker that is already dead is noticed below
                    self._workers[rank].pipe.send_bytes(pickle.dumps(job))
            return self._collect(size, timeout)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, or a handler of SIGTERM; ranks' own arrive as RankError
            self.close()
            raise

    def close(self) -> None:
        """End all ranks. Safe to call twice."""
        for worker in self._workers.values():
            worker.process.kill()
        for rank in list(self._workers):
            self._end(rank)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one run ------------------------------------------------------------------------------------

    def _collect(self, size: int, timeout: float) -> list[Any]:
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        waiting = set(range(size))
        failed = False
        while waiting:
            pipes = {self._workers[rank].pipe: rank for rank in waiting}
            ready = wait_for_pipes(list(pipes), timeout=min(LONGEST_POLL, max(0.0, deadline - time.monotonic())))
            if not ready and time.monotonic() >= deadline:
                break
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                answer = self._receive(rank)
                if answer is None:
                    continue  # left over from a run that was given up
                answers[rank] = answer
                waiting.discard(rank)
                if answer.error and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        first = min((rank for rank in answers if answers[rank].error), key=lambda r: answers[r].when, default=None)
        if waiting or first is not None:
            self.failed = FailedRun(
                first,
                {rank: answer.trace for rank, answer in answers.items() if answer.error},
                {rank: self._state(rank) for rank in sorted(waiting)},
                {rank: self._stack(rank) for rank in sorted(waiting)},
            )
        for rank in waiting:
            self._end(rank)
        if first is not None:
            error = answers[first].error
            assert error is not None
            assert self.failed is not None
            for rank, state in self.failed.silent.items():
                error.add_note(f"rank {rank} did not come back; it was {state}")
            raise error
        if self.failed:
            where = "\n".join(f"--- rank {rank}\n{stack}" for rank, stack in self.failed.stacks.items())
            raise RankTimeoutError(f"ranks {sorted(waiting)} of {size} did not come back within {timeout:g} s\n{where}")
        return [answers[rank].result for rank in range(size)]

    def _receive(self, rank: int) -> _Answer | None:
        worker = self._workers[rank]
        try:
            run, result, error, note, when = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(GRACE)
            code = worker.process.exitcode
            where = worker.written()
            self._end(rank)
            # Whatever else went wrong, it was because of this: a death counts as the first error.
            how = f"of {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
            died = RankError(f"rank {rank} died {how}")
            if where:
                died.add_note(f"where rank {rank} was:\n{where}")
            return _Answer(None, died, -1.0, where or "(it died)")
        if run != self._runs:
            return None
        if note is None:
            try:
                return _Answer(pickle.loads(result), None, when)
            except Exception as broken:
                broken.add_note(f"while reading the result of rank {rank}")
                return _Answer(None, broken, when)
        try:
            exception = pickle.loads(error)
        except Exception:
            exception = RankError(f"rank {rank} failed")
        exception.add_note(f"raised on rank {rank}:\n{note}")
        return _Answer(None, exception, when, note)

    # -- processes ----------------------------------------------------------------------------------

    def _start(self, rank: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        lifeline_out, lifeline_in = self._context.Pipe(duplex=False)
        stack_out, stack_in = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_serve, args=(theirs, lifeline_out, stack_in, self._store.port, self.threads), daemon=True
        )
        # Ctrl-C is for the parent, also while a rank is still importing: it inherits the mask. Python's tracker of
        # resources starts with the first process otherwise, and lifts the mask when it has.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for end in (theirs, lifeline_out, stack_in):
            end.close()
        return _Worker(process, ours, lifeline_in, stack_out)

    def _end(self, rank: int) -> None:
        worker = self._workers.pop(rank)
        worker.process.kill()
        worker.process.join()
        for end in (worker.pipe, worker.lifeline, worker.stack):
            end.close()

    def _state(self, rank: int) -> str:
        try:
            status = Path(f"/proc/{self._workers[rank].process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):  # not Linux
            status = ""
        return "stopped" if status in ("T", "t") else "running"

    def _stack(self, rank: int) -> str:
        worker = self._workers[rank]
        if worker.process.pid is None or not worker.process.is_alive():
            return "(not alive)"
        os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return worker.written() or "(no stack)"


def _check_timeout(timeout: object) -> float:
    if isinstance(timeout, float) and timeout == math.inf:
        return math.inf
    return check_number("timeout", timeout, "give a positive number of seconds", 1e-3, LONGEST)


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    lifeline: Connection
    stack: Connection

    def written(self) -> str:
        """The stacks that it wrote since the last look: when asked to, or when it died of a fault."""
        return os.read(self.stack.fileno(), 1 << 16).decode() if self.stack.poll(0) else ""


@dataclass
class _Answer:
    result: Any
    error: BaseException | None
    when: float
    trace: str = ""


@dataclass
class _Job:
    run: int
    rank: int
    size: int
    wait: float
    path: tuple[str, ...]
    call: bytes


def _serve(pipe: Connection, lifeline: Connection, stack: Connection, port: int, threads: int) -> None:
    """The life of one worker: run jobs until the parent closes the pipe or goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torch.set_num_threads(threads)
    faulthandler.enable(file=stack.fileno())
    faulthandler.register(signal.SIGUSR1, file=stack.fileno())
    store = TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            job: _Job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(_answer(job, store))


def _answer(job: _Job, store: Store) -> bytes:
    sys.path[:] = job.path
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"run{job.run}", store),
            rank=job.rank,
            world_size=job.size,
            timeout=timedelta(seconds=job.wait),
        )
        fn, args, kwargs = pickle.loads(job.call)
        result = pickle.dumps(fn(*args, **kwargs))
        with suppress(RuntimeError):  # nobody hangs up while another still listens; a failed peer is its own report
            dist.barrier()
        return pickle.dumps((job.run, result, None, None, time.monotonic()))
    except BaseException as error:
        when, note = time.monotonic(), traceback.format_exc()
        try:
            if not isinstance(error, Exception):  # sys.exit on a rank must not end the parent
                raise RankError
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = pickle.dumps(RankError(f"rank {job.rank} left with {type(error).__name__}: {error}"))
        return pickle.dumps((job.run, None, pickled, note, when))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # closes the connections: peers that wait for us fail at once


def _die_with_parent(lifeline: Connection) -> None:
    """Nothing is ever sent here; reading ends when the parent is gone, whatever else this process is doing."""
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)
