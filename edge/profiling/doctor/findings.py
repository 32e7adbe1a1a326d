"""Findings of checks: state, severity and advice. Every check has a deadline."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quant.text import printable

OK, NOTE, PROBLEM = "ok", "note", "problem"
LOCAL = "local"  # value of `where` for this device


class Verdict(NamedTuple):
    """Result of one check."""

    level: str  # OK; NOTE: works, but could be better; PROBLEM: something will fail
    seen: str  # observed state
    advice: str = ""  # recommended action; empty if none is needed


Check = Callable[[], Verdict]


@dataclass(frozen=True)
class Finding:
    """Verdict of a check on a device or a link."""

    where: str  # LOCAL, a worker's name, or "A to B"
    check: str  # check name as in docs/doctor.md
    level: str
    seen: str
    advice: str


@dataclass(frozen=True)
class Report:
    """All findings, in the order of the checks."""

    findings: Sequence[Finding]

    def count(self, level: str) -> int:
        """Return the number of findings of this level."""
        return sum(finding.level == level for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that docs/doctor.md describes."""
        counts = {"problems": self.count(PROBLEM), "notes": self.count(NOTE)}
        return {**counts, "findings": [dataclasses.asdict(finding) for finding in self.findings]}


def finding(where: str, check: str, verdict: Verdict) -> Finding:
    """Return a verdict with its place. Texts of other machines are made printable."""
    return Finding(printable(where), check, verdict.level, printable(verdict.seen), printable(verdict.advice))


def run_check(where: str, name: str, check: Check, timeout_s: float) -> Finding:
    """Run a check and return its finding. A failed check, or one slower than `timeout_s`, becomes a problem finding."""
    verdicts: list[Verdict] = []

    def run() -> None:
        try:
            verdicts.append(check())
        except Exception as error:
            why = f"could not be checked: {error or type(error).__name__}"
            verdicts.append(Verdict(PROBLEM, why, "mend what it names, and run edge doctor again"))

    # Use a daemon thread, so that a hanging file system does not keep the command from ending.
    thread = threading.Thread(target=run, daemon=True, name=f"check {name}")
    thread.start()
    thread.join(timeout_s)
    late = Verdict(PROBLEM, f"no answer within {timeout_s:g} s", "look for a disk or a network that hangs")
    return finding(where, name, verdicts[0] if verdicts else late)
