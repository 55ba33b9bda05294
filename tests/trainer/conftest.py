"""Settings composed by Hydra from configs/, as train.py does."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from trainer import settings

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def compose_settings():
    """compose_settings("tps=260k", …) -> Settings, as `python train.py tps=260k …` would see them."""
    settings.register()

    def composed(*overrides):
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return OmegaConf.to_object(compose("train", overrides=list(overrides)))

    return composed
