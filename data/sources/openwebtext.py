"""OpenWebText, the paper's text: the dataset of the Hub that configs/data/openwebtext.yaml pins."""

from pathlib import Path

from data.settings import DataSettings
from data.sources import Source, Unit, huggingface

FILES = 80  # tokens are found by this number, before the Hub is asked


def units(files: list[Path], settings: DataSettings, split: str | None = None) -> list[Unit]:
    """A unit for each file. Raises ValueError if there are more or fewer."""
    found = huggingface.units(files, settings, split)
    if len(found) != FILES:
        raise ValueError(
            f"{settings.name} has {len(found)} files instead of {FILES}; give the revision of "
            "configs/data/openwebtext.yaml, or use data=huggingface for another"
        )
    return found


SOURCE = Source(units, settings=("name", "config", "revision", "column"))
