"""One step of every rank on a common axis: when it computed, when it waited, what it sent. From real timestamps.

    rank 0   ██ attention ██░░ waits ░░███ attention, backward ███      ▼ 36,864 bytes to rank 1
    rank 1   ████ attention ██████████░████ attention, backward ██
             0 ms                                            41 ms

Every rank reads its own `time.perf_counter()` where a call or a wait begins or ends. Ranks are aligned by the barrier
in front of the step: 0 is when a rank left it, so lanes may be off by what a barrier takes. An interval lasts from one
such moment to the next: intervals do not overlap and leave no gap.

    busy       all that is not a wait; its operator is the longweave call around it, or none (the rest of the step)
    waiting    the host is blocked in an exchange: of longweave, of FSDP2, or one that the step names (`waits`)

CPU seconds stand beside: busy time without CPU time is a wait that nobody noted, or a core that another program had. On
a device, work and waits are queued, and this is the host's side of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from longweave.comm.exchange import Group, resolve

BUSY, WAITING = "busy", "waiting"


@dataclass(frozen=True)
class TimedInterval:
    """What a rank did from `begin` to `end`, in seconds from the start of the step."""

    kind: str  # BUSY or WAITING
    what: str  # the call, such as "attention, backward"; "" outside of calls
    begin: float
    end: float

    @property
    def is_busy(self) -> bool:
        return self.kind == BUSY

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class SentExchange:
    """What this rank gave to others in one exchange of longweave, and when it started it."""

    what: str
    at: float
    bytes_sent: int
    peers: tuple[int, ...]  # group ranks; none if a backend's own collective chooses the way


@dataclass(frozen=True)
class Lane:
    """One rank."""

    rank: int
    seconds: float
    cpu_seconds: float  # of all threads of the process
    intervals: tuple[TimedInterval, ...]
    sent: tuple[SentExchange, ...]

    def time(self, kind: str) -> float:
        """Seconds in all intervals of this kind."""
        return sum(interval.seconds for interval in self.intervals if interval.kind == kind)

    @property
    def busy_share(self) -> float:
        """Of the step."""
        return self.time(BUSY) / max(self.seconds, 1e-9)

    def bytes_sent(self, what: str | None = None) -> int:
        """In all exchanges, or in those of one call."""
        return sum(one.bytes_sent for one in self.sent if what in (None, one.what))


@dataclass(frozen=True)
class Timeline:
    """One step of all ranks."""

    title: str
    lanes: tuple[Lane, ...]

    @property
    def seconds(self) -> float:
        """Of the slowest rank."""
        return max(lane.seconds for lane in self.lanes)

    @property
    def loads(self) -> list[float]:
        """Busy time of every rank over the mean."""
        busy = [lane.time(BUSY) for lane in self.lanes]
        mean = sum(busy) / len(busy)
        return [one / mean if mean else 1.0 for one in busy]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        note = "seconds of each rank's own clock since it left the barrier in front of the step"
        path.write_text(json.dumps({"clock": note, **asdict(self)}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Timeline:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(found["title"], tuple(_lane(lane) for lane in found["lanes"]))


def _lane(found: dict[str, Any]) -> Lane:
    intervals = tuple(TimedInterval(**one) for one in found["intervals"])
    sent = tuple(SentExchange(**{**one, "peers": tuple(one["peers"])}) for one in found["sent"])
    return Lane(found["rank"], found["seconds"], found["cpu_seconds"], intervals, sent)


class StepRecorder:
    """Writes down one step of this rank: an `Observer` of its group's ledger (`comm/ledger.py`)."""

    def __init__(self) -> None:
        self._doing = [(BUSY, "")]  # the innermost is the last
        self._intervals: list[TimedInterval] = []
        self._sent: list[SentExchange] = []
        self._cpu = time.process_time()
        self._stopped: Lane | None = None
        self._start = self._since = time.perf_counter()

    def call_begins(self, title: str) -> None:
        self._push(BUSY, title)

    def call_ends(self) -> None:
        self._pop()

    def wait_begins(self) -> None:
        self._push(WAITING, self._doing[-1][1])

    def wait_ends(self) -> None:
        self._pop()

    def sends(self, bytes_sent: int, peers: list[int]) -> None:
        if bytes_sent:
            at = time.perf_counter() - self._start
            self._sent.append(SentExchange(self._doing[-1][1], at, bytes_sent, tuple(peers)))

    @contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """A wait that does not go through longweave."""
        self._push(WAITING, what)
        try:
            yield
        finally:
            self._pop()

    def stop(self) -> Lane:
        """The step ends with the first call of this; what comes after is not written down."""
        if self._stopped is None:
            self._close()
            rank = dist.get_rank() if dist.is_initialized() else 0
            seconds, cpu = self._since - self._start, time.process_time() - self._cpu
            self._stopped = Lane(rank, seconds, cpu, tuple(self._intervals), tuple(self._sent))
        return self._stopped

    def _push(self, kind: str, what: str) -> None:
        self._close()
        self._doing.append((kind, what))

    def _pop(self) -> None:
        self._close()
        self._doing.pop()

    def _close(self) -> None:
        """End the interval that is open, and begin the next at the same moment."""
        now = time.perf_counter()
        if now > self._since:
            self._intervals.append(TimedInterval(*self._doing[-1], self._since - self._start, now - self._start))
        self._since = now


@contextmanager
def recording(group: Group, model: nn.Module | None = None) -> Iterator[StepRecorder]:
    """Record what this rank does inside, on `group`; all ranks call it. `model` may be under FSDP2.

    with recording(mesh["cp"], model) as recorder:
        step()
        lane = recorder.stop()
    """
    ledger = resolve(group).ledger
    if dist.is_initialized():
        dist.barrier()
    recorder = StepRecorder()
    observed, ledger.observer = ledger.observer, recorder
    try:
        with _noted_collectives(model, recorder):
            yield recorder
    finally:
        ledger.observer = observed


@contextmanager
def _noted_collectives(model: nn.Module | None, recorder: StepRecorder) -> Iterator[None]:
    """FSDP2's collectives, its own or a user's, wait where they are called unless streams overlap them."""
    noted = []
    for part in model.modules() if model is not None else ():
        for sharded in _sharded_parameters(part) if isinstance(part, FSDPModule) else ():
            gather, scatter = sharded._all_gather_comm, sharded._reduce_scatter_comm
            noted.append((sharded, gather, scatter))
            sharded._all_gather_comm = _NotedCollective(gather, recorder, "FSDP2, all-gather")
            sharded._reduce_scatter_comm = _NotedCollective(scatter, recorder, "FSDP2, reduce-scatter")
    try:
        yield
    finally:
        for sharded, gather, scatter in noted:
            sharded._all_gather_comm, sharded._reduce_scatter_comm = gather, scatter


def _sharded_parameters(part: FSDPModule) -> list[Any]:
    """FSDP2's groups of parameters; older versions of torch have one at most."""
    state: Any = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


class _NotedCollective:
    """Stands before another one, whatever that has."""

    def __init__(self, inner: Any, recorder: StepRecorder, what: str) -> None:
        self._inner, self._recorder, self._what = inner, recorder, what

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._recorder.waits(self._what):
            return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def gather_timeline(title: str, lane: Lane, group: dist.ProcessGroup | None = None) -> Timeline:
    """The lanes of all ranks of `group`, on every one of them."""
    lanes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lanes, lane, group)
    return Timeline(title, tuple(lanes))
