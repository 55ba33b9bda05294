"""Printing where nobody may read any more: the other end of a pipe has ended, or a terminal is closed."""

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: What writing raises when nobody reads: a closed pipe, a closed terminal, a closed connection.
UNREAD = (errno.EPIPE, errno.EIO, errno.ECONNRESET)

log = logging.getLogger(__name__)


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
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        """Print to nowhere from now on. Raises the error if it is another one, such as a full disk."""
        if error.errno not in UNREAD:
            raise error
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
