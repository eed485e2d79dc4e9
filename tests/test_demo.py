"""What `make demo` shows, in small."""

from pathlib import Path

import pytest

from longweave.tools import demo


def test_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "OUT", tmp_path)
    demo.main(steps=3, tokens=256)
    said = capsys.readouterr().out
    assert "largest difference of a loss" in said
    assert "two ranks   one process   difference" in said
    for name in ("loss.png", "plan.png"):
        assert (tmp_path / name).stat().st_size > 1000
