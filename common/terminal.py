"""The terminal: options of commands, whose help teaches, and printing where nobody reads any more."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

log = logging.getLogger(__name__)

#: What writing raises when nobody reads: a closed pipe, a closed terminal, a closed connection.
UNREAD = (errno.EPIPE, errno.EIO, errno.ECONNRESET)


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


# ---------------------------------------------------------------------- printing where nobody reads


@contextmanager
def surviving_closed() -> Iterator[None]:
    """Within this context, printing goes on when stdout or stderr is closed at its other end.

    What is printed from then on is discarded, which is logged once.
    """
    before = sys.stdout, sys.stderr
    replaced = [stream and _Surviving(stream) for stream in before]  # None stays: there is no such stream
    sys.stdout, sys.stderr = replaced
    try:
        yield
    finally:
        for stream in filter(None, replaced):
            with suppress(OSError):
                stream.flush()  # what is left would fail at the end of the process, and change its exit code
        sys.stdout, sys.stderr = before


class _Surviving:
    """A text stream, in whose place `write` and `flush` do not fail when nobody reads any more."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._unless_closed(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._unless_closed(self._stream.flush)

    def _unless_closed(self, call: Callable[..., Any], *arguments: str) -> None:
        """Print to nowhere from now on if it is closed. Raises other errors, such as that of a full disk."""
        try:
            call(*arguments)
        except OSError as error:
            if error.errno not in UNREAD:
                raise
            discard(self._stream.fileno())
            log.warning(
                "nobody reads %s any more (%s); the run goes on without it", self._stream.name, error.strerror
            )


def say(text: str) -> None:
    """Print a line to stderr, or to nowhere if that cannot be written.

    For last words: neither the line nor what is left in the buffer may change how the process ends.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(2)


def discard(descriptor: int) -> None:
    """Discard what is written to this file descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
