"""Options of commands: a parser whose help teaches, and types of values."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter

import torch


def command_parser(program: str, description: str | None, examples: str | None = None) -> ArgumentParser:
    """A parser whose help shows the module's docstring and the examples as they are."""
    return ArgumentParser(
        prog=program,
        description=description,
        epilog=examples,
        formatter_class=RawDescriptionHelpFormatter,
    )


def positive_int(text: str) -> int:
    """A type for options. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def add_device_option(parser: ArgumentParser) -> None:
    """--device: where to compute; by default a GPU if there is one."""
    text = "cuda: the kernels; cpu: the reference (default: cuda if available)"
    parser.add_argument("--device", type=available_device, default="", help=text)


def available_device(text: str) -> str:
    """A type for options; "": a GPU if there is one. Raises ArgumentTypeError if that GPU is missing."""
    chosen = text or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", chosen):
        raise ArgumentTypeError(f"{chosen}; use cuda, cuda:<number> or cpu")
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise ArgumentTypeError(
            f"{chosen}: torch sees no GPU; run this where there is one, or use --device cpu"
        )
    return chosen
