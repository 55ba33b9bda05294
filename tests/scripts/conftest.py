"""Settings as train.py sees them, runs in this process, and inputs for attention."""

from tests.sagebwd.conftest import draw, exact, one_thread
from tests.trainer.conftest import compose_settings, train_here

__all__ = ["compose_settings", "draw", "exact", "one_thread", "train_here"]
