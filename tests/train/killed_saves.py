"""A program that saves and is killed: at random moments, or before and after everything that touches the disk.

    python killed_saves.py random OUT KILLS SEED     two ranks save one checkpoint after the other
    python killed_saves.py points OUT                one rank; dies at its 1st, 2nd, … operation on files

After each death another process finds the newest checkpoint and loads it: every number in a checkpoint is its step, so
a mixture of two is seen. Prints a line of JSON. Ranks are forked, since importing torch takes longer than the rest.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from longweave.tools.train import checkpoints, shards

FACTS: checkpoints.Facts = {"model": "layers of 64", "seed": 0}


def join(rank: int, size: int, store: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)


def small_model(size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    if size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return model, torch.optim.AdamW(model.parameters())


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Every number is the step."""
    for parameter in model.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[parameter].setdefault(key, torch.zeros_like(parameter.detach()))
        optimizer.state[parameter].setdefault("step", torch.zeros(()))
    with torch.no_grad():
        for tensor in shards.tensors_of(model, optimizer).values():
            tensor.fill_(step)


def save_on_and_on(rank: int, size: int, store: Path, out: Path, last: int) -> None:
    join(rank, size, store)
    start = checkpoints.newest(out)
    model, optimizer = small_model(size)
    with checkpoints.run_folder(out, start, None):
        assert not list(out.glob(".saving-*")), "swept"
        done = checkpoints.load(start, model, optimizer, FACTS) if start else 0
        for step in range(done + 1, last + 1):
            fill(model, optimizer, step)
            checkpoints.save(out, model, optimizer, step, FACTS)
    dist.destroy_process_group()


def verify(out: Path, store: Path) -> int:
    """The step of the newest checkpoint, all of whose numbers are that step."""
    join(0, 1, store)
    model, optimizer = small_model(1)
    newest = checkpoints.newest(out)
    if newest is None:
        return 0
    step = checkpoints.load(newest, model, optimizer, FACTS)
    values = torch.cat([tensor.detach().flatten() for tensor in shards.tensors_of(model, optimizer).values()])
    assert values.unique().tolist() == [step], f"{newest} is a mixture: {values.unique()}"
    return step


def forked(fn: Callable[..., Any], *args: Any) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        fn(*args)
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def found_step(out: Path, name: str) -> int:
    """Looked up by a process of its own: this one never joins a group."""
    answer = out.parent / f"{name}.step"
    process = forked(lambda: answer.write_text(str(verify(out, out.parent / f"{name}.verify"))))
    assert os.waitpid(process, 0)[1] == 0, f"{name}: the newest checkpoint does not load"
    return int(answer.read_text())


def at_random(out: Path, kills: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    steps, halves = [0], 0
    for i in range(kills):
        ranks = [forked(save_on_and_on, r, 2, out.parent / f"{i}.store", out, 10**9) for r in range(2)]
        before = (out / checkpoints.LATEST).read_text() if steps[-1] else None
        deadline = time.monotonic() + 60
        while not (out / checkpoints.LATEST).exists() or (out / checkpoints.LATEST).read_text() == before:
            assert time.monotonic() < deadline, "no checkpoint appears"
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.2))
        for process in rng.sample(ranks, 2)[: rng.choice([1, 2])]:
            os.kill(process, signal.SIGKILL)
        for process in ranks:
            os.waitpid(process, 0)  # a rank that was spared notices that the other has gone
        halves += bool(list(out.glob(".saving-*")))
        steps.append(found_step(out, str(i)))
        assert steps[-1] > steps[-2], f"progress was lost: {steps}"
    return {"steps": steps[1:], "killed while half was written": halves}


def at_points(out: Path) -> dict[str, Any]:
    found = []
    for point in range(1, 1000):
        done = os.waitpid(forked(save_on_and_on, 0, 1, out.parent / f"{point}.first", out / str(point), 1), 0)[1]
        assert done == 0
        died = os.waitpid(forked(_die_at, point, out), 0)[1]
        found.append(found_step(out / str(point), str(point)))
        if died == 0:
            return {"points": point - 1, "steps": found}
    raise AssertionError("a save never ends")


def _die_at(point: int, out: Path) -> None:
    """Dies before the operation of that number, and so after the one before."""
    count = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == point:
                os._exit(9)
            return real(*args, **kwargs)

        return call

    join(0, 1, out.parent / f"{point}.second")
    model, optimizer = small_model(1)
    folder = out / str(point)
    start = checkpoints.newest(folder)
    assert start is not None
    with checkpoints.run_folder(folder, start, None):
        checkpoints.load(start, model, optimizer, FACTS)
        fill(model, optimizer, 2)
        os.fsync, shards.save_file = counted(os.fsync), counted(shards.save_file)
        for name in ("mkdir", "open", "rename", "replace"):
            setattr(Path, name, counted(getattr(Path, name)))
        checkpoints.save(folder, model, optimizer, 2, FACTS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    fill(*small_model(1), 0)  # imports what optimizers import late, once for all who are forked
    how, folder, *numbers = sys.argv[1:]
    result = at_random(Path(folder), *map(int, numbers)) if how == "random" else at_points(Path(folder))
    print(json.dumps(result))
