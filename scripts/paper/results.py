"""Reading a folder of results: JSON files, and copies of run directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from trainer.plot import series
from trainer.run_directory import RunDirectory, read_metrics


class DamagedResult(ValueError):
    """A file of the results cannot be used; the message names it and says what to do."""


class Results:
    """The files below `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def has(self, *names: str) -> bool:
        return all((self.folder / name).exists() for name in names)

    def json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file. Raises DamagedResult if it holds no JSON object."""
        path = self.folder / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DamagedResult(f"{path} is damaged ({error}); {MEND}") from error
        if not isinstance(content, dict):
            raise DamagedResult(f"{path} holds a {type(content).__name__}, not an object; {MEND}")
        return content

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The records of a metrics.jsonl. Raises DamagedResult."""
        path = self.folder / name
        try:
            return read_metrics(path)
        except ValueError as error:
            raise DamagedResult(f"{path} is damaged ({error}); {MEND}") from error

    def run(self, name: str) -> list[dict[str, Any]]:
        """The metrics of the copied run directory `name`."""
        return self.metrics(str(RunDirectory(Path(name)).metrics))

    def environment(self, name: str) -> dict[str, Any]:
        """What the first start of the copied run directory `name` ran on."""
        return self.metrics(f"{name}/environment.jsonl")[0]


MEND = "restore it (git checkout), or delete it and run its command again"


def final_loss(records: list[dict[str, Any]], steps: int | None = None) -> float:
    """Mean training loss of the last `steps` logged steps; None: of the last tenth."""
    losses = series(records, "loss")[1]
    return float(losses[-(steps or max(len(losses) // 10, 1)) :].mean())


def held_out_loss(records: list[dict[str, Any]]) -> float | None:
    """The last held-out loss; None if there was no evaluation."""
    losses = series(records, "val_loss")[1]
    return float(losses[-1]) if len(losses) else None


def speed(records: list[dict[str, Any]]) -> float:
    """Median of the tokens per second."""
    return float(np.median(series(records, "tokens_per_second")[1]))
