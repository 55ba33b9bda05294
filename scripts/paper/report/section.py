"""What one experiment contributes to the report."""

from __future__ import annotations

from dataclasses import dataclass, field

from scripts.paper.report.verdicts import Verdict, joined


@dataclass(frozen=True)
class Section:
    """
    setting: hardware and shapes, a phrase.
    tables: {caption: table}; they go to tables/NAME.md.
    verdicts: on the paper's claims.
    fields: {name: text}; what the template may ask for as {{NAME.field}}: numbers and short tables.
    """

    setting: str
    tables: dict[str, str]
    verdicts: list[Verdict] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)

    def all_fields(self) -> dict[str, str]:
        """The fields, the setting, and of each claim the answer (verdict.CLAIM) and its numbers."""
        claims = dict.fromkeys(verdict.claim for verdict in self.verdicts)
        answers = {
            f"verdict.{claim}": joined([own for own in self.verdicts if own.claim == claim])
            for claim in claims
        }
        numbers = {
            f"numbers.{claim}": "; ".join(own.numbers for own in self.verdicts if own.claim == claim)
            for claim in claims
        }
        return {"setting": self.setting, **answers, **numbers, **self.fields}
