"""The page of a plan in a real browser: no errors, the numbers of the report, readable when it is large."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import browser
import numpy as np
import pytest

from longweave.plan.stages import exchange_matrix, plan_stages
from longweave.plan.tasks import GroupCast
from longweave.tools.planning import PlanRequest
from longweave.tools.planning.page import make_page

pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())

REQUEST = PlanRequest((410, 137, 0, 204, 9, 70), ranks=4, node_size=2)
LARGE = PlanRequest(tuple(range(1, 40)) * 26, ranks=64)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {"small": folder / "small.html", "large": folder / "large.html", "empty": folder / "empty.html"}
    for name, request in (("small", REQUEST), ("large", LARGE), ("empty", PlanRequest((0,), 2))):
        found[name].write_text(make_page(request), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.chromium(tmp_path_factory.mktemp("chromium") / "profile") as running:
        yield running


def choose(page: browser.Browser, panel: int, layout: str, strategy: str) -> None:
    page.run(
        "const p = document.querySelectorAll('.panel')[arguments[0]];"
        "for (const [name, value] of [['layout', arguments[1]], ['strategy', arguments[2]]]) {"
        " p.querySelector('.' + name).value = value; p.querySelector('.' + name).dispatchEvent(new Event('change')); }",
        panel,
        layout,
        strategy,
    )


def ints(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def test_numbers_are_those_of_the_report(pages: dict[str, Path], chromium: browser.Browser) -> None:
    chromium.resize(1280, 900)
    chromium.open(pages["small"])
    views = chromium.run("return [...document.querySelectorAll('.panel')].map(p => p.dataset.view)")
    assert views == ["contiguous/ring", "zigzag/ring"]  # the first example
    chromium.run("for (const d of document.querySelectorAll('details')) d.open = true")
    for layout, strategy in (
        ("contiguous", "ring"),
        ("balanced", "groupcast"),
        ("zigzag", "ulysses"),
        ("balanced", "allgather"),
    ):
        choose(chromium, 1, layout, strategy)
        report = REQUEST.make_plan(REQUEST.make_layout(layout), strategy).report()
        facts = chromium.texts(".facts")[1]
        assert f"imbalance\n{report.imbalance:.3f}" in facts
        assert f"{report.total_area:,}" in facts
        assert f"{report.bytes_received / 1e6:.2f} MB" in facts
        assert f"bound {report.load_bound:,}" in facts
        rows = chromium.run(
            "const rows = [...document.querySelectorAll('.numbers')[1].rows].slice(1);"
            "return rows.map(r => [...r.cells].map(c => c.innerText))"
        )
        assert [[ints(cell)[0] for cell in row] for row in rows] == [
            [r.rank, r.tokens, r.area, r.tokens_received, r.tokens_sent, r.bytes_received, r.bytes_sent, r.kernel_tasks]
            for r in report.ranks
        ]
    assert chromium.problems() == []


def test_tokens_are_explained_as_the_schedule_has_them(pages: dict[str, Path], chromium: browser.Browser) -> None:
    """Owner, document, and for every token and span what must be received from whom."""
    chromium.open(pages["small"])
    for name in ("zigzag", "balanced"):
        layout = REQUEST.make_layout(name)
        dense, owners = REQUEST.mask.dense(), np.asarray(layout.owner(np.arange(layout.total)))
        said = chromium.run(
            "const v = new View(arguments[0], plan, shared);"
            "const token = (_, t) => { const f = v.token(t); return [f.owner, f.document, f.sees, [...f.needs]]; };"
            "return [Array.from({length: plan.total}, token),"
            " v.spans.owners.map((_, i) => { const f = v.span(i); return [f.start, f.stop, f.owner, [...f.needs]]; })]",
            f"{name}/groupcast",
        )

        def needs(
            start: int, stop: int, owner: int, seen: np.ndarray = dense, held: np.ndarray = owners
        ) -> list[list[int]]:
            ranks, counts = np.unique(held[seen[start:stop].any(axis=0)], return_counts=True)
            return [[int(rank), int(count)] for rank, count in zip(ranks, counts, strict=True) if rank != owner]

        documents = np.searchsorted(REQUEST.mask.cu_seqlens, np.arange(layout.total), side="right") - 1
        for token, (owner, document, sees, needed) in enumerate(said[0]):
            assert (owner, document, sees) == (owners[token], documents[token], dense[token].sum())
            assert needed == needs(token, token + 1, owner)
        for start, stop, owner, needed in said[1]:
            assert needed == needs(start, stop, owner)
        plan = REQUEST.make_plan(layout, "groupcast")
        cast = GroupCast(plan.mask, layout, plan.stages)
        turns = chromium.run("return plan.views[arguments[0]].turn.starts", f"{name}/groupcast")
        assert turns == [list(cast.stage_starts(rank)) for rank in range(4)]


def test_hovering_and_playing(pages: dict[str, Path], chromium: browser.Browser) -> None:
    chromium.resize(1280, 900)
    chromium.open(pages["small"])
    chromium.hover(".map", 0.05, 0.4)
    inspected = chromium.texts(".inspect")[0]
    assert "rank 1 computes the pair with K/V that rank 0 sends, in stage 1" in inspected
    assert "must receive K/V of" in inspected
    chromium.hover(".holds", 0.6, 0.6, index=0)
    assert "on rank 2" in chromium.texts(".inspect")[0]
    chromium.hover(".matrix", 0.5, 0.2, index=0)
    assert "rank 0 → rank 1" in chromium.texts(".tip")[0]
    chromium.click("#forth")
    assert "stage 1 of 4" in chromium.texts(".stage")[0]
    before = chromium.run("return document.querySelector('.lanes').toDataURL()")
    chromium.click("#play")
    chromium.run("return new Promise(done => setTimeout(done, 400))")
    chromium.click("#play")
    assert chromium.run("return document.querySelector('.lanes').toDataURL()") != before
    for strategy in ("allgather", "ulysses", "groupcast", "affine"):
        choose(chromium, 0, "zigzag", strategy)
        chromium.run("const s = document.querySelector('#time'); s.value = 200; s.dispatchEvent(new Event('input'))")
        assert chromium.texts(".stage")[0].startswith("stage ")
        chromium.hover(".lanes", 0.06, 0.3)
        assert chromium.texts(".tip")[0].startswith("rank ")
    chromium.run("const t = document.querySelector('#token'); t.value = 5; t.dispatchEvent(new Event('input'))")
    chromium.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert "token 5: document 0" in chromium.texts(".inspect")[0]
    assert chromium.problems() == []


def test_the_pictures_are_there_in_words(pages: dict[str, Path], chromium: browser.Browser) -> None:
    """For those who do not see them: names of everything drawn, numbers in tables, and silence while others hover."""
    chromium.resize(1280, 900)
    chromium.open(pages["small"])
    nameless = "return [...document.querySelectorAll('canvas')].filter(c => c.role !== 'img' || !c.ariaLabel).length"
    assert chromium.run(nameless) == 0
    assert chromium.run("return [...document.querySelectorAll('.panel')].map(p => p.ariaLabel)") == [
        "left plan",
        "right plan",
    ]
    choose(chromium, 1, "balanced", "groupcast")
    chromium.run(
        "document.querySelectorAll('.exchange')[1].open = true; return new Promise(done => setTimeout(done, 100))"
    )
    rows = chromium.run("return [...document.querySelectorAll('.messages')[1].rows].map(r => r.innerText.split('\\t'))")
    matrix = exchange_matrix(plan_stages(REQUEST.make_plan(REQUEST.make_layout("balanced"), "groupcast")))
    assert rows[0] == ["from rank", "to rank", "bytes"]
    assert [[ints(cell)[0] for cell in row] for row in rows[1:]] == [
        [a, b, matrix[a, b]] for a in range(4) for b in range(4) if matrix[a, b]
    ]
    assert chromium.run("return [...document.querySelectorAll('th')].filter(cell => cell.scope !== 'col').length") == 0
    live = "return document.querySelectorAll('[aria-live]').length"
    chromium.hover(".map", 0.05, 0.4)
    assert chromium.run(live) == 0
    chromium.run("const t = document.querySelector('#token'); t.value = 5; t.dispatchEvent(new Event('input'))")
    assert chromium.run(live) == 2
    for hides in (
        "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))",
        "document.querySelector('h1').dispatchEvent(new Event('pointerdown', {bubbles: true}))",
    ):
        chromium.hover(".holds", 0.3, 0.3)  # elsewhere, and then to a place that is scrolled to: scrolling hides it
        chromium.hover(".map", 0.05, 0.4)
        chromium.run("return new Promise(done => setTimeout(done, 100))")
        chromium.hover(".map", 0.06, 0.4)
        shown = "return document.querySelector('.tip').style.display"
        assert chromium.run(shown) == "block"
        chromium.run(hides)
        assert chromium.run(shown) == "none"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["small", "large", "empty"])
def test_pages_fit_a_phone(name: str, dark: bool, pages: dict[str, Path], chromium: browser.Browser) -> None:
    chromium.resize(375, 800, dark=dark)
    chromium.open(pages[name])
    assert chromium.run("return document.documentElement.scrollWidth") == 375
    colour = chromium.run("return getComputedStyle(document.body).backgroundColor")
    assert colour == ("rgb(16, 19, 23)" if dark else "rgb(255, 255, 255)")
    for example in range(len(chromium.texts("#examples button"))):
        chromium.click("#examples button", example)
        assert chromium.run("return document.documentElement.scrollWidth") == 375
    chromium.click("#longest")
    chromium.click("#zoom-in")
    chromium.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert chromium.problems() == []
    if name == "large":
        assert json.loads(chromium.run("return JSON.stringify(page.area)"))["q1"] < 1000


def test_the_pictures_show_ranks(pages: dict[str, Path], chromium: browser.Browser) -> None:
    """Pixels of the square have the colour of the rank that computes the pair; others are empty."""
    chromium.resize(1280, 900)
    chromium.open(pages["small"])
    layout, total = REQUEST.make_layout("contiguous"), REQUEST.mask.total
    dense = REQUEST.mask.dense()
    seen = 0
    for q, k in ((100, 20), (300, 100), (20, 300), (500, 450), (700, 600), (600, 100)):
        red, green, blue, alpha = chromium.run(
            "const c = document.querySelector('.map'), s = c.width / arguments[2], pen = c.getContext('2d');"
            "const [y, x] = [arguments[0], arguments[1]].map(token => Math.floor((token + .5) * s));"
            "return [...pen.getImageData(x, y, 1, 1).data]",
            q,
            k,
            total,
        )
        if dense[q, k]:
            seen += 1
            wanted = chromium.run("return rankColours(4)[arguments[0]]", layout.owner(q))
            assert max(abs(a - b) for a, b in zip((red, green, blue), wanted, strict=True)) <= 3
        else:
            assert alpha == 0
    assert seen >= 3
