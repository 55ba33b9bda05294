"""Types of command-line arguments, and where commands write unless they are told otherwise."""

from __future__ import annotations

import argparse
from pathlib import Path

#: Commands write below this folder by default, never into results/.
OUT = Path("runs/paper")


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)
