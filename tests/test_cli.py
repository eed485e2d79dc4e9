"""The commands that need no ranks."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from longweave.cli import app


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
        (["plan", "10", "--ranks", "0"], "world_size is 0"),
        (["plan", "10", "--strategy", "teleport"], "teleport"),
        (["plan", "10", "--layout", "spiral"], "spiral"),
    ],
)
def test_plan_refuses(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert message in result.output


def test_bench_plan_prints_its_table() -> None:
    result = CliRunner().invoke(app, ["bench", "plan"])
    assert result.exit_code == 0, result.output
    assert "zigzag layout + route" in result.output.replace("\n", " ") or "zigzag" in result.output
