"""What an audit found: rows with a verdict each, of which faults say where they are and what the likely cause is.

ok         looked at and right
FAULT      wrong, and the root of it as far as can be told: `report.faults`
follows    wrong, but so would a step be that has the faults found before; look again when those are mended
skipped    could not be looked at; says why
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

import longweave
from longweave.errors import LongweaveError

OK, FAULT, FOLLOWS, SKIPPED = "ok", "FAULT", "follows", "skipped"
WIDTH = 118  # of a printed report


class AuditError(LongweaveError, AssertionError):
    """The audited step has faults."""


@dataclass(frozen=True)
class AuditFinding:
    """One row."""

    check: str  # what was looked at
    verdict: str
    figure: str  # what was seen
    fault: str = ""  # its short name, such as "documents"
    where: str = ""  # parameters, modules, tokens or ranks
    cause: str = ""  # the likely one

    def __str__(self) -> str:
        if self.verdict != FAULT:
            return f"{self.check}: {self.verdict}; {self.figure}"
        return f"{self.fault}: {self.figure}. Where: {self.where}. Likely cause: {self.cause}"


def right(check: str, figure: str) -> AuditFinding:
    return AuditFinding(check, OK, figure)


def skipped(check: str, why: str) -> AuditFinding:
    return AuditFinding(check, SKIPPED, why)


def faulty(check: str, fault: str, figure: str, where: str, cause: str) -> AuditFinding:
    return AuditFinding(check, FAULT, figure, fault, where, cause)


def follows(check: str, figure: str, roots: list[str]) -> AuditFinding:
    return AuditFinding(check, FOLLOWS, f"{figure}, as it would with: {', '.join(roots)}")


@dataclass(frozen=True)
class AuditReport:
    """The same on every rank. `print(report)` shows it; `report.raise_if_faulty()` for tests and scripts."""

    ranks: int
    tokens: int
    documents: int
    findings: tuple[AuditFinding, ...]
    seconds: float

    @property
    def faults(self) -> list[AuditFinding]:
        return [finding for finding in self.findings if finding.verdict == FAULT]

    @property
    def ok(self) -> bool:
        """Nothing that was looked at is wrong, and something was."""
        found = {finding.verdict for finding in self.findings}
        return OK in found and not found & {FAULT, FOLLOWS}

    def raise_if_faulty(self) -> None:
        """Raise `AuditError`, a LongweaveError, that names the faults."""
        if not self.ok:
            found = "\n".join(f"- {fault}" for fault in self.faults) or "- nothing could be looked at"
            raise AuditError(f"the audited step has {len(self.faults)} faults:\n{found}")

    def summary(self) -> str:
        counts = {
            verdict: sum(f.verdict == verdict for f in self.findings) for verdict in (OK, FAULT, FOLLOWS, SKIPPED)
        }
        text = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        missing = [f.check for f in self.findings if f.verdict == SKIPPED and f.check in ("loss", "gradients")]
        verdict = f"right, but {' and '.join(missing)} not looked at" if missing else "right"
        return f"{verdict if self.ok else 'FAULTY'}: {text} in {self.seconds:.1f} s"

    def headline(self) -> str:
        return f"{self.tokens} tokens in {self.documents} documents on {self.ranks} ranks"

    def __str__(self) -> str:
        lines = [f"audit of {self.headline()}"]
        for finding in self.findings:
            lines += _folded(f"{finding.verdict:8s}{finding.check:17s}", finding.figure)
            for title, text in (("where", finding.where), ("cause", finding.cause)):
                if text:
                    lines += _folded(f"{'':25s}{title}: ", text)
        return "\n".join([*lines, self.summary()])

    def as_json(self) -> str:
        head: dict[str, Any] = {
            "longweave": longweave.__version__,
            "ok": self.ok,
            "ranks": self.ranks,
            "tokens": self.tokens,
            "documents": self.documents,
            "seconds": round(self.seconds, 2),
        }
        return json.dumps({**head, "findings": [asdict(finding) for finding in self.findings]}, indent=1)


def _folded(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head.rstrip()]
