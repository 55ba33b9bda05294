"""The report's templates: text written by hand, with {{NAME.FIELD}} for what is generated."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: {what is made: its template}, files of a folder of results.
NAMES = {"README.md": "report.template.md", "SUMMARY.md": "summary.template.md"}
NAME = NAMES["README.md"]

#: For a folder that has none, such as that of somebody else's runs.
WITHOUT_WORDS = """\
# Results

{{verdicts}}

{{count}}.

{{experiments}}
"""

PLACEHOLDER = re.compile(r"\{\{\s*([\w.-]+)\s*\}\}")


class UnknownField(ValueError):
    """The template asks for something that nothing gives."""


def fill(template: str, fields: Mapping[str, str], absent: Mapping[str, str]) -> str:
    """The template with every placeholder replaced.

    fields: by what stands between the braces. absent: {name: what stands for all its fields} of experiments
    that were not run. Raises UnknownField.
    """

    def value(match: re.Match) -> str:
        key = match[1]
        name = key.split(".")[0]
        if key in fields:
            return fields[key]
        if name in absent:
            return absent[name]
        near = sorted(known for known in fields if known.split(".")[0] == name)
        raise UnknownField(
            f"the template asks for {{{{{key}}}}}, which is not known; use one of "
            f"{', '.join(near or sorted(fields))}"
        )

    return PLACEHOLDER.sub(value, template)
