"""How a command ends where a traceback helps nobody. Imports nothing that has to be installed."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIX = f"not installed for {sys.executable}; activate an environment (. .venv/bin/activate), or see README.md"


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
