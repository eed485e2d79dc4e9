"""`make docs`: the site builds without a warning and without a network, has every public name, and loads nothing from
other hosts.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import longweave as lw

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SYMPTOMS = ("The loss is P times too large", "It hangs at the first step", "It recompiles each batch")
# Whatever a page loads by itself; what a reader may click is not.
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not all(find_spec(name) for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("mkdocs is not installed; `make` installs it, pip does with longweave[docs]")
    out = tmp_path_factory.mktemp("site")
    # Without -q, which would hide warnings from --strict, too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(out)]
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env={**os.environ, **nowhere}, cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return out


def test_every_page_is_there_and_loads_nothing_from_outside(site: Path) -> None:
    pages = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")} - {"404.md"}
    assert pages == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    for page in site.rglob("*.html"):
        assert not LOADED.findall(page.read_text()), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text()), sheet


def test_the_reference_has_every_public_function(site: Path) -> None:
    """By its name alone: no heading shows a module inside longweave, which nobody is to import from."""
    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    found = re.findall(r'<h2 id="(longweave[\w.]+)".*?<span class="doc doc-object-name[^>]*>(.*?)</span>', text, re.S)
    headings = {heading for _, heading in found}
    assert headings == {path.rpartition(".")[2] for path, _ in found}
    named = set(lw.__all__) - {"Slice", "Span", "plan", "models"}  # tuples of ints, and packages
    assert named <= headings, named - headings
    assert {"register", "Ranks"} <= headings


def test_pages_of_trainers_and_symptoms() -> None:
    assert len(list((DOCS / "trainers").glob("*.md"))) >= 6
    text = (DOCS / "troubleshooting.md").read_text()
    for symptom in SYMPTOMS:
        assert f"## {symptom}" in text


def test_every_cell_about_others_has_a_source() -> None:
    """In docs/comparison.md; the README has the same table without them."""
    text = (DOCS / "comparison.md").read_text()
    sources = set(re.findall(r"^(\w+)\. ", text, re.M))
    rows = [line for line in text.splitlines() if re.match(r"\| [a-zA-ZK]", line)]
    assert len(rows) == 10 + 5
    readme = (ROOT / "README.md").read_text()
    for row in rows:
        name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        others = cells[:-1] if re.search(r"\[[a-e]\]", row) else cells[1:]
        for cell in others:
            found = re.findall(r"\[(\w+)\]$", cell)
            assert cell in ("—", "not checked") or set(found) & sources, f"{name}: {cell}"
            if found and found[0].isdigit():
                assert re.sub(r" \[\w+\]", "", cell) in readme, f"{name}: {cell}"
