"""Runs in this process, as the tests of the trainer have them."""

from tests.trainer.conftest import compose_settings, train_here  # noqa: F401
