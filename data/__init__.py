"""From text to batches of token ids.

settings      what can be set
recipe        settings → what each text of a run is made of, and the folder of its tokens
sources/      a module for each kind of text: parquet, JSON Lines, plain text, the Hugging Face Hub
tokenizers    text → token ids
prepare       a text → shards of ids on disk (`python -m data.prepare`), by workers
corpus        opens what is prepared; prepares small texts on first use
tokens        the shards as one array of ids
mixture       which source each sequence comes from
loader        which sequences make up step n, on which rank, in which order
"""

# Every command imports this package first, and it imports nothing: what is missing is said in one line.
import sys
from pathlib import Path

_FIX = f"not installed for {sys.executable}; activate an environment (. .venv/bin/activate), or see README.md"
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(f"Python 3.10 or newer: {_FIX}")


def _excepthook(kind, error, trace, previous=sys.excepthook):
    name = getattr(error, "name", None)
    own = Path(__file__).parents[1] / str(name).partition(".")[0]
    if kind is ModuleNotFoundError and name and not own.exists():
        print(f"{error}: {_FIX}", file=sys.stderr)
    else:
        previous(kind, error, trace)


sys.excepthook = _excepthook
