"""The benchmarks run, on lengths that say nothing."""

from itertools import pairwise
from pathlib import Path

import plain_transformers  # noqa: F401 - before models are made
import pytest
import torch
import typer
from typer.testing import CliRunner

import longweave as lw
from longweave.cli import app
from longweave.launch import Ranks
from longweave.plan import CPU, Machine
from longweave.plan.cost import traffic
from longweave.tools.bench import attention, host, linear, packed, pool


def test_attention(ranks: Ranks) -> None:
    for layout, strategy, options in (
        ("zigzag", "ring", {}),
        ("contiguous", "ring", {}),
        ("zigzag", "allgather", {"heads_k_stride": 2, "bwd_head_first_stride": 1, "bwd_head_last_stride": 1}),
        ("zigzag", "ulysses", {}),
    ):
        times = ranks.run(attention.our_pass, 128, layout, strategy, options, size=2)
        assert times[0] == times[1] > 0, "the time of the slowest"
    assert attention.rectangle_rate(64, 64) > 1e4
    assert attention.kernel_pass(128) > 0


def test_timelines_show_who_waits(ranks: Ranks) -> None:
    """With a contiguous layout rank 0 has one step of work and rank 2 has three; zigzag gives all of them three."""
    found = {name: ranks.run(attention.timeline, 1536, name, size=3) for name in ("contiguous", "zigzag")}
    assert [len(busy) for busy in found["contiguous"]] == [1, 2, 3]
    assert [len(busy) for busy in found["zigzag"]] == [3, 3, 3]
    lines = attention.draw_timelines(found, width=20).splitlines()
    assert len(lines) == 8
    assert [len(line) for line in lines[1:4]] == [24] * 3


def test_packed(ranks: Ranks) -> None:
    borders = packed.documents("giant", 512)
    assert borders[-1] == 512
    assert max(b - a for a, b in pairwise(borders)) == 256
    for strategy in ("groupcast", "allgather", "ring"):
        assert ranks.run(packed.our_pass, borders, strategy, size=2)[0] > 0
    assert packed.one_process(borders, "ours") > 0
    assert packed.one_process(borders, "sdpa") > 0


def test_packed_plans_as_for_gpus(ranks: Ranks) -> None:
    """On a CPU the layout would be another one: bytes are cheap there, and group-cast would receive all of them."""
    borders = packed.documents("lognormal", 32768)
    mask = lw.Mask.causal(borders)
    ours = traffic(mask, packed.layout_of("balanced", borders, 4))[1]
    cheap = traffic(mask, lw.Layout.balanced(mask, 4, machine=CPU))[1]
    assert 4 * max(ours) < max(cheap)
    small = packed.documents("lognormal", 512)
    assert len(ranks.run(packed.footprint, small, "groupcast", "balanced", size=2)) == 2


def test_rows_are_shown_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each before the next one is measured."""
    shown: list[str] = []
    echo = typer.echo
    monkeypatch.setattr(typer, "echo", lambda text: (shown.append(text), echo(text)))

    def run(tokens: int, kind: str):
        for world in (2, 4):
            yield packed.PackedTimes(kind, tokens, world, 0.5, 1.0, 0.75, 2.0, 3.25, 4.5)
            assert kind in shown[-1]

    monkeypatch.setattr(packed, "run", run)
    result = CliRunner().invoke(app, ["bench", "packed", "64"])
    assert result.exit_code == 0, result.output
    assert packed.PLANNED_FOR in result.output
    assert " ".join(result.output.splitlines()[-1].split()) == "giant 64 4 0.500 4.00 2.00 1.50 3.25 4.50"


def test_the_footprint_is_that_of_the_tensors(ranks: Ranks) -> None:
    borders = [0, 256]
    for kept, peak in ranks.run(packed.footprint, borders, "ring", "zigzag", size=2):
        # q, out: 8 heads; k, v: 2; 128 tokens of 64 floats. And the log-sum-exp, a float for each head of q.
        tensors = 128 * (8 + 8 + 2 + 2) * 64 * 4 + 128 * 8 * 4
        assert tensors <= kept <= 1.1 * tensors
        assert peak > 128 * 8 * 64 * 4, "at least the output"


def test_linear(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = linear.methods([128, 256])
    assert [(row.tokens, row.method) for row in rows] == [
        (tokens, method) for tokens in (128, 256) for method in ("affine", "reshard", "gather")
    ]
    sent = {(row.tokens, row.method): row.bytes_sent for row in rows}
    assert sent[128, "affine"] == sent[256, "affine"]
    assert sent[256, "gather"] == 2 * sent[128, "gather"]
    assert linear.draw_methods(rows, tmp_path / "made" / "b.png") == f"wrote {tmp_path / 'made' / 'b.png'}"
    assert (tmp_path / "made" / "b.png").stat().st_size > 1000
    assert linear.local_pass(64, backward=True, rounds=1) > 0


def test_bench_linear_draws_only_if_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    line = linear.LinearTime("what", "against", 1.0, 1.0, "goal")
    monkeypatch.setattr(linear, "growth", lambda: line)
    monkeypatch.setattr(linear, "two_ranks", lambda: line)
    monkeypatch.setattr(linear, "methods", lambda lengths: [linear.MethodTime(lengths[0], "affine", 1.0, 1024)])
    refused = CliRunner().invoke(app, ["bench", "linear", "64", "--picture", "b.doc"])
    assert refused.exit_code == 2
    assert "the picture is 'b.doc'" in " ".join(refused.output.split())
    assert CliRunner().invoke(app, ["bench", "linear", "64"]).exit_code == 0
    assert not any(tmp_path.iterdir())
    drawn = CliRunner().invoke(app, ["bench", "linear", "64", "--picture", "b.svg"])
    assert "wrote b.svg" in drawn.output
    assert (tmp_path / "b.svg").stat().st_size > 1000


def test_plan() -> None:
    rows = host.planning()
    assert len({row.what for row in rows}) == len(rows) == 5
    assert all(0.1 < row.ms < 60_000 for row in rows), "milliseconds"


def test_the_recorder() -> None:
    assert host.recorder_seconds(calls=10) > 0


@pytest.mark.parametrize("name", host.CASES)
def test_host(ranks: Ranks, name: str) -> None:
    for forward, both in ranks.run(host.layer_times, name, 5, size=2):
        assert min(forward, both) > 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="local ranks might use it")
def test_bench_host_sends_in_one_stage_both_ways(ranks: Ranks) -> None:
    """Ranks on one CPU host plan for that: arithmetic is slow there, so one stage of traffic hides behind it."""
    for machine, layout, stages in ranks.run(groupcast_case, size=2):
        assert machine == CPU
        assert stages == 1
        sent, received = traffic(lw.Mask.causal(host.FEW), layout)
        assert min(*sent, *received) > 0, "or there is nothing to measure"


def groupcast_case() -> tuple[Machine, lw.Layout, int]:
    borders, layout = host.CASES["groupcast"]
    pack = lw.Pack(borders, layout=layout)
    q, k, v, _ = attention.inputs(pack.tokens)
    lw.attention(q, k, v, pack, strategy="groupcast")
    (plan,) = pack.plans
    return plan.machine, pack.layout, plan.stages


@pytest.mark.parametrize(("family", "equal"), [("dense", False), ("dense", True), ("hybrid", False)])
def test_pool(ranks: Ranks, family: str, equal: bool) -> None:
    ranks.run(plain_models, size=2)
    workload = pool.PoolWorkload(family, steps=2, longest=300, equal=equal, hidden=32, vocabulary=64)
    lines = pool.run(workload, ranks)  # and the losses are equal
    assert [line.variant for line in lines] == workload.variants
    home, pooled, with_head = lines[:3]
    assert home.mb_sent == 0
    assert home.ratio == home.median_ratio == home.busy_ratio == 1
    assert home.allowed == home.slowest_work
    if equal:
        assert home.allowed == 1
        assert pooled.mb_sent == with_head.mb_sent == 0, "there is nothing to share"
    else:
        assert home.allowed > with_head.slowest_work
        assert home.slowest_tokens > with_head.slowest_tokens == pooled.slowest_tokens
        assert pooled.mb_sent > with_head.mb_sent > 0, "hidden states do not go home"
    for line in lines:
        assert min(line.seconds, line.busy, line.ratio, line.median_ratio) > 0
        assert len(line.losses) == 2
        assert (line.mb_peak > 0) != equal
    assert [text.split(":")[0].split(",")[1] for text in pool.verdict(lines)[:2]] == [" pool", " pool + head"]


def plain_models() -> None:
    """On ranks that serve other tests as well: models come without flash-linear-attention (`plain_transformers`)."""


def test_bench_pool_shows_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(workload: pool.PoolWorkload, ranks: object) -> list[pool.PoolTime]:
        name = f"{workload.family} {workload.equal}"
        return [
            pool.PoolTime(workload, variant, 8.0, ratio, 1.2, 1.1, 1.0, 1.1, 7.9, 1.3, 2.5, peak, 1.5, (name,))
            for variant, ratio, peak in (("home", 1.0, 50.0), ("pool", 1.45, 40.0), ("pool + head", 0.94, 60.0))
        ]

    monkeypatch.setattr(pool, "run", run)
    monkeypatch.setenv("COLUMNS", "160")
    result = CliRunner().invoke(app, ["bench", "pool", "--steps", "2"])
    assert result.exit_code == 0, result.output
    for said in (
        "dense, pool: 1.45 × as fast as home, 1.50 allowed: 90% of the gain; the bar of 85% is met; peak memory falls",
        "-12% of the gain; the bar of 85% is missed; peak memory does not fall, 50 → 60 MB",
        "hybrid, pool + head, equal rows: 0.94 × as fast as home; the bar of 95% is missed",
    ):
        assert said in result.output
