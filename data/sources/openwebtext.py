"""OpenWebText, the paper's text: the dataset of the Hub that configs/data/openwebtext.yaml pins."""

from data.sources import Source, huggingface

SOURCE = Source(huggingface.units, settings=("name", "config", "revision", "column"))
