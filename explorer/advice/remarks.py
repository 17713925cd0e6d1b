"""What is said to the person: a sentence with an id, how much it matters, and the key it is about. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from explorer.dsconfig.findings import Finding

Severity = Literal["cause", "problem", "hint", "note"]
SEVERITIES: tuple[Severity, ...] = ("cause", "problem", "hint", "note")


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """One sentence or two. "cause": why memory runs out; "problem": what stops the job or is misunderstood; "hint": what it implies; "note": good to know."""

    id: str
    severity: Severity
    key: str
    text: str

    def to_json(self) -> dict[str, str]:
        """As in `check`'s answer (docs/contract.md)."""
        return {"id": self.id, "severity": self.severity, "key": self.key, "text": self.text}


def of_findings(findings: Iterable[Finding], severity: Severity) -> list[Remark]:
    """What dsconfig found, in this form."""
    return [Remark(id=f.id, severity=severity, key=f.key, text=f"{f.key} {f.text}".strip()) for f in findings]
