"""How a diagnosis is shown: a table on a terminal, lines elsewhere, a JSON file that is complete after every check."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from longweave.tools.doctor import CHECKS, Diagnosis, Finding, diagnose
from longweave.tools.doctor.checks import ABSENT, FAIL, OK, SKIPPED, Check

COLOURS = {OK: "green", FAIL: "bold red", ABSENT: "yellow", SKIPPED: "yellow"}


def run_and_show(
    console: Console, status: Status, asked_for: str, ranks: int | None, family: str, file: Path | None
) -> Diagnosis:
    """Run all checks and show what they find; under torchrun on rank 0 only."""
    quiet = os.environ.get("RANK", "0") != "0"
    seen: list[Check] = []

    def begin(diagnosis: Diagnosis, check: Check) -> None:
        if quiet:
            return
        if not seen:
            console.print(diagnosis.headline())
        seen.append(check)
        failed = f", {len(diagnosis.failed)} failed" if diagnosis.failed else ""
        status.update(f"{len(seen)} of {len(CHECKS)}{failed}: {check.name} ({check.proves})")

    def end(diagnosis: Diagnosis, findings: list[Finding]) -> None:
        if quiet:
            return
        if not console.is_terminal:
            for finding in findings:
                print(line(finding), flush=True)
        if file is not None:
            file.write_text(diagnosis.as_json() + "\n")

    found = diagnose(asked_for, ranks, family, CHECKS, begin=begin, end=end)
    status.stop()
    if not quiet:
        _conclude(console, found, file)
    return found


def line(finding: Finding) -> str:
    what = f"{finding.check.name}: {finding.name}"
    return f"{finding.verdict:8s}{what:50s} {finding.seconds:6.2f} s  {finding.figure}"


def table(diagnosis: Diagnosis) -> Table:
    made = Table(caption=diagnosis.summary())
    for column in ("check", "what", "verdict", "found", "s"):
        made.add_column(column, justify="right" if column == "s" else "left")
    before = None
    for finding in diagnosis.findings:
        first = finding.check is not before
        if first and before is not None:
            made.add_section()
        before = finding.check
        verdict = f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]"
        texts = (finding.check.name if first else "", escape(finding.name), verdict, escape(finding.figure))
        made.add_row(*texts, f"{finding.seconds:.1f}")
    return made


def _conclude(console: Console, found: Diagnosis, file: Path | None) -> None:
    if console.is_terminal:
        console.print(table(found))
    else:
        print(found.summary())
    if file is not None:
        print(f"wrote {file}: attach it to a report")
    elif found.failed:
        print("run it again with --json longweave-doctor.json, and attach the file to a report")
