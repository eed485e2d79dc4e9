"""What `longweave plan` prints and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from longweave.errors import InputError
from longweave.tools import charts
from longweave.tools.draw import draw_layout
from longweave.tools.planning import PlanRequest
from longweave.tools.planning.lengths import parse_lengths, read_lengths
from longweave.tools.planning.page import check_page_ranks, make_page
from longweave.tools.terminal import check_writable

BESIDE = 26  # columns that the layout needs beside its drawing


def given_lengths(words: Sequence[str] | None, path: Path | None) -> tuple[int, ...]:
    """Lengths that were typed, or those of a file."""
    for word in words or ():
        if word.startswith("--"):
            raise InputError(f"there is no option {word}; see longweave plan --help")
    if words and path is not None:
        raise InputError("lengths and a --lengths-file were given; give one of them")
    if path is not None:
        return tuple(read_lengths(path))
    if not words:
        raise InputError("Missing argument 'LENGTHS...'; give document lengths, or a --lengths-file")
    return tuple(parse_lengths(words))


def outputs(
    request: PlanRequest, picture: Path | None, html: Path | None, width: int, tell: Callable[[str], None]
) -> Iterator[str]:
    """What to print, as it comes, for a terminal of `width` columns; files are written on the way."""
    _check_files(request, picture, html)
    plan = request.plan
    yield draw_layout(plan.layout, plan.mask.cu_seqlens, width=min(80, max(width - BESIDE, 10)))
    yield f"\n{plan.report()}"
    if request.node_size is not None:
        yield request.across_nodes()
    if picture is not None:
        from longweave.tools.planning.picture import draw_plan

        yield _written("--picture", picture, lambda: draw_plan(plan, picture, request.node_size))
    if html is not None:
        page = make_page(request, tell)
        yield _written("--html", html, lambda: html.write_text(page, encoding="utf-8"))


def _written(option: str, path: Path, write: Callable[[], object]) -> str:
    """Says what was written. A disk may be full, though the file could be made."""
    try:
        write()
    except OSError as error:
        raise InputError(f"{option} {path} cannot be written: {error.strerror}; give another file") from error
    return f"wrote {path}"


def _check_files(request: PlanRequest, picture: Path | None, html: Path | None) -> None:
    """Refuse what cannot be written before anything is planned."""
    for option, path in (("--picture", picture), ("--html", html)):
        if path is not None and path.name.startswith("--"):
            raise InputError(f"{option} is followed by {path}, another option; give it a file")
    if picture is not None:
        charts.prepare(picture)
    if html is not None:
        check_page_ranks(request.ranks)
        check_writable(html)
