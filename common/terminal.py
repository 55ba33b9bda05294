"""Options of commands: a parser whose help teaches, and types of values."""

from __future__ import annotations

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


def choose_device(asked: str | None, parser: ArgumentParser) -> str:
    """The device asked for; by default a GPU if there is one. Ends the command if that GPU is missing."""
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            f"--device {device}: torch sees no GPU; run this where there is one, or use --device cpu"
        )
    return device
