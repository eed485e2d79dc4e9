"""A rank is killed, stopped, ends or fails in the middle of a step: the others raise soon, and name it.

Every case has ranks of its own, since they do not survive it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import longweave as lw
from longweave.launch import RankError, Ranks

FULL = bool(os.environ.get("LONGWEAVE_FULL"))
CU = [0, 7, 24]
ODD, STEP = 1, 2
WAIT = 5.0  # longer than a living rank is ever silent


def fail(how: str) -> None:
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            sys.exit(3)
        case "exception":
            raise ArithmeticError("a bug of the user's")
        case "memory":
            raise MemoryError("no memory left")


class Fault(torch.autograd.Function):
    """Identity, until its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Callable[[], None]) -> torch.Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act()
        return grads[0], None


def train(how: str, where: str, folder: Path) -> None:
    lw.set_wait(WAIT)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(8, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began = time.monotonic()

    def act(place: str, step: int) -> None:
        nonlocal began
        if step == STEP and place == where:
            if rank == ODD:
                fail(how)
            began = time.monotonic()

    try:
        for step in range(4):
            pack = lw.Pack(CU, layout="zigzag", strategy="ring")
            x = model(torch.randn(pack.tokens, 8))
            act("forward", step)
            q, k, v = x.view(-1, 3, 1, 8).unbind(1)
            kernel = "longweave.kernels.attention.Kernel.forward"
            if where == "exchange" and step == STEP and rank == ODD:
                with patch(kernel, lambda *args, **kwargs: act("exchange", STEP)):  # K/V are on their way
                    lw.attention(q, k, v, pack)
            act("exchange", step)
            out = Fault.apply(lw.attention(q, k, v, pack), lambda: act("backward", step))  # noqa: B023
            out.sum().backward()
            lw.reduce_gradients(model)
            act("optimizer", step)
            optimizer.step()
            optimizer.zero_grad()
    except lw.GroupError as error:
        (folder / f"{rank}.part").write_text(f"{time.monotonic() - began:.1f} {error}")
        (folder / f"{rank}.part").rename(folder / str(rank))
        # Nobody learns of it by another's end: all that live have said something, or the launcher ends them.
        others = set(range(dist.get_world_size())) - {ODD}
        while any(not (folder / str(other)).exists() for other in others):
            time.sleep(0.1)


HOWS = ("kill", "stop", "exit", "exception", "memory")
PLACES = ("forward", "backward", "exchange", "optimizer")
QUICK = [("kill", "backward", 4)]  # of `longweave train`, a stopped rank too (test_train_faults.py)
CASES = [(how, where, size) for how in HOWS for where in PLACES for size in (2, 4)] if FULL else QUICK


@pytest.mark.parametrize(("how", "where", "size"), CASES)
def test_the_others_raise_and_name_the_rank(how: str, where: str, size: int, tmp_path: Path) -> None:
    with Ranks(size) as ranks, patch("longweave.launch.GRACE", 15.0):
        ranks.run(train, "nothing", "nowhere", tmp_path)  # and everything is imported
        with pytest.raises((RankError, ArithmeticError, MemoryError, SystemExit)):
            ranks.run(train, how, where, tmp_path, timeout=WAIT + 20)
    for rank in set(range(size)) - {ODD}:
        seconds, _, said = (tmp_path / str(rank)).read_text().partition(" ")
        assert "rank 1" in said, said
        assert float(seconds) < WAIT + 8, said
        if how in ("kill", "stop"):
            assert "gave no sign of life" in said
