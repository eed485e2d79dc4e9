"""What `make demo` shows, in small."""

import json
import re
from html import unescape
from pathlib import Path

import browser
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
    assert {path.name for path in tmp_path.iterdir()} == {"index.html", "two-ranks"}, "one file that can be mailed"
    check_page((tmp_path / "index.html").read_text(), tmp_path / "two-ranks", said)
    if browser.missing():
        pytest.skip(browser.missing())
    with browser.chromium(tmp_path / "profile") as running:
        check_in_browser(running, tmp_path / "index.html")


def check_in_browser(running: browser.Browser, page: Path) -> None:
    """Every bar says what it is, to fingers and keys, too; the plan inside is as high as it needs."""
    running.open(page)
    bars = running.run("return [...document.querySelectorAll('.lanes [tabindex]')].map(bar => bar.textContent)")
    running.run("document.querySelectorAll('.lanes rect')[1].dispatchEvent(new Event('click', {bubbles: true}))")
    assert running.texts("#bar") == [bars[1]]
    running.hover(".lanes rect", 0.5, 0.5)
    assert running.texts("#bar") == [bars[0]]
    assert running.run("return document.querySelectorAll('.lanes [tabindex=\"0\"]').length") == 2, "one stop a lane"
    for key, index in (("focus", 0), ("ArrowLeft", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        running.run(
            "const bar = arguments[0] === 'focus' ? document.querySelector('.lanes rect') : document.activeElement;"
            "if (arguments[0] === 'focus') bar.focus();"
            "else bar.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))",
            key,
        )
        assert running.texts("#bar") == [bars[index]]
    running.run("document.querySelector('iframe').scrollIntoView(); return new Promise(done => setTimeout(done, 1500))")
    sizes = running.run(
        "const frame = document.querySelector('iframe'), page = frame.contentDocument;"
        "return [page.querySelectorAll('.panel').length, page.documentElement.scrollHeight - frame.clientHeight]"
    )
    assert sizes == [2, 0]
    assert running.problems() == []


def check_page(page: str, run: Path, said: str) -> None:
    """It has the numbers of the run and the plan to explore, and asks no other host and no other file for anything."""
    page, plan_page = re.sub(r'srcdoc="(.*?)"', "", page, flags=re.S), re.findall(r'srcdoc="(.*?)"', page, re.S)
    assert len(plan_page) == 1
    assert unescape(plan_page[0]).startswith("<!doctype html>")
    assert '"views":{' in unescape(plan_page[0])
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
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<link|(href|src)=", page)
    assert "prefers-color-scheme: dark" in page
