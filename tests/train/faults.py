"""Faults for training runs: what happens, where in a step, on which rank. Planted by the rank itself.

As a program it is `longweave train` with the fault that FAULT names ("kill,backward,1,2": rank 1, step 2), in the ranks
that it starts or under torchrun; a file FAULT_ONCE lets it happen only once, so that a restart comes through.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from longweave.comm import exchange
from longweave.tools.train import loop, run
from longweave.tools.train.loop import Metrics, TrainConfig

PLACES = ("forward", "backward", "exchange", "optimizer")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit() -> None:
    sys.exit(0)  # even so: the others must not be left alone


def _raise() -> None:
    raise ArithmeticError("a planted error\nwith a second line")


def _no_memory() -> None:
    raise MemoryError("cannot allocate memory for 3 tensors")


HOW: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "stop": _stop,
    "exit": _exit,
    "raise": _raise,
    "memory": _no_memory,
}


@contextmanager
def planted(how: str, where: str, step: int) -> Iterator[None]:
    """On this rank it happens in the given step, once."""
    now = [-1]
    real_step, real_model = loop.train_step, loop.build_model

    def fire(*_: Any) -> None:
        if now[0] == step:
            now[0] = -1
            HOW[how]()

    def train_step(config: TrainConfig, number: int, *rest: Any) -> Metrics:
        now[0] = number
        return real_step(config, number, *rest)

    def build_model(*args: Any) -> torch.nn.Module:
        model = real_model(*args)
        layer = model.model.layers[1]
        if where == "forward":
            layer.register_forward_pre_hook(fire)
        if where == "backward":
            layer.register_full_backward_hook(fire)
        return model

    calls = {
        "exchange": [(exchange, "send_receive")],
        "optimizer": [(torch.optim.AdamW, "step")],
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(loop, "train_step", train_step))
        stack.enter_context(patch.object(loop, "build_model", build_model))
        for owner, name in calls.get(where, []):
            stack.enter_context(patch.object(owner, name, _then(getattr(owner, name), fire)))
        yield


def _then(real: Callable[..., Any], fire: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        fire()
        return result

    return both


def train_with_fault(config: TrainConfig, how: str, where: str, rank: int, step: int) -> list[Metrics]:
    with planted(how, where, step) if dist.get_rank() == rank else nullcontext():
        return real_train(config, False)


real_train = run.train_and_show


def train_with_fault_of_environment(config: TrainConfig, terminal: bool) -> list[Metrics]:
    how, where, rank, step = os.environ["FAULT"].split(",")
    once = os.environ.get("FAULT_ONCE")
    if once and Path(once).exists():
        return real_train(config, terminal)
    dist.barrier()  # all have seen that it is the first time
    if once:
        Path(once).touch()
    return train_with_fault(config, how, where, int(rank), int(step))


if __name__ == "__main__":
    import faults  # the name under which ranks find it

    run.train_and_show = faults.train_with_fault_of_environment
    from longweave.cli import app

    app()
