"""What a run leaves on disk: settings, environment, metrics, checkpoints, weights, and DONE or DIVERGED."""

import json
import logging
import os
import platform
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from common.errors import TrainingError
from common.files import append_line, damaged_line, read_bytes, read_line, read_lines, write_text
from common.redaction import redact
from trainer import identity, seal
from trainer.machine import software
from trainer.seal import sync
from trainer.settings import Settings

log = logging.getLogger(__name__)

# Overrides that say where things are, not what the run computes.
UNNAMED = (
    "run_dir=",
    "runs_dir=",
    "rerun_finished=",
    "plan=",
    "data.root=",
    "data.processes=",
    "logger=",
    "logger.",
)


#: Folder in a run's directory, and one in its checkpoints: a finished run that is trained again.
ASIDE = ".before"

NAME_BYTES = 255  # of a file's name, on Linux

# Values of metrics.jsonl and spikes.jsonl that are computed with.
NUMBERS = re.compile(r"tokens|lr|mfu|tokens_per_second|(typical_)?(loss|grad_norm)|(val_|probe/).*")


def default_name(overrides: list[str]) -> str:
    """A readable folder name for a run with these command-line overrides, which no others share."""
    kept = sorted(text for text in overrides if not text.startswith(UNNAMED))
    if not kept:
        return "default"
    exact = "+".join(kept)
    name = re.sub(r"[^\w.+-]", "-", exact.replace("=", "-"))
    if name != exact.replace("=", "-") or len(name) > 120 or len(name.encode()) > NAME_BYTES:
        kept = name[:110].encode()[: NAME_BYTES - 9].decode(errors="ignore")
        return f"{kept}-{crc32(os.fsencode(exact)):08x}"  # something was replaced or cut off
    return name


def name_directory(settings: Settings, overrides: list[str]) -> None:
    """Give the run a `run_dir` named after its overrides if it has none. settings: or Hydra's."""
    settings.run_dir = settings.run_dir or str(Path(settings.runs_dir) / default_name(overrides))


class RunDirectory:
    """The folder of one run, and what is in it."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.spikes = path / "spikes.jsonl"
        self.environment = path / "environment.jsonl"  # what each start of the run ran on
        self.config = path / "config.yaml"
        self.loss_plot = path / "loss.png"
        self.probe_plot = path / "probe.png"
        self.weights = path / "weights"
        self.exports = path / "export"  # checkpoints in the Hugging Face layout: python -m scripts.export
        self.profile = path / "profile"  # of a few steps: trainer/machine.py
        self.wandb_id = path / ".wandb_id"  # the run's id in W&B
        self.done = path / "DONE"
        self.diverged = path / "DIVERGED"
        self.saved = path / ".saved"  # the step of the newest checkpoint
        self.aside = path / ASIDE

    @property
    def is_finished(self) -> bool:
        return self.done.exists() and not self.aside.exists()

    @property
    def has_metrics(self) -> bool:
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    def refuse_links(self) -> None:
        """Raise ValueError for a pipe in the folder, or a link, which a stranger may have laid to any file.

        `checkpoints` may be one, to another disk, but not to another run; W&B makes some of its own.
        """
        if self.checkpoints.is_symlink() and (self.checkpoints.resolve().parent / self.config.name).exists():
            raise ValueError(f"{self.checkpoints} is a link to those of another run; delete it")
        for folder, inner, files in os.walk(self.path):
            for path in (Path(folder, name) for name in (*inner, *files)):
                if (path.is_symlink() and path != self.checkpoints) or path.is_fifo():
                    raise ValueError(f"{path} is a link or a pipe; put a file there, or delete it")
            inner[:] = [
                name for name in inner if Path(folder, name) not in (self.checkpoints, self.path / "wandb")
            ]

    def check_checkpoint(self, path: Path, sealed: dict[str, Any], settings: Settings) -> None:
        """Raise TrainingError if the checkpoint is of a run with other settings; `sealed` is its seal."""
        try:
            stored = identity.checked(sealed.get("settings"))
        except ValueError as error:
            raise TrainingError(f"checkpoint {path} is damaged ({error}); delete that folder") from error
        changed = identity.differences(stored, identity.recorded(settings))
        if changed and not identity.is_longer(stored, settings, sealed["step"]):
            raise TrainingError(
                f"checkpoint {path} is of a run with other settings:\n{identity.listed(changed)}\n"
                "Move it to where it came from, or give this run its own run_dir=…"
            )

    def note_environment(self, device: torch.device, devices: int) -> None:
        """Add what this process runs on to environment.jsonl: a line for every start of the run."""
        line = {
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": redact(sys.argv),
            "device": _device_name(device),
            "devices": devices,
            "cuda": torch.version.cuda,
            **software(),
        }
        append_line(self.environment, line)

    def finish(self) -> None:
        """Mark the run finished: DONE has the sizes and checksums of its results, which are on the disk."""
        weights = sorted({*self.weights.glob("*")} - {self.weights / "README.md"})  # which one may edit
        pictures = (self.loss_plot, self.probe_plot)
        results = (*weights, self.metrics, self.spikes, self.environment, *pictures)
        files = {}
        for path in filter(Path.is_file, results):
            sync(path)
            files[path.relative_to(self.path).as_posix()] = seal.fingerprint(path)
        for folder in filter(Path.exists, (self.weights, self.path)):
            sync(folder)
        write_text(self.done, seal.dumps({"files": files}))
        sync(self.path)

    def check(self, *results: Path) -> None:
        """Raise ValueError if some results, by default all, are not what the finished run left, or for links.

        results: files, or a folder. config.yaml is none: its values are compared with those in the seals of
        checkpoints, and the place of the text may be corrected in it.
        """
        if self.is_finished or os.path.lexists(self.config):  # else it is no run
            self.refuse_links()
        if not self.is_finished:
            return
        try:
            files = seal.read_file(self.done)["files"]
            within = [path.relative_to(self.path) for path in results or (self.path,)]
            chosen = {name: files[name] for name in files if any(map(Path(name).is_relative_to, within))}
            seal.verify_files(self.path, chosen)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} is finished, but {error}. Restore that file from a copy. Or delete "
                f"{self.done}: the same command then writes weights and pictures again, from the newest "
                "checkpoint, and takes all else as it is"
            ) from error

    def records(self) -> list[dict[str, Any]]:
        """What metrics.jsonl says. Raises ValueError if it is damaged, OSError if it is not there."""
        self.check(self.metrics)
        return read_metrics(self.metrics)

    def validation_loss(self) -> float | None:
        """The last one; None before the first validation."""
        records = self.records() if self.metrics.exists() else []
        losses = [record["val_loss"] for record in records if record.get("val_loss") is not None]
        return losses[-1] if losses else None

    def note_divergence(self, step: int) -> None:
        """Mark the run as ended by `step`, whose loss or gradient is not finite."""
        write_text(self.diverged, f"{step}\n")

    def diverged_at(self) -> int | None:
        """The step that ended the run because it was not finite, or None; `open` forgets it."""
        return int(read_bytes(self.diverged, 99, links=False)) if self.diverged.exists() else None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl or spikes.jsonl; a last line that a crash cut short is left out.

    Raises ValueError, naming the line, if any other is damaged.
    """
    records = read_lines(path)
    for number, record in enumerate(records, start=1):
        if problem := _problem(record):
            raise ValueError(damaged_line(path, number, problem))
    return records


def check_readable(record: dict[str, Any]) -> None:
    """Raise ValueError if `read_metrics` could not read this record back."""
    if problem := _problem(read_line(json.dumps(record))):
        raise ValueError(problem)


def _problem(record: dict[str, Any]) -> str | None:
    if not isinstance(record.get("step"), int):
        return "it has no step"
    wrong = [k for k, v in record.items() if not isinstance(v, int | float | None) and NUMBERS.fullmatch(k)]
    return f"its {wrong[0]} is no number" if wrong else None
