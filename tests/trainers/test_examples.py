"""The scripts in examples/ run as they are: the same on two ranks as on one, and with `lw.pool` as without."""

import ast
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch.distributed as dist
from trainer_runs import as_launched

import longweave as lw
from longweave.launch import Ranks

FOLDER = Path(__file__).parents[2] / "examples"
LOOPS = ("hf_loop", "own_decoder", "pooled_encoder", "rl_shared_prompt")
TRAINERS = ("hf_trainer", "trl_sft")
SMALL = {
    "hf_loop": "150",
    "hf_trainer": "80",
    "own_decoder": "150",
    "pooled_encoder": "100",
    "rl_shared_prompt": "150",
    "trl_sft": "80",
}


def arguments(name: str) -> list[str]:
    return [str(FOLDER / f"{name}.py"), "--steps", "3", "--longest", SMALL[name]]


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"(?:^step \d+ loss |'loss': '?)(-?[\d.]+)", text, re.M)]


def run(name: str, without: str | None = None) -> list[float]:
    """On a rank that is there already, as torchrun would start it. `without`: a function that then does nothing."""
    said = StringIO()
    with as_launched() as folder, pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        patch.setattr(sys, "argv", arguments(name))
        patch.chdir(folder)
        if without:
            patch.setattr(lw, without, lambda model, **options: model, raising=False)
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return losses(said.getvalue())


@pytest.mark.parametrize("name", LOOPS)
def test_loops(ranks: Ranks, name: str) -> None:
    alone = ranks.run(run, name, size=1)[0]
    together = ranks.run(run, name, size=2)[0]
    assert len(alone) == 3
    assert together == pytest.approx(alone, abs=2e-5)
    assert len(set(alone)) == 3


def with_and_without(name: str) -> tuple[list[float], list[float]]:
    return run(name), run(name, "pool")


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers(ranks: Ranks, name: str) -> None:
    pooled, plain = ranks.run(with_and_without, name, size=2, timeout=300)[0]
    assert len(pooled) == 3
    assert pooled == pytest.approx(plain, abs=2e-3), "they are logged with four digits"
    assert pooled[-1] < pooled[0]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_under_torchrun(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, *arguments(name)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(losses(done.stdout)) == 3


def test_they_are_short_and_all_here() -> None:
    scripts = sorted(FOLDER.glob("*.py"))
    assert [script.stem for script in scripts] == sorted(SMALL)
    for script in scripts:
        assert len(script.read_text().splitlines()) <= 60, script
        told = ast.get_docstring(ast.parse(script.read_text()))
        assert told is not None
        assert f"torchrun --nproc-per-node 2 examples/{script.name}" in told
