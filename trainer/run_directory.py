"""What a run leaves on disk: settings, environment, metrics, checkpoints, weights, and DONE or DIVERGED."""

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from omegaconf import OmegaConf

from data.files import write_text
from model import backends
from trainer.errors import TrainingError
from trainer.redaction import redact
from trainer.settings import Settings

# Settings that may differ when a run resumes: they change how it executes or reports, not what it computes.
# (Text may have moved; whether it is the same text is checked against the checkpoint.)
MAY_CHANGE = re.compile(
    r"hardware\.(?!dtype)|logger\.|probe\.|spike\.|data\.(root|path|val_path|processes)|"
    r"(log_every|eval_every|eval_sequences|sample_tokens|sample_prompt|checkpoint_every|"
    r"checkpoint_background|keep_checkpoints|milestone_every|skip_nonfinite|runs_dir|run_dir|rerun_finished)$"
)

# Overrides that say where things are, not what the run computes.
UNNAMED = ("run_dir=", "runs_dir=", "rerun_finished=", "data.root=", "data.processes=", "logger=", "logger.")


def default_name(overrides: list[str]) -> str:
    """A readable folder name for a run with these command-line overrides, which no others share."""
    kept = sorted(text for text in overrides if not text.startswith(UNNAMED))
    if not kept:
        return "default"
    exact = "+".join(kept)
    name = re.sub(r"[^\w.+-]", "-", exact.replace("=", "-"))
    if name != exact.replace("=", "-") or len(name) > 120:
        return f"{name[:110]}-{crc32(exact.encode()):08x}"  # something was replaced or cut off
    return name


class RunDirectory:
    """The folder of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.spikes = path / "spikes.jsonl"
        self.config = path / "config.yaml"
        self.loss_plot = path / "loss.png"
        self.probe_plot = path / "probe.png"
        self.weights = path / "weights"
        self.traces = path / "traces"  # of its attention: python -m scripts.paper.layers --traces
        self._done = path / "DONE"
        self._diverged = path / "DIVERGED"

    @property
    def is_finished(self) -> bool:
        return self._done.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and lock it against a second process that trains the same run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(
                f"cannot create the run directory {self.path}: {error.strerror}; set run_dir=…"
            ) from error
        with open(self.path / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainingError(
                    f"{self.path} is in use by another process that trains this run; wait for it, or give "
                    "this one another run_dir=…"
                ) from None
            yield

    def open(self, settings: Settings) -> None:
        """Store the settings. Raises TrainingError if the folder's checkpoints are of a run with others."""
        if settings.rerun_finished and self.is_finished:
            self._clear()
        current = OmegaConf.to_container(OmegaConf.structured(settings))
        current["attention"] = backends.resolve(settings.attention)
        current = redact(current)
        if self.config.exists() and any(self.checkpoints.glob("step_*")):
            changed = _differences(OmegaConf.to_container(OmegaConf.load(self.config)), current)
            if changed:
                raise TrainingError(
                    f"{self.path} holds a run with other settings:\n"
                    + "\n".join(f"  - {key} was {old}, is now {new}" for key, old, new in changed)
                    + "\nGive the changed run its own run_dir=…, or delete that folder to start over"
                )
        self._diverged.unlink(missing_ok=True)
        write_text(self.config, OmegaConf.to_yaml(OmegaConf.create(current)))

    def note_environment(self, device: torch.device, devices: int) -> None:
        """Add what this process runs on to environment.jsonl: a line for every start of the run."""
        line = {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": redact(sys.argv),
            "commit": find_commit(),
            "device": _device_name(device),
            "devices": devices,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
        with open(self.path / "environment.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self) -> None:
        write_text(self._done, "")

    def note_divergence(self, step: int) -> None:
        """Mark the run as ended by `step`, whose loss or gradient is not finite."""
        write_text(self._diverged, f"{step}\n")

    def diverged_at(self) -> int | None:
        """The step that ended the run because it was not finite, or None; `open` forgets it."""
        return int(self._diverged.read_text()) if self._diverged.exists() else None

    def truncate_metrics(self, step: int) -> None:
        """Drop metrics and spikes after `step`, and incomplete last lines: these steps will run again."""
        for path in (self.metrics, self.spikes):
            if path.exists():
                kept = [json.dumps(record) + "\n" for record in read_metrics(path) if record["step"] <= step]
                write_text(path, "".join(kept))

    def _clear(self) -> None:
        for path in (
            self._done,
            self.metrics,
            self.spikes,
            self.config,
            self.loss_plot,
            self.probe_plot,
        ):
            path.unlink(missing_ok=True)
        for path in (self.checkpoints, self.weights, self.traces):
            shutil.rmtree(path, ignore_errors=True)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"


def find_commit() -> str | None:
    """The checkout's commit, with a + if files differ from it; None outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout
        changed = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changed else "")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl or spikes.jsonl; a last line that a crash cut short is left out."""
    records = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            records.append(json.loads(line))
    return records


def _differences(stored: dict[str, Any], current: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, stored value, current value) of the settings that make it another run."""
    if "attention" in stored:
        with suppress(ValueError):  # a backend or setting that was removed is compared as stored
            stored = {**stored, "attention": backends.resolve(stored["attention"])}
    # A setting that came later has its default in the runs before it.
    defaults = _flat(OmegaConf.to_container(OmegaConf.structured(Settings)))
    old, new = defaults | _flat(stored), _flat(current)
    return [
        (key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not MAY_CHANGE.match(key)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
