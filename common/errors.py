"""Errors that a user can fix, shown without a traceback. Imports nothing that has to be installed."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIX = f"not installed for {sys.executable}; activate an environment (. .venv/bin/activate), or see README.md"


class TrainingError(Exception):
    """Something the user can fix; the message names what is wrong, its value and the fix."""


class SettingsError(TrainingError):
    """The settings are wrong or contradict each other; raised before any data, model or compilation."""


class LostRanks(TrainingError):
    """Other ranks of the run died or do not answer; they or their launcher report why."""


class Interrupted(Exception):
    """The run was asked to stop by `signal` (its number) and has saved its state."""

    def __init__(self, message: str, signal: int):
        super().__init__(message, signal)  # both in args, so that it survives pickling between processes
        self.message, self.signal = message, signal

    def __str__(self) -> str:
        return self.message


@contextmanager
def user_facing(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of the given kinds, raised with a message meant for the user, into TrainingError."""
    try:
        yield
    except kinds as error:
        raise TrainingError(str(error)) from error


@contextmanager
def ends_with_message() -> Iterator[None]:
    """End the command, whose `main` this decorates, by the message of an error that its user can fix."""
    try:
        yield
    except (ValueError, TrainingError) as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(explain(error))


def explain(error: OSError) -> str:
    """What the operating system refused, and which file, in plain words."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno == errno.ENOSPC:
        reason = "the disk is full"
    return f"{reason}: {error.filename}" if error.filename else reason


def first(items: Sequence[Any]) -> str:
    """The items for a message, six at most."""
    return ", ".join(map(str, items[:6])) + (", …" if len(items) > 6 else "")


def hide_tracebacks() -> None:
    """From now on a missing package takes one line, and a Ctrl-C that nothing handles none.

    For a command, before its other imports: they take seconds, or fail. Ends it if Python is too old. After a
    Ctrl-C Python ends as by SIGINT, 130 in a shell.
    """
    if sys.version_info < (3, 10):  # noqa: UP036
        version = sys.version.partition(" ")[0]
        sys.exit(f"Python 3.10 or newer is needed, {sys.executable} is {version}; see README.md")
    previous = sys.excepthook

    def excepthook(kind, error, trace):
        if kind is ModuleNotFoundError and error.name and not (ROOT / error.name.partition(".")[0]).exists():
            print(f"{error}: {FIX}", file=sys.stderr)
        elif not issubclass(kind, KeyboardInterrupt):
            previous(kind, error, trace)

    sys.excepthook = excepthook
