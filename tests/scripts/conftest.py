"""Settings as train.py sees them, runs in this process, and inputs for attention."""

import shutil

import pytest

from tests.sagebwd.conftest import draw
from tests.trainer.conftest import compose_settings, train_here

__all__ = ["compose_settings", "draw", "train_here"]


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Where `trained` was trained: its text, in book.txt and val.txt, has a byte a token and no spaces."""
    folder = tmp_path_factory.mktemp("trained")
    for name, nights in (("book", range(900)), ("val", range(900, 930))):
        (folder / f"{name}.txt").write_text("".join(f"{i}_dark_and_stormy_nights;" for i in nights))
    return folder


@pytest.fixture
def trained(train_here, place, tmp_path):
    """A copy of a finished run in full precision, of four steps with a checkpoint and a validation at two."""
    if not (place / "run").exists():
        texts = (f"data.path={place / 'book.txt'}", f"data.val_path={place / 'val.txt'}")
        own = ("data=text", *texts, f"data.root={place / 'tokens'}", "data.tokenizer=bytes")
        few = ("steps=4", "checkpoint_every=2", "eval_every=2", "eval_sequences=8", "hardware.dtype=float32")
        train_here(place / "run", *own, *few)
    return shutil.copytree(place / "run", tmp_path / "run")
