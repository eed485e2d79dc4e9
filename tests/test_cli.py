"""The commands that need no ranks."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from longweave.cli import app
from longweave.tools.bench import host


def test_plan_draws_and_reports(tmp_path: Path) -> None:
    args = ["plan", "137", "2041", "89", "--ranks", "3", "--png", str(tmp_path / "plan.png")]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "rank 2" in result.output
    assert "imbalance" in result.output
    assert (tmp_path / "plan.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "10", "--ranks", "0"], "ranks is 0"),
        (["plan", "10", "--strategy", "teleport"], "teleport"),
        (["plan", "10", "--layout", "spiral"], "spiral"),
    ],
)
def test_plan_refuses(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert message in result.output


def test_plan_counts_for_the_default_layer() -> None:
    """The head shape is that of the cost model: 64:8 heads of 128, two bytes a number."""
    args = ["plan", "900", "100", "--ranks", "2", "--layout", "contiguous", "--strategy", "groupcast"]
    shape = ["--heads", "64", "--kv-heads", "8", "--head-dim", "128"]
    said = [CliRunner().invoke(app, [*args, *more]).output for more in ([], shape, ["--kv-heads", "16"])]
    assert said[0] == said[1]
    assert said[0] != said[2]
    # Rank 1 needs the 500 tokens of rank 0; 4096 bytes a token.
    assert "2.05 MB received" in said[0]


def test_bench_plan_prints_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    rows = [host.PlanningTime("group-cast schedule", 12.34, 100), host.PlanningTime("balanced layout", 56.78, 500)]
    monkeypatch.setattr(host, "planning", lambda: rows)
    result = CliRunner().invoke(app, ["bench", "plan"])
    assert result.exit_code == 0, result.output
    for row in rows:
        assert any(row.what in line and f"{row.ms:.1f}" in line for line in result.output.splitlines())


def test_bench_host_prints_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(host, "layer_calls", lambda rounds: [host.HostTime("ring", 1, "zigzag", rounds, 7.777)])
    result = CliRunner().invoke(app, ["bench", "host", "--rounds", "5"])
    assert result.exit_code == 0, result.output
    assert any("ring" in line and "5.00" in line and "7.78" in line for line in result.output.splitlines())
