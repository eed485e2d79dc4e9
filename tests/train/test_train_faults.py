"""One rank fails: the run ends in time with one line that names it, nothing is left, and a restart goes on."""

import json
import os
import re
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faults import HOW, PLACES, train_with_fault
from watched import Watched

from longweave.launch import GRACE, Ranks
from longweave.tools.train import failures
from longweave.tools.train.loop import TrainConfig
from longweave.tools.train.run import train_and_show

FULL = bool(os.environ.get("LONGWEAVE_FULL"))
WAIT = 6.0  # long enough for a machine that is busy with other things
TINY = TrainConfig(hidden=32, layers=2, tokens=128, steps=4, wait=WAIT)
OPTIONS = ("--hidden", "32", "--layers", "2", "--tokens", "128", "--steps", "4", "--wait", str(WAIT), "--out", "run")
PROGRAM = str(Path(__file__).with_name("faults.py"))
SAID = {
    "kill": "rank 1 died of SIGKILL",
    "stop": "rank 1 of {size} does not answer: it is stopped",
    "exit": "rank 1 left with SystemExit: 0",
    "raise": "rank 1: ArithmeticError: a planted error",
    "memory": "rank 1: MemoryError: cannot allocate memory for 3 tensors; take fewer --tokens",
}
EVERY = [(how, where, size) for how in HOW for where in PLACES for size in (2, 4)]
QUICK = [("kill", "backward", 2), ("raise", "exchange", 4)]


@pytest.mark.parametrize(("how", "where", "size"), EVERY if FULL else QUICK)
def test_the_rank_is_named_in_time(ranks: Ranks, tmp_path: Path, how: str, where: str, size: int) -> None:
    ranks.run(train_and_show, replace(TINY, steps=1), False, size=size)  # imports are no part of the time
    begin = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011
        ranks.run(train_with_fault, TINY, how, where, 1, 2, size=size, timeout=120)
    assert time.monotonic() - begin < WAIT + GRACE + 30, "and the steps before the fault"
    assert ranks.failed is not None
    line = str(failures.of_local_ranks(caught.value, ranks.failed, size, tmp_path))
    assert SAID[how].format(size=size) in line
    assert "\n" not in line
    assert (tmp_path / "error.log").is_file()
    if how in ("raise", "memory"):
        assert "faults.py" in (tmp_path / "error.log").read_text()


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines), "each step once"
    return {line["step"]: line["loss"] for line in lines}


def undisturbed(ranks: Ranks, size: int) -> np.ndarray:
    return np.array([m.loss for m in ranks.run(train_and_show, TINY, False, size=size)[0]])


def test_of_the_command(ranks: Ranks, tmp_path: Path) -> None:
    """A stopped process, which nothing but the limit ends; then go on."""
    command = [sys.executable, PROGRAM, "train", *OPTIONS, "--save-every", "1"]
    watched = Watched(command, tmp_path, {"FAULT": "stop,exchange,1,2"})
    try:
        assert watched.wait(200) == 1
        watched.assert_nothing_is_left(2)
    finally:
        watched.end()
    text = watched.text()
    line = r"^rank 1 of 2 does not answer: it is stopped; .* run/error.log; --resume run goes on from step-2$"
    assert re.search(line, text, re.M), text
    assert "Traceback" not in text
    assert "Traceback" in (tmp_path / "run" / "error.log").read_text()
    run = tmp_path / "run"
    assert len(ranks.run(train_and_show, replace(TINY, out=run, resume=run), False, size=2)[0]) == 2
    found = losses(run)
    assert np.allclose([found[step] for step in range(4)], undisturbed(ranks, 2), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("how", "where"), [(h, w) for h in HOW for w in PLACES] if FULL else [("kill", "backward")])
def test_torchrun_restarts_and_resumes(ranks: Ranks, tmp_path: Path, how: str, where: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--master-port",
        str(port),
    ]
    command = [sys.executable, *launcher, PROGRAM, "train", *OPTIONS, "--save-every", "1", "--resume", "auto"]
    once = tmp_path / "once"
    watched = Watched(command, tmp_path, {"FAULT": f"{how},{where},1,2", "FAULT_ONCE": str(once)})
    try:
        # A stopped process is ended by torchrun, which waits 30 seconds for it.
        assert watched.wait(300) == 0, watched.text()
        watched.assert_nothing_is_left(2)
    finally:
        watched.end()
    assert once.exists(), "the fault happened"
    found = losses(tmp_path / "run")
    assert np.allclose([found[step] for step in range(4)], undisturbed(ranks, 2), rtol=1e-5, atol=0)


def test_errors_without_a_folder_go_to_a_named_file(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError) as caught:
        ranks.run(train_with_fault, TINY, "raise", "forward", 1, 1, size=2)
    assert ranks.failed is not None
    (tmp_path / "file").touch()
    for out in (None, tmp_path / "file" / "run"):
        line = str(failures.of_local_ranks(caught.value, ranks.failed, 2, out))
        log = Path(re.search(r"the traceback is in (\S+?)(;|$)", line)[1])  # type: ignore[index]
        assert "a planted error" in log.read_text()
        log.unlink()
