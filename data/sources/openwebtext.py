"""OpenWebText, the paper's text: the dataset of the Hub that data.settings.PRESETS pins."""

from data.sources import Source, huggingface

SOURCE = Source(huggingface.units, settings=("name", "config", "revision", "column"))
