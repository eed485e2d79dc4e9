"""Training: the same losses on any number of ranks, resumed on another, by any launcher."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import longweave as lw
from longweave.cli import app
from longweave.launch import Ranks
from longweave.tools.train.loop import Metrics, TrainConfig, attention_load
from longweave.tools.train.run import train_and_show
from longweave.tools.train.workload import documents, draw_documents

TINY = TrainConfig(hidden=32, layers=4, tokens=256, steps=6, warmup=2)


def losses(history: list[Metrics]) -> np.ndarray:
    return np.array([m.loss for m in history])


def run(ranks: Ranks, config: TrainConfig, size: int) -> list[Metrics]:
    return ranks.run(train_and_show, config, False, size=size, timeout=300)[0]


def test_the_losses_are_the_same_at_any_cp_size(ranks: Ranks) -> None:
    config = replace(TINY, steps=50 if os.environ.get("LONGWEAVE_FULL") else 20)
    one = losses(run(ranks, config, 1))
    assert one[-1] < one[0] - 0.5, "it learns"
    for size in (2, 3):
        assert np.abs(losses(run(ranks, config, size)) - one).max() < 1e-4


def test_dp_and_accumulation_are_the_same_mean(ranks: Ranks) -> None:
    """Two batches a step: one after the other, or on two data-parallel rows of two ranks each."""
    serial = losses(run(ranks, replace(TINY, accumulate=2), 1))
    parallel = losses(run(ranks, replace(TINY, dp=2), 4))
    assert np.abs(serial - parallel).max() < 1e-4
    norms = [[m.gradient_norm for m in run(ranks, replace(TINY, accumulate=2), size)] for size in (1, 2)]
    assert np.allclose(*norms, rtol=1e-3), "clipped by the norm of the whole gradient"


def test_resume_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    config = replace(TINY, out=tmp_path, save_every=3)
    whole = losses(run(ranks, config, 2))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6))
    for size in (1, 3):
        resumed = run(ranks, replace(TINY, resume=tmp_path / "step-3"), size)
        assert [m.step for m in resumed] == [3, 4, 5]
        assert np.abs(losses(resumed) - whole[3:]).max() < 1e-4


def test_bf16_and_activation_checkpointing(ranks: Ranks) -> None:
    plain = losses(run(ranks, TINY, 2))
    recomputed = losses(run(ranks, replace(TINY, checkpointing=True), 2))
    assert np.abs(recomputed - plain).max() < 1e-5
    rounded = losses(run(ranks, replace(TINY, bf16=True), 2))
    assert 0 < np.abs(rounded - plain).max() < 0.1


def train_without_reports(config: TrainConfig) -> list[Metrics]:
    """A report plans for every rank: too slow for a step."""

    def report(plan: lw.Plan) -> None:
        raise AssertionError(f"a report of {plan} was made")

    real, lw.Plan.report = lw.Plan.report, report  # type: ignore[method-assign,assignment]
    try:
        return train_and_show(config, False)
    finally:
        lw.Plan.report = real  # type: ignore[method-assign]


def test_no_step_makes_a_report(ranks: Ranks) -> None:
    config = replace(TINY, model="mistral", steps=2, strategy="groupcast", layout="contiguous")
    for history in ranks.run(train_without_reports, config, size=3):
        for m in history:
            borders = draw_documents(config.tokens, config.seed, m.step, 0).cu_seqlens
            mask = lw.Mask.sliding_window(borders, 128)
            report = lw.make_plan(mask, lw.Layout.contiguous(config.tokens, 3), "groupcast").report()
            assert m.kv_received == sum(rank.tokens_received for rank in report.ranks) > 0
            assert m.kv_gathered == 2 * config.tokens
            assert m.imbalance == pytest.approx(report.imbalance)
            assert m.imbalance > 1.0


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("groupcast", {}), ("ring", {}), ("ring", {"ulysses_size": 2}), ("allgather", {}), ("ulysses", {})],
)
@pytest.mark.parametrize("lengths", [(700, 33, 267), (0,)])
def test_the_load_of_a_plan_is_that_of_its_report(strategy: str, options: dict, lengths: tuple[int, ...]) -> None:
    borders = [0, *np.cumsum(lengths).tolist()]
    layout = lw.Layout.contiguous(borders[-1], 4)
    plan = lw.make_plan(lw.Mask.causal(borders), layout, strategy, heads=6, kv_heads=2, **options)
    report, load = plan.report(), attention_load(plan)
    assert load.received == sum(rank.tokens_received for rank in report.ranks)
    assert load.gathered * plan.shape.kv_bytes == report.bytes_if_gathered
    assert load.imbalance == pytest.approx(report.imbalance, rel=1e-3)  # a report counts whole pairs


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen3_moe", "qwen3_next"])
def test_families(ranks: Ranks, family: str) -> None:
    config = replace(TINY, model=family, steps=3)
    assert np.abs(losses(run(ranks, config, 2)) - losses(run(ranks, config, 1))).max() < 1e-4


def test_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ["train", "--ranks", "2", "--steps", "2", "--tokens", "128", "--hidden", "32", "--out", str(out)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "loss" in result.output
    assert (out / "run.png").stat().st_size > 1000
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    bad = CliRunner().invoke(app, ["train", "--ranks", "2", "--dp", "3"])
    assert bad.exit_code == 2
    assert "dp is 3 but there are 2 ranks" in bad.output


def test_torchrun_on_two_hosts(tmp_path: Path) -> None:
    """Two launchers, one rank each, meeting on the loopback address: what two hosts do on a network."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--master-addr", "127.0.0.1", "--master-port", "29611",
    ]  # fmt: skip
    job = ["-m", "longweave.cli", "train", "--steps", "2", "--tokens", "128", "--hidden", "32", "--out", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    hosts = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank), *job],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [host.communicate(timeout=240)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], said
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = CliRunner().invoke(app, ["train", "--ranks", "1", *job[3:-1], str(tmp_path / "one")])
    assert expected.exit_code == 0
    one = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert np.allclose([s["loss"] for s in steps], [s["loss"] for s in one], atol=1e-4)


def test_documents_are_heavy_tailed_and_drawn_alike() -> None:
    lengths = np.array([len(d) for d in documents()])
    assert len(lengths) > 1000
    assert lengths.max() > 20 * np.median(lengths)
    a, b = draw_documents(1000, 0, 3, 1), draw_documents(1000, 0, 3, 1)
    assert np.array_equal(a.input_ids, b.input_ids)
    assert a.cu_seqlens == b.cu_seqlens
    assert a.cu_seqlens[-1] == len(a.input_ids) == 1000
    assert a.targets == 1000 - (len(a.cu_seqlens) - 1)
    assert not np.array_equal(a.input_ids, draw_documents(1000, 0, 3, 2).input_ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dp": 3}, "dp is 3"),
        ({"steps": 0}, "steps is 0"),
        ({"save_every": 2}, "save_every needs out"),
        ({"resume": Path("nowhere")}, "nowhere, which does not exist"),
    ],
)
def test_bad_configurations(change: dict, message: str) -> None:
    with pytest.raises(lw.InputError, match=message):
        replace(TINY, **change).check(4)
