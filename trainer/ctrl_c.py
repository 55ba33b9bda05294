"""Ctrl-C where nothing handles it, such as while train.py imports what it needs."""

import sys
from types import TracebackType


def hide_traceback() -> None:
    """From now on, an unhandled Ctrl-C prints no traceback. Python then ends as by SIGINT: 130 in a shell."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            previous(kind, error, traceback)

    sys.excepthook = hook
