"""The benchmark runs, on lengths that say nothing."""

from pathlib import Path

import pytest

from longweave.tools.bench import linear


def test_rows_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = linear.methods([128, 256])
    assert [(row.tokens, row.method) for row in rows] == [
        (tokens, method) for tokens in (128, 256) for method in ("affine", "reshard", "gather")
    ]
    sent = {(row.tokens, row.method): row.bytes_sent for row in rows}
    assert sent[128, "affine"] == sent[256, "affine"]
    assert sent[256, "gather"] == 2 * sent[128, "gather"]
    linear.plot(rows, tmp_path / "made" / "plot.png")
    assert (tmp_path / "made" / "plot.png").stat().st_size > 1000
    assert linear.local_pass("ours", 64, backward=True, rounds=1) > 0
