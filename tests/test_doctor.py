"""`longweave doctor`: right installations pass, planted faults are named, and nothing stops the checks that follow."""

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import longweave as lw
from longweave.cli import app
from longweave.kernels.attention import cpu_flash
from longweave.kernels.attention.partial import NO_LIMIT, Tasks
from longweave.launch import RankError
from longweave.linear.conv import Halo
from longweave.tools import doctor
from longweave.tools.doctor import across, kernels, show, speed, whole
from longweave.tools.doctor.checks import ABSENT, FAIL, OK, SKIPPED, Check, Outcome, Site, attempt, error_of, merged

PARTS = {check.name: check for check in doctor.CHECKS}
QUICK = ("environment", "collectives", "attention kernels", "automatic choice", "strategies", "linear mixers")


def run(*checks: Check, family: str = "llama") -> doctor.Diagnosis:
    return doctor.diagnose("cpu", 2, family, checks)


def rows(diagnosis: doctor.Diagnosis, check: str) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in diagnosis.findings if finding.check.name == check}


# -- a right installation ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy() -> doctor.Diagnosis:
    return run(*(PARTS[name] for name in (*QUICK, "convolution", "determinism", "overlap")))


def test_a_right_installation_passes(healthy: doctor.Diagnosis) -> None:
    assert not healthy.failed, [finding.figure for finding in healthy.failed]
    assert healthy.exit_code == 0
    assert (healthy.device, healthy.ranks) == ("cpu", 2)
    assert rows(healthy, "environment")["torch"].figure == torch.__version__
    assert set(rows(healthy, "collectives")) == set(across.COLLECTIVES)
    assert all(len(finding.cases) == 2 for finding in rows(healthy, "collectives").values())  # also in a sub-group
    assert rows(healthy, "attention kernels")["cpu_flash"].verdict == OK
    for backend in ("aten_flash", "flash_attn", "flex"):
        assert rows(healthy, "attention kernels")[backend].verdict == ABSENT
        assert rows(healthy, "attention kernels")[backend].figure == "does not run on cpu"
    overlap = rows(healthy, "overlap")["exchange and compute"].figure
    assert overlap.startswith("not judged")
    assert "% of the shorter is hidden" in overlap
    assert rows(healthy, "automatic choice")["window of 1024, float32"].figure == "cpu_flash"
    assert set(rows(healthy, "linear mixers")) == set(across.MIXERS)
    assert {"groupcast", "ring", "allgather", "ulysses"} <= set(rows(healthy, "strategies"))
    for finding in rows(healthy, "strategies").values():
        assert len(finding.cases) == len(across.MASKS) * len(across.LAYOUTS)
        assert 0 < max(case.value for case in finding.cases) < 1e-5


def test_the_json_has_every_case(healthy: doctor.Diagnosis) -> None:
    written = json.loads(healthy.as_json())
    assert written["exit_code"] == 0
    assert written["longweave"] == lw.__version__
    assert (written["argv"], written["hosts"], written["model"]) == (sys.argv, [platform.node()], "llama")
    ring = next(row for row in written["rows"] if (row["check"], row["row"]) == ("strategies", "ring"))
    assert ring["verdict"] == OK
    assert {"case", "value", "limit", "verdict", "seconds"} <= ring["cases"][0].keys()


def test_the_json_has_no_infinities() -> None:
    found = doctor.Diagnosis("cpu", 2, "auto")
    found.add(PARTS["collectives"], [Outcome("ring", "all", FAIL, inf, 1e-4)])
    assert json.loads(found.as_json())["rows"][0]["cases"][0]["value"] == "inf"


def test_every_check_says_what_it_proves() -> None:
    assert len({check.name for check in doctor.CHECKS}) == len(doctor.CHECKS)
    assert all(check.proves and check.run.__doc__ and check.limit <= 600 for check in doctor.CHECKS)


# -- planted faults ------------------------------------------------------------------------------------
# Ranks are processes of their own: a fault is planted there, by a check that wraps the true one.


@contextmanager
def planted(owner: object, name: str, fault: object) -> Iterator[None]:
    true = getattr(owner, name)
    setattr(owner, name, fault)
    try:
        yield
    finally:
        setattr(owner, name, true)


def without_windows(site: Site) -> list[Outcome]:
    true = cpu_flash.forward

    def forward(into, q, k, v, tasks, scale, fresh):
        seen = np.array(tasks.rows)
        seen[:, 4] = -NO_LIMIT
        true(into, q, k, v, Tasks(seen), scale, fresh)

    with planted(cpu_flash, "forward", forward):
        return list(kernels.attention_backends(site))


def without_halo_gradients(site: Site) -> list[Outcome]:
    with planted(Halo, "add_home", lambda self, d_halos, dxs: None):
        return list(across.convolution(site))


def gradients_times_two(site: Site) -> list[Outcome]:
    true = lw.reduce_gradients

    def scaled(model, group):
        true(model, group)
        if dist.get_world_size(group) > 1:
            for p in model.parameters():
                p.grad *= 2

    with planted(lw, "reduce_gradients", scaled):
        return list(whole.model(site))


def gathered_with_another_sign(site: Site) -> list[Outcome]:
    true = across.all_gather_v

    def gather(x, counts, comm):
        pending = true(x, counts, comm)
        pending.wait().neg_()
        return pending

    with planted(across, "all_gather_v", gather):
        return list(across.collectives(site))


def packs_that_stay(site: Site) -> list[Outcome]:
    kept = []
    with planted(whole, "_step", lambda site, number: kept.append(torch.ones(1 << 19))):  # 2 MiB each
        return list(whole.memory(site))


def another_bit(site: Site) -> list[Outcome]:
    true, calls = kernels.AttentionCase.solve, []

    def passed(case, full, pack):
        calls.append(1)
        return [x + 1e-6 * len(calls) for x in true(case, full, pack)]

    with planted(kernels.AttentionCase, "solve", passed):
        return list(whole.determinism(site))


def one_rank_dies(site: Site) -> list[Outcome]:
    if site.rank == 1:
        os._exit(7)
    return []


def one_rank_sleeps(site: Site) -> list[Outcome]:
    if site.rank == 1:
        time.sleep(60)
    return []


def raises_in_between(site: Site) -> Iterator[Outcome]:
    yield Outcome("before", "")
    yield attempt(site, "case", "odd", 1e-3, lambda: 1 / 0)
    raise RuntimeError("no such luck")


@pytest.fixture(scope="module")
def ill() -> doctor.Diagnosis:
    faulty = {
        "attention kernels": without_windows,
        "collectives": gathered_with_another_sign,
        "convolution": without_halo_gradients,
        "memory": packs_that_stay,
        "determinism": another_bit,
        "model": gradients_times_two,
    }
    return run(
        *(replace(PARTS[name], run=fault) for name, fault in faulty.items()),
        Check("raises", "…", raises_in_between),
        Check("dies", "…", one_rank_dies),
        Check("sleeps", "…", one_rank_sleeps, limit=2.0),
        PARTS["environment"],
    )


def test_faults_are_found_where_they_are(ill: doctor.Diagnosis) -> None:
    assert ill.exit_code == 1
    flash = rows(ill, "attention kernels")["cpu_flash"]
    assert flash.verdict == FAIL
    failed = {case.case for case in flash.cases if case.verdict == FAIL}
    assert {"window 37, float32", "wide window, float32"} <= failed
    assert "causal packed, float32" not in failed
    assert "window" in flash.figure
    assert rows(ill, "attention kernels")["reference"].verdict == OK
    assert {name for name, row in rows(ill, "collectives").items() if row.verdict == FAIL} == {
        "all-gather, uneven",
        "all-gather, even",
    }
    assert rows(ill, "convolution")["causal convolution"].verdict == FAIL
    assert rows(ill, "memory")["100 packs"].verdict == FAIL
    assert (
        "MiB more after 50 further packs (limit 6 MiB; memory of the process)"
        in rows(ill, "memory")["100 packs"].figure
    )
    assert rows(ill, "determinism")["attention"].verdict == FAIL
    assert rows(ill, "determinism")["gated delta rule"].verdict == OK


def test_what_dies_is_a_row_and_the_rest_still_runs(ill: doctor.Diagnosis) -> None:
    raised = rows(ill, "raises")
    assert raised["before"].verdict == OK
    assert raised["case"].verdict == FAIL
    assert "odd" in raised["case"].figure
    assert "ZeroDivisionError: division by zero" in raised["case"].figure
    assert "raises_in_between" in raised["the check itself"].cases[0].detail
    assert "RuntimeError: no such luck" in raised["the check itself"].figure
    assert "rank 1 died with exit code 7" in rows(ill, "dies")["the check itself"].figure
    assert "did not come back within 2 s" in rows(ill, "sleeps")["the check itself"].figure
    assert rows(ill, "environment")["torch"].verdict == OK


def test_a_scaled_gradient_of_the_model_is_found(ill: doctor.Diagnosis) -> None:
    scaled = rows(ill, "model")["llama"]
    assert scaled.verdict == FAIL
    assert scaled.worst.value == pytest.approx(1, abs=0.01)


# -- ranks that somebody else started ------------------------------------------------------------------

JOINED = """
import sys
import time
from longweave.tools import doctor
from longweave.tools.doctor.checks import Check

def sleeps(site):
    if site.rank == 1:
        time.sleep(60)
    return []

def show(diagnosis, findings):
    for finding in findings:
        print(finding.verdict, finding.name, finding.figure, flush=True)

checks = [check for check in doctor.CHECKS if check.name == "collectives"]
checks.append(Check("sleeps", "…", sleeps, limit=1.0))
sys.exit(doctor.diagnose("cpu", checks=checks, end=show).exit_code)
"""


def test_ranks_that_torchrun_started(tmp_path: Path) -> None:
    """They are joined; a check that does not come back ends the run, and rank 0 has said what was found."""
    script = tmp_path / "joined.py"
    script.write_text(JOINED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(Path(lw.__file__).parents[1])}
    started = [
        subprocess.Popen(
            [sys.executable, str(script)], env={**os.environ, **env, "RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=90)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()
    assert "ok reduce-scatter 2 cases; exact" in said[0]
    assert "FAIL the check itself rank 0 or one that it waits for is not done after 2 s" in said[0]
    assert [process.returncode for process in started] == [1, 1]


# -- the command ---------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_the_command_says_that_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(show, "CHECKS", (PARTS["environment"], PARTS["collectives"]))
    file = tmp_path / "new" / "found.json"
    result = CliRunner().invoke(app, ["doctor", "--device", "cuda", "--ranks", "1", "--json", str(file)])
    assert result.exit_code == 3, result.output
    assert "no CUDA device here: checking the CPU, 1 rank" in result.output
    assert "CUDA was asked for and is absent" in result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["absent", "environment:", "CUDA"] in [words[:3] for words in lines]
    assert ["ok", "collectives:", "reduce-scatter"] in [words[:3] for words in lines]
    written = json.loads(file.read_text())
    assert written["exit_code"] == 3
    assert (written["asked_for"], written["device"]) == ("cuda", "cpu")


@pytest.mark.parametrize(
    "args",
    [["--device", "tpu"], ["--model", "elephant"], ["--ranks", "-3"], ["--json", "."], ["--json", "/dev/null/x"]],
)
def test_the_command_refuses(args: list[str]) -> None:
    result = CliRunner().invoke(app, ["doctor", *args])
    assert result.exit_code == 2
    assert args[0].strip("-") in result.output


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "found.json"):
        result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--json", str(place)], env={"COLUMNS": "400"})
        assert result.exit_code == 2, result.output
        assert "cannot be written" in result.output


def test_a_table_on_a_terminal() -> None:
    found = doctor.Diagnosis("cpu", 2, "auto")
    found.add(PARTS["collectives"], [Outcome("ring", "all", value=0.0), Outcome("odd [one]", "x", FAIL, 0.5, 1e-4)])
    from rich.console import Console

    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(show.table(found))
    text = console.export_text()
    assert "odd [one]" in text
    assert "worst error 5.0e-01 (limit 1e-04)" in text
    assert "1 ok, 1 FAIL" in text


# -- outcomes, without ranks ---------------------------------------------------------------------------


def test_of_all_ranks_the_worst_counts() -> None:
    good, bad = Outcome("r", "c", OK, 1e-7, 1e-4, seconds=1.0), Outcome("r", "c", FAIL, 0.3, 1e-4, seconds=0.5)
    (found,) = merged([[good], [bad], [replace(good, value=2e-7)]])
    assert (found.verdict, found.value, found.note, found.seconds) == (FAIL, 0.3, "rank 1: ", 1.0)
    (found,) = merged([[good], [replace(good, value=2e-7)]])
    assert found.value == 2e-7
    (found,) = merged([[Outcome("r", "c", SKIPPED)], [good]])
    assert found.verdict == OK
    assert len(merged([[Outcome("r", "rank 0")], [Outcome("r", "rank 1")]])) == 2


def test_errors_are_relative_and_nan_is_no_success() -> None:
    wanted = torch.tensor([10.0, -5.0, -inf])
    assert error_of(wanted.clone(), wanted) == 0
    assert error_of(torch.tensor([10.0, -4.0, -inf]), wanted) == pytest.approx(0.1)
    assert error_of(torch.tensor([10.0, nan, -inf]), wanted) == inf
    assert error_of(torch.tensor([10.0, -5.0, 3.0]), wanted) == inf
    with pytest.raises(AssertionError, match="shape"):
        error_of(torch.zeros(2), wanted)


# -- CUDA, without CUDA --------------------------------------------------------------------------------


class Pool:
    """In the place of local ranks on a machine with three GPUs, whose check ends with an error on one of them."""

    made: ClassVar[list["Pool"]] = []

    def __init__(self, size: int, threads: int = 1) -> None:
        self.threads, self.calls, self.closed = threads, [], False
        Pool.made.append(self)

    def run(self, fn, *args, size, timeout):
        self.calls.append((fn.__name__, args[1:], size))
        if fn.__name__ == "_count_devices":
            return [3]
        if args[0].name == "dies":
            raise RankError("rank 1 died with exit code -11\nand more")
        return [[Outcome("r", "c", FAIL if rank else OK, detail="Traceback" * rank)] for rank in range(size)]

    def close(self) -> None:
        self.closed = True


def test_one_rank_for_each_gpu_and_new_ones_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "Ranks", Pool)
    Pool.made.clear()
    found = doctor.diagnose("auto", 8, "llama", [Check("dies", "…", print), Check("raises", "…", print)])
    assert found.headline() == "checking CUDA, 3 ranks, NCCL"
    assert "rank 1 died with exit code -11" in rows(found, "dies")["the check itself"].figure
    assert rows(found, "raises")["r"].verdict == FAIL
    assert [pool.closed for pool in Pool.made] == [True] * 3
    assert [pool.calls[-1] for pool in Pool.made[:2]] == [("examine", ("cuda", "llama"), 3)] * 2


def test_times_on_a_gpu_are_taken_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        record = lambda self: log.append("record")  # noqa: E731
        synchronize = lambda self: log.append("synchronize")  # noqa: E731
        elapsed_time = lambda self, end: 1.5  # noqa: E731

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    site = Site(torch.device("cuda", 0), None, None, None, "llama", timedelta(seconds=1))
    assert speed.milliseconds(lambda: log.append("call"), site, 1) == 1.5
    assert log == ["call", "wait", "record", "call", "record", "synchronize"]
    sizes = "16384 tokens a rank in documents of 4096, 32:8 heads of 128, bfloat16, causal"
    assert str(speed.workload(site)) == sizes
    assert next(iter(speed.kernel_times(site))).note == next(iter(speed.strategy_times(site))).note == sizes
    assert site.dtypes == (torch.float32, torch.bfloat16)


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    site = Site(torch.device("cuda", 0), None, None, None, "llama", timedelta(seconds=1))
    assert kernels._gpu(site).note == "H100, compute capability 9.0, 70.0 of 80.0 GiB free"


def test_nothing_found_is_no_success() -> None:
    assert doctor.Diagnosis("cpu", 2, "auto").exit_code == 1
