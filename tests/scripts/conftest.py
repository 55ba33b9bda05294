"""Settings as train.py sees them, and runs in this process."""

from tests.trainer.conftest import compose_settings, train_here

__all__ = ["compose_settings", "train_here"]
