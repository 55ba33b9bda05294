"""Printing where nobody may read any more: the other end of a pipe has ended, or a terminal is closed."""

import os
import sys


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
