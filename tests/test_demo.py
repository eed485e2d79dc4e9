"""What `make demo` shows, in small."""

import json
import re
from html import unescape
from pathlib import Path

import pytest

from longweave.tools import demo
from longweave.tools.timeline import Timeline


def test_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "OUT", tmp_path)
    demo.main(steps=3, tokens=256)
    said = capsys.readouterr().out
    assert "largest difference of a loss" in said
    assert "two ranks   one process   difference" in said
    assert f"wrote {tmp_path / 'index.html'}" in said
    for name in ("loss.png", "run.png", "plan.png", "plan.html"):
        assert (tmp_path / name).stat().st_size > 1000
    check_page((tmp_path / "index.html").read_text(), tmp_path / "two-ranks", said)


def check_page(page: str, run: Path, said: str) -> None:
    """It has the numbers of the run, and asks no other host for anything."""
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if metrics["step"] in (0, 2):
            assert f"<td>{metrics['loss']:.6f}</td>" in page
    difference = re.search(r"largest difference of a loss: (\S+)", said)
    assert difference is not None
    assert f"<dd>{difference[1]}</dd>" in page
    plan = said[said.index("documents 0") : said.index("two ranks, the sequence")]
    for line in filter(None, map(str.rstrip, plan.splitlines())):
        assert line in unescape(page), "the plan as it was printed"
    timeline = Timeline.load(run / "timeline.json")
    for lane in timeline.lanes:
        assert f"<td>{lane.bytes_sent()}</td>" in page
    bars = [one for lane in timeline.lanes for one in lane.intervals]
    assert page.count("<rect") == len(bars)
    assert f"{bars[0].kind}: the rest of the step, {1e3 * bars[0].seconds:.3f} ms" in page
    assert page.count("<path") == sum(len(lane.sent) for lane in timeline.lanes)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link|<iframe", page)
    assert re.findall(r'(?:href|src)="([^"]*)"', page) == ["plan.html"]
    assert "prefers-color-scheme: dark" in page
