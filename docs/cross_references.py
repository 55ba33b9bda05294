"""Docstrings for the site: reStructuredText roles become code, as Markdown knows none.

Sphinx and editors read ``:class:`SageConfig` ``; mkdocstrings would print the role.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`[~.]?([^`]+)`")


class CrossReferences(griffe.Extension):
    """Replaces each role in a docstring by the name it refers to, in code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
