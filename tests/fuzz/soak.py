"""`make soak`: two ranks train with a new pack in every step; then again, with faults at random and resumes.

    undisturbed   ──────────────────────────▶ step N     losses, weights, memory
    disturbed     ─────✗                                 one rank is killed, stopped, ends or raises, anywhere in a step
                     └─────────✗                         the launcher starts anew, from the last checkpoint
                             └──────────────▶ step N     the same losses, also of steps that are repeated

Both halves must give the same bits: losses of all steps and the weights in the end. In every process that lives long
enough, objects of the library and resident memory after a warm-up must stay as they are. Losses and memory are written
to a folder while the ranks run, since a rank that dies reports nothing. Checkpoints are those of `longweave train`.
Exit code 0 if all of that held.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from statistics import median
from unittest.mock import patch

import fuzz_paths  # noqa: F401
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout

# isort: split
from test_memory import METHODS, STRATEGIES, Layer, alive, random_documents, resident

import longweave as lw
from longweave.launch import Ranks
from longweave.tools.train import checkpoints

POINTS = ("forward", "backward", "optimizer", "save")
WAYS = ("kill", "exit", "raise", "stop")
WAIT = 8.0  # seconds until a rank that is stopped is given up; the group's timeout, around checkpoints, is 3 times that
WAIT_AT_FIRST = 100.0  # in the first step of a start, while a new process imports
MOMENTS = 6  # times that rank 0 forces files to the disk in a save
VOCABULARY, WIDTH = 64, 16
WARM_UP = 60  # steps of a process before its memory counts
SAMPLE_EVERY = 10
ROOM = 16 << 20  # by which the heap of a process moves for other reasons
SAVE_EVERY = 8


class PlannedError(RuntimeError):
    """A fault that the soak planted."""


@dataclass(frozen=True)
class Fault:
    step: int
    rank: int
    point: str
    way: str
    moment: int = 1  # of a save: the first, second, … file or folder that is forced to the disk


@dataclass(frozen=True)
class Run:
    """One start of the ranks: from the folder's checkpoint, if there is one, to step `last` or until time is up."""

    folder: Path
    seed: int
    last: int
    until: float  # time.time()
    fault: Fault | None = None  # the next one

    @property
    def out(self) -> Path:
        return self.folder / "run"

    @property
    def facts(self) -> checkpoints.Facts:
        return {"seed": self.seed}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: Tensor, pack: lw.Pack, strategy: str, method: str, strike: Strike) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = nn.functional.layer_norm(layer(x, pack, strategy, method), (WIDTH,))
            strike("forward")  # between layers
            x.register_hook(lambda grad: strike("backward"))
        return self.head(x)


class Strike:
    """Called at every point of a step; the fault that is due happens there."""

    def __init__(self, run: Run, step: int) -> None:
        due = run.fault is not None and (run.fault.step, run.fault.rank) == (step, dist.get_rank())
        self.fault, self.folder = run.fault if due else None, run.folder

    def __call__(self, point: str) -> None:
        if self.fault is None or self.fault.point != point:
            return
        (self.folder / "struck.json").write_text(json.dumps(vars(self.fault)))
        if self.fault.way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.way == "exit":
            os._exit(3)
        if self.fault.way == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        text = f"planted in {point} of step {self.fault.step} on rank {self.fault.rank}"
        raise OSError(errno.ENOSPC, text) if point == "save" else PlannedError(text)


# -- on a rank ---------------------------------------------------------------------------------------------------

steps_of_this_process = 0


def train(run: Run) -> str:
    """Returns a digest of the weights."""
    torch.manual_seed(run.seed)
    limit_waits(WAIT_AT_FIRST)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = checkpoints.chosen_by_rank_0(lambda: checkpoints.newest(run.out), None)
    with checkpoints.run_folder(run.out, start, None):
        first = checkpoints.load(start, model, optimizer, run.facts) if start else 0
        for step in range(first, run.last):
            if time_is_up(run):
                break
            loss = train_step(run, step, model, optimizer)
            limit_waits(WAIT)
            if dist.get_rank() == 0:
                with (run.folder / "losses.jsonl").open("a") as file:
                    file.write(json.dumps([step, loss.hex()]) + "\n")
            if (step + 1) % SAVE_EVERY == 0:
                with struck_in_a_save(Strike(run, step)):
                    checkpoints.save(run.out, model, optimizer, step + 1, run.facts)
            sample_memory(run)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return blake2b(weights, digest_size=8).hexdigest()


def train_step(run: Run, step: int, model: Model, optimizer: torch.optim.Optimizer) -> float:
    rng = np.random.default_rng((run.seed, step))
    strike = Strike(run, step)
    cu = random_documents(rng)
    ids = torch.from_numpy(rng.integers(VOCABULARY) + rng.integers(1, 5) * np.arange(cu[-1])) % VOCABULARY
    layout = ("auto", "zigzag", "contiguous", "balanced")[rng.integers(4)]
    batch = lw.shard_batch(ids, cu, layout=layout)
    way = STRATEGIES[rng.integers(len(STRATEGIES))], METHODS[rng.integers(len(METHODS))]
    logits = model(batch.inputs["input_ids"].flatten(), batch.pack, *way, strike)
    loss = batch.loss(logits[None])
    loss.backward()
    lw.reduce_gradients(model)
    strike("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    return lw.reduce_sum(float(loss.detach()))


def limit_waits(seconds: float) -> None:
    lw.set_wait(seconds)
    _set_pg_timeout(timedelta(seconds=3 * seconds), None)


def time_is_up(run: Run) -> bool:
    """As rank 0 sees it."""
    ended = torch.tensor(time.time() >= run.until, dtype=torch.int32)
    dist.broadcast(ended, 0)
    return bool(ended)


@contextmanager
def struck_in_a_save(strike: Strike) -> Iterator[None]:
    """The fault that is due comes before a file or folder is forced to the disk."""
    fault, real, seen = strike.fault, os.fsync, [0]

    def fsync(descriptor: int) -> None:
        seen[0] += 1
        if fault is not None and seen[0] == fault.moment:
            strike("save")
        real(descriptor)

    with patch.object(os, "fsync", fsync):
        yield


def sample_memory(run: Run) -> None:
    """Now and then: steps of this process, objects of the library that are alive between two steps, resident bytes."""
    global steps_of_this_process
    steps_of_this_process += 1
    if steps_of_this_process % SAMPLE_EVERY:
        return
    gc.collect()  # tracebacks of runs that failed are cycles
    with (run.folder / f"memory-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps([steps_of_this_process, alive()[0], resident()]) + "\n")


# -- the launcher ------------------------------------------------------------------------------------------------


def draw_faults(rng: np.random.Generator, steps: int, count: int) -> list[Fault]:
    """In order; a fault while saving is in a step that saves."""
    faults = []
    for step in sorted(rng.integers(2, steps, count).tolist()):
        point = POINTS[rng.integers(len(POINTS))]
        if point == "save":
            step = min(step // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY - 1, steps - steps % SAVE_EVERY - 1)
        rank, way = int(rng.integers(2)), WAYS[rng.integers(len(WAYS))]
        moment = int(rng.integers(MOMENTS)) + 1 if (point, rank) == ("save", 0) else 1
        faults.append(Fault(int(step), rank, point, way, moment))
    # One a step: a save may be complete when its fault comes, and then its step is not done again.
    return [fault for _, fault in sorted({fault.step: fault for fault in faults}.items())]


def disturbed(ranks: Ranks, run: Run, faults: list[Fault], timeout: float) -> tuple[str, list[Fault]]:
    """Run to the end, with every fault on the way; the weights in the end, and the faults that happened."""
    left, happened = [*faults], []
    while True:
        fault = left.pop(0) if left else None
        try:
            return ranks.run(train, replace(run, fault=fault), timeout=timeout)[0], happened
        except Exception:
            struck = run.folder / "struck.json"
            if not struck.exists():
                raise  # nobody planted this
            assert Fault(**json.loads(struck.read_text())) == fault
            struck.unlink()
            happened.append(fault)


def read_losses(folder: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for line in (folder / "losses.jsonl").read_text().splitlines():
        step, loss = json.loads(line)
        found.setdefault(step, set()).add(loss)
    return found


def check_memory(folder: Path) -> list[str]:
    """What grew, in words, of every process that lived past its warm-up."""
    wrong = []
    for path in sorted(folder.glob("memory-*.jsonl")):
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        samples = [sample for sample in samples if sample[0] >= WARM_UP]
        if len({json.dumps(objects, sort_keys=True) for _, objects, _ in samples}) > 1:
            wrong.append(f"{path.stem}: objects alive between steps, first {samples[0][1]}, then {samples[-1][1]}")
        third = len(samples) // 3
        if third:
            before, after = (median(s[2] for s in part) for part in (samples[:third], samples[-third:]))
            print(f"  {path.stem}: {samples[-1][0]} steps, {(after - before) / 2**20:+.1f} MiB after the warm-up")
            if after - before > ROOM:
                wrong.append(f"{path.stem}: {(after - before) / 2**20:.1f} MiB more after {samples[-1][0]} steps")
    return wrong


def soak(folder: Path, seed: int, minutes: float, steps: int, faults: int) -> list[str]:
    """What was wrong, in words."""
    calm, rough = folder / "undisturbed", folder / "disturbed"
    calm.mkdir()
    rough.mkdir()
    with Ranks(2) as ranks:
        ranks.run(dist.barrier, timeout=600)  # imports are no part of the time
        begin = time.time()
        calmly = Run(calm, seed, steps, begin + 24 * minutes)
        weights = ranks.run(train, calmly, timeout=24 * minutes + 120)[0]
        expected = read_losses(calm)
        steps = max(expected) + 1
        print(f"undisturbed: {steps} steps in {time.time() - begin:.0f} s", flush=True)
        wrong = [f"step {step} has the losses {sorted(losses)}" for step, losses in expected.items() if len(losses) > 1]
        planned = draw_faults(np.random.default_rng((seed, 1)), steps, faults)
        resumed, happened = disturbed(ranks, Run(rough, seed, steps, begin + 60 * minutes), planned, 60 * minutes + 120)
    found = read_losses(rough)
    lines = len((rough / "losses.jsonl").read_text().splitlines())
    kinds = Counter(f"{fault.way} in {fault.point}" for fault in happened)
    print(
        f"disturbed: {len(found)} steps, {lines - len(found)} of them repeated, {len(happened)} faults: {dict(kinds)}"
    )
    wrong += [
        f"step {s}: {sorted(found[s])}, undisturbed {sorted(expected[s])}" for s in found if found[s] != expected[s]
    ]
    if len(found) < steps:
        print(f"time was up at step {len(found)} of {steps}")
    elif resumed != weights:
        wrong.append(f"weights in the end: {resumed}, undisturbed {weights}")
    return wrong + check_memory(calm) + check_memory(rough)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of both halves together")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of each half, if minutes allow")
    parser.add_argument("--faults", type=int, help="by default two for each minute, at least three")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    faults = max(3, round(2 * options.minutes)) if options.faults is None else options.faults
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="longweave-soak-") as folder:
        wrong = soak(Path(folder), options.seed, options.minutes, options.steps, faults)
    print("\n".join(wrong) or f"seed {options.seed}: losses and weights are the same bits, memory is flat")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
