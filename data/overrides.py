"""Settings as words of a command line."""

import re
from typing import Any

# Hydra reads these as they stand, as text: numbers begin with a digit, sign or dot. Other text needs quotes.
PLAIN = re.compile(r"(\.{0,2}/)?[A-Za-z_/]([A-Za-z0-9_./*%@?-]*[A-Za-z0-9_/*])?")
KEYWORDS = {"true", "false", "null", "nan", "inf"}


def override(name: str, value: Any) -> str:
    """`name=value` such that Hydra reads this value, and not several, another type or an interpolation.

    To show it as part of a command, quote it for the shell, too: `shlex.join`.
    """
    if value is None:
        return f"{name}=null"
    if isinstance(value, bool | int | float):
        return f"{name}={str(value).lower()}"
    text = str(value)
    plain = PLAIN.fullmatch(text) and text.lower() not in KEYWORDS
    return f"{name}={text if plain else _quoted(text)}"


def _quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString  # here: tokenizing needs no Hydra

    # OmegaConf's escape of ${…}: a backslash, and two for each that stands before it.
    text = re.sub(r"(\\*)\$\{", lambda found: rf"{found[1] * 2}\${{", text)
    return QuotedString(text, Quote.single).with_quotes()
