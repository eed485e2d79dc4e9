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
the ranks that do not come back are replaced. No process outlives the parent.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

T = TypeVar("T")

GRACE = 5.0  # seconds for the other ranks to notice that one has failed


class RankError(RuntimeError):
    """A rank failed in a way that cannot be re-raised as it was: it died, or its error cannot be pickled."""


class RankTimeoutError(RankError):
    """Some ranks did not come back in time; the message says which and where they were."""


class Ranks:
    """`size` worker processes on this machine, one thread each unless told otherwise.

    Use it as a context manager, or call `close()`. Not for use from several threads at once.
    """

    def __init__(self, size: int, *, threads: int = 1, timeout: float = 120.0) -> None:
        self.size, self.threads, self.timeout = size, threads, timeout
        self._context = multiprocessing.get_context("spawn")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="longweave-ranks-")
        self._workers: dict[int, _Worker] = {}
        self._runs = 0

    def run(
        self, fn: Callable[..., T], *args: Any, size: int | None = None, timeout: float | None = None, **kwargs: Any
    ) -> list[T]:
        """Call `fn(*args, **kwargs)` on `size` ranks (default: all); returns their results in rank order.

        If ranks raise, the error of the one that failed first is raised here, with a note that names its rank and has
        its traceback. After `timeout` seconds the ranks still at work are ended, and `RankTimeoutError` tells where
        they were.
        """
        size = self.size if size is None else size
        if not 1 <= size <= self.size:
            raise ValueError(f"size is {size}; this pool has {self.size} ranks")
        timeout = self.timeout if timeout is None else timeout
        self._runs += 1
        call = pickle.dumps((fn, args, kwargs))
        try:
            for rank in range(size):
                if rank not in self._workers:
                    self._workers[rank] = self._start(rank)
            for rank in range(size):
                job = _Job(self._runs, rank, size, timeout, tuple(sys.path), call)
                with suppress(OSError):  # a worker that is already dead is noticed below
                    self._workers[rank].pipe.send_bytes(pickle.dumps(job))
            return self._collect(size, timeout)
        except KeyboardInterrupt:
            self.close()
            raise

    def close(self) -> None:
        """End all ranks. Safe to call twice."""
        for rank in list(self._workers):
            self._end(rank)
        with suppress(OSError):
            self._folder.cleanup()

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
            ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
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
        stacks = {rank: self._stack(rank) for rank in sorted(waiting)} if waiting and not failed else {}
        for rank in waiting:
            self._end(rank)
        errors = [answer for answer in answers.values() if answer.error]
        if errors:
            first = min(errors, key=lambda answer: answer.when)
            assert first.error is not None
            raise first.error
        if waiting:
            where = "\n".join(f"--- rank {rank}\n{stack}" for rank, stack in stacks.items())
            raise RankTimeoutError(f"ranks {sorted(waiting)} of {size} did not come back within {timeout:g} s\n{where}")
        return [answers[rank].result for rank in range(size)]

    def _receive(self, rank: int) -> _Answer | None:
        worker = self._workers[rank]
        try:
            run, result, error, note, when = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(GRACE)
            code = worker.process.exitcode
            self._end(rank)
            # Whatever else went wrong, it was because of this: a death counts as the first error.
            return _Answer(None, RankError(f"rank {rank} died with exit code {code}"), -1.0)
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
        return _Answer(None, exception, when)

    # -- processes ----------------------------------------------------------------------------------

    def _start(self, rank: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        lifeline_out, lifeline_in = self._context.Pipe(duplex=False)
        trace = Path(self._folder.name) / f"{rank}-{self._runs}.trace"
        process = self._context.Process(
            target=_serve, args=(theirs, lifeline_out, self._store.port, self.threads, str(trace)), daemon=True
        )
        process.start()
        theirs.close()
        lifeline_out.close()
        return _Worker(process, ours, lifeline_in, trace)

    def _end(self, rank: int) -> None:
        worker = self._workers.pop(rank)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        worker.lifeline.close()

    def _stack(self, rank: int) -> str:
        worker = self._workers[rank]
        if worker.process.pid is None or not worker.process.is_alive():
            return "(not alive)"
        os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        return worker.trace.read_text() if worker.trace.exists() else "(no stack)"


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    lifeline: Connection
    trace: Path


@dataclass
class _Answer:
    result: Any
    error: BaseException | None
    when: float


@dataclass
class _Job:
    run: int
    rank: int
    size: int
    timeout: float
    path: tuple[str, ...]
    call: bytes


def _serve(pipe: Connection, lifeline: Connection, port: int, threads: int, trace: str) -> None:
    """The life of one worker: run jobs until the parent closes the pipe or goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torch.set_num_threads(threads)
    with Path(trace).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
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
            timeout=timedelta(seconds=job.timeout),
        )
        fn, args, kwargs = pickle.loads(job.call)
        result = pickle.dumps(fn(*args, **kwargs))
        with suppress(RuntimeError):  # nobody hangs up while another still listens; a failed peer is its own report
            dist.barrier()
        return pickle.dumps((job.run, result, None, None, time.monotonic()))
    except BaseException as error:
        when, note = time.monotonic(), traceback.format_exc()
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = pickle.dumps(RankError(f"{type(error).__name__}: {error}"))
        return pickle.dumps((job.run, None, pickled, note, when))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # closes the connections: peers that wait for us fail at once


def _die_with_parent(lifeline: Connection) -> None:
    """Nothing is ever sent here; reading ends when the parent is gone, whatever else this process is doing."""
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)
