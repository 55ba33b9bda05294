"""What a run leaves on disk: settings, environment, metrics, checkpoints, weights, and DONE or DIVERGED."""

import fcntl
import itertools
import json
import logging
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import SettingsError, TrainingError, explain, user_facing
from common.files import no_link, read_bytes, write_text
from common.redaction import redact
from trainer import identity, seal
from trainer.checks import LENGTH, steps_in_common
from trainer.machine import software
from trainer.seal import checkpoints_in, sync
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
CURVE_BYTES = 4 << 30  # of a metrics.jsonl with ten million lines

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
    """The folder of one run."""

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
        self.profile = path / "profile"  # of a few steps: trainer/profiling.py
        self.wandb_id = path / ".wandb_id"  # the run's id in W&B
        self._done = path / "DONE"
        self._diverged = path / "DIVERGED"
        self._saved = path / ".saved"  # the step of the newest checkpoint

        self._aside = path / ASIDE
        self._wandb = path / "wandb"

    @property
    def is_finished(self) -> bool:
        return self._done.exists() and not self._aside.exists()

    def is_finished_with(self, settings: Settings) -> bool:
        """Whether the run is finished, with all of its results, and nothing of `settings` is left to train.

        False if its text has moved: the trainer then compares the text itself. Raises TrainingError if a
        result is damaged, the run was trained with other settings, which it names, or the folder cannot be
        read.
        """
        try:
            if settings.rerun_finished or not self.is_finished:
                return False
            self.check()
            stored = self._stored_settings()
        except ValueError as error:
            raise TrainingError(str(error)) from error
        except OSError as error:
            raise TrainingError(f"cannot use the run directory: {explain(error)}; set run_dir=…") from error
        if stored is None:
            raise TrainingError(
                f"{self.path} is finished, but nothing there says with which settings: restore its "
                "config.yaml from a copy, or set rerun_finished=true to train it again from the start"
            )
        step = max(map(seal.step_of, checkpoints_in(self.checkpoints)), default=0)
        if self._is_longer(stored, settings, step):
            return False
        current = identity.recorded(settings)
        changed = identity.differences(stored, current, also=("spike.skip",))
        if changed:
            raise TrainingError(
                f"{self.path} is finished, but was trained with other settings:\n{identity.listed(changed)}\n"
                "Give these settings their own run_dir=…, or train them here from the start with "
                f"rerun_finished=true{self._branching(stored, settings, step)}"
            )
        was, now = stored.get("data", {}), current["data"]
        return all((was.get(key) or None) == (now[key] or None) for key in ("path", "val_path", "sources"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and lock it against a second process that trains the same run.

        A new folder goes again if an error comes before the first step. A finished run that was to be trained
        again is back if one comes, or the process is killed, before the new one's first checkpoint.
        """
        try:
            is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self.refuse_links()
            file = open(self.path / ".lock", "a")  # noqa: SIM115 - closed below
        except ValueError as error:
            raise TrainingError(str(error)) from error
        except OSError as error:
            raise TrainingError(
                f"cannot create the run directory {self.path}: {explain(error)}; make room or set run_dir=…"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainingError(
                    f"{self.path} is in use by another process that trains this run; wait for it, or give "
                    "this one another run_dir=…"
                ) from None
            try:
                self._settle()
                for folder in (self.path, self.weights):
                    for leftover in folder.glob("*.[0-9]*.tmp"):  # of a process that was killed
                        leftover.unlink()
                yield
            except BaseException:
                self._settle()
                if is_new and not (self._has_metrics() or self._diverged.exists()):
                    shutil.rmtree(self.path, ignore_errors=True)
                raise

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
            inner[:] = [name for name in inner if Path(folder, name) not in (self.checkpoints, self._wandb)]

    def open(self, settings: Settings) -> None:
        """Store the settings. Raises TrainingError, and changes nothing, if the folder is of another run.

        Or if its checkpoints are gone, or cannot be read.
        """
        if settings.rerun_finished and self.is_finished:
            self._set_aside()
        if self.environment.exists():
            with user_facing(ValueError):
                read_lines(self.environment)  # the model card needs it, at the end
        current = identity.recorded(settings)
        if (found := self._find_checkpoints()) or self._has_metrics():
            stored = self._stored_settings()
            step = max(map(seal.step_of, found), default=0)
            changed = identity.differences(stored, current) if stored else []
            if changed and not self._is_longer(stored, settings, step):
                raise TrainingError(
                    f"{self.path} holds a run with other settings:\n{identity.listed(changed)}\n"
                    "Give the changed run its own run_dir=…, or delete that folder to start over"
                    f"{self._branching(stored, settings, step)}"
                )
        for mark in (self._diverged, self._done):  # what it claims begins to change
            mark.unlink(missing_ok=True)
        write_text(self.config, identity.as_yaml(current))

    def check_checkpoint(self, path: Path, sealed: dict[str, Any], settings: Settings) -> None:
        """Raise TrainingError if the checkpoint is of a run with other settings; `sealed` is its seal."""
        try:
            stored = identity.checked(sealed.get("settings"))
        except ValueError as error:
            raise TrainingError(f"checkpoint {path} is damaged ({error}); delete that folder") from error
        changed = identity.differences(stored, identity.recorded(settings))
        if changed and not self._is_longer(stored, settings, sealed["step"]):
            raise TrainingError(
                f"checkpoint {path} is of a run with other settings:\n{identity.listed(changed)}\n"
                "Move it to where it came from, or give this run its own run_dir=…"
            )

    def _is_longer(self, stored: dict[str, Any], settings: Settings, step: int) -> bool:
        """Whether the `step` steps that are done are the first of the longer run that `settings` describe.

        They are if their learning rates are: the run goes on as if it had been the longer one all along.
        """
        return 0 < step <= _steps_in_common(stored, settings) and step < settings.total_steps

    def _branching(self, stored: dict[str, Any], settings: Settings, step: int) -> str:
        """What can be done with a run that is not `_is_longer` although only its length differs."""
        common = _steps_in_common(stored, settings)
        if common < 0 or not 0 < step < settings.total_steps:
            return ""
        steps = seal.steps_in(self.checkpoints)
        at = max((one for one in steps if one <= common), default=step)
        return (
            f". It cannot go on here: its {step} steps had other learning rates, from step {common + 1} on. "
            "A run of its own can go on with the rates of these settings: python train.py "
            f"branch_from={self.path} branch_step={at} steps={settings.total_steps} run_dir=…"
        )

    def note_checkpoint(self, step: int) -> None:
        """Remember that there has been a checkpoint, so that a lost folder of them is not taken for none."""
        write_text(self._saved, f"{step}\n")
        if self._aside.exists():
            (self._aside / self._done.name).unlink(missing_ok=True)
            self._settle()

    def _find_checkpoints(self) -> list[Path]:
        """The checkpoints. Raises TrainingError if they are gone, or cannot be read."""
        try:
            found = checkpoints_in(self.checkpoints)
        except OSError as error:
            raise TrainingError(
                f"the checkpoints of this run cannot be read: {explain(error)}. Mount that place or correct "
                "its permissions, and run the same command again"
            ) from error
        if not found and self._saved.exists():
            step = self._saved.read_text().strip()
            raise TrainingError(
                f"{self.path} was saved at step {step}, but {self.checkpoints} holds no checkpoint. Restore "
                f"them and run the same command again, or delete {self.path} to train from the start"
            )
        return found

    def _has_metrics(self) -> bool:
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    def _stored_settings(self) -> dict[str, Any] | None:
        """The settings of the run: those in config.yaml, unless its newest checkpoint says others.

        Warns if config.yaml is lost or damaged; None, after a warning, if nothing else says them.
        """
        in_seal = next(filter(None, map(_sealed_settings, reversed(checkpoints_in(self.checkpoints)))), None)
        try:
            in_config = identity.read(self.config)
        except (FileNotFoundError, ValueError) as error:
            problem = "is lost" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
            compared = "they are read from the newest checkpoint" if in_seal else "they cannot be compared"
            log.warning("%s %s. It had the settings of this run; %s", self.config, problem, compared)
            return in_seal
        return in_seal if in_seal and identity.differences(in_config, in_seal) else in_config

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
        write_text(self._done, seal.dumps({"files": files}))
        sync(self.path)

    def results(self) -> str:
        """The directory, and a line for each picture in it and for the model."""
        lines = {
            self.loss_plot: "training loss (line) and validation loss (markers)",
            self.probe_plot: "errors of SageBwd's O, dQ, dK and dV by layer; grey: full precision",
            self.weights: f"python -m scripts.sample {shlex.quote(str(self.path))} lets the model write",
        }
        return "\n  ".join(
            [str(self.path), *(f"{it.name}: {says}" for it, says in lines.items() if it.exists())]
        )

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
            files = seal.read_file(self._done)["files"]
            within = [path.relative_to(self.path) for path in results or (self.path,)]
            chosen = {name: files[name] for name in files if any(map(Path(name).is_relative_to, within))}
            seal.verify_files(self.path, chosen)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} is finished, but {error}. Restore that file from a copy. Or delete "
                f"{self._done}: the same command then writes weights and pictures again, from the newest "
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
        write_text(self._diverged, f"{step}\n")

    def diverged_at(self) -> int | None:
        """The step that ended the run because it was not finite, or None; `open` forgets it."""
        return int(read_bytes(self._diverged, 99, links=False)) if self._diverged.exists() else None

    def truncate_metrics(self, step: int) -> None:
        """Drop metrics and spikes after `step`, and incomplete last lines: these steps will run again.

        step: that of the checkpoint that was loaded. Raises ValueError if another line is damaged.
        """
        for path in (self.metrics, self.spikes):
            if path.exists():
                kept = [json.dumps(record) + "\n" for record in read_metrics(path) if record["step"] <= step]
                write_text(path, "".join(kept))

    def _set_aside(self) -> None:
        """Move what the finished run left to ASIDE, DONE last; `_settle` undoes it or makes it final."""
        for path in (*self._results(), self._done):
            (path.parent / ASIDE).mkdir(exist_ok=True)
            os.rename(path, path.parent / ASIDE / path.name)

    def _settle(self) -> None:
        """Put the finished run that was set aside back, or delete it if the new one has a checkpoint.

        Complete if it is called again after it was interrupted.
        """
        asides = (self.checkpoints / ASIDE, self._aside)
        if os.path.islink(asides[0]):  # a stranger's
            asides[0].unlink()
        if (self._aside / self._done.name).exists():
            for path in (*self._results(), self._diverged):
                _remove(path)
            os.rename(self._aside / self._done.name, self._done)
        if self._done.exists():
            for path in self._results(ASIDE):
                os.rename(path, path.parent.parent / path.name)
        for folder in asides:
            _remove(folder)

    def _results(self, within: str = "") -> list[Path]:
        """What training again replaces, DONE apart; within: ASIDE, where it is meanwhile.

        Of checkpoints, which may be on another disk, each by itself.
        """
        files = (self.metrics, self.spikes, self.environment, self.config, self.loss_plot, self.probe_plot)
        marks = (self._saved, self.wandb_id)  # trained anew, it is another run in W&B
        named = (self.weights, self.exports, self.profile, *files, *marks)
        there = [path.parent / within / path.name for path in named]
        saved = [(self.checkpoints / within).glob(pattern) for pattern in ("step_*", ".writing_step_*")]
        return [*itertools.chain(*saved), *filter(os.path.lexists, there)]


def _steps_in_common(stored: dict[str, Any], settings: Settings) -> int:
    """How many first steps a stored run and this one have in common; -1 if not only the length differs."""
    changed = {name for name, *_ in identity.differences(stored, identity.recorded(settings))}
    if not changed or not changed <= LENGTH:
        return -1
    try:
        return steps_in_common(OmegaConf.to_object(identity.restored(stored)), settings)
    except (OmegaConfBaseException, SettingsError):  # of an older version
        return -1


def _remove(path: Path) -> None:
    """Delete a folder or file, if it is there; of a link only the link."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


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
            raise ValueError(_damaged(path, number, problem))
    return records


def check_readable(record: dict[str, Any]) -> None:
    """Raise ValueError if `read_metrics` could not read this record back."""
    if problem := _problem(json.loads(json.dumps(record), parse_int=_whole)):
        raise ValueError(problem)


def _problem(record: dict[str, Any]) -> str | None:
    if not isinstance(record.get("step"), int):
        return "it has no step"
    wrong = [k for k, v in record.items() if not isinstance(v, int | float | None) and NUMBERS.fullmatch(k)]
    return f"its {wrong[0]} is no number" if wrong else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines. Raises ValueError as `read_metrics` does."""
    records = []
    for number, line in enumerate(read_bytes(path, CURVE_BYTES, links=False).split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line, parse_int=_whole)
        except (ValueError, RecursionError) as error:
            raise ValueError(_damaged(path, number, str(error))) from error
        if not isinstance(record, dict):
            raise ValueError(_damaged(path, number, "it is no JSON object"))
        records.append(record)
    return records


def _whole(digits: str) -> int:
    if len(digits) > 18:
        raise ValueError(f"{digits[:20]} is a whole number of more than 18 digits; log it as a float")
    return int(digits)


def _damaged(path: Path, number: int, problem: str) -> str:
    fix = shlex.join(["sed", "-i", f"{number}d", str(path)])
    return f"line {number} of {path} is damaged ({problem}). To go on without it, delete that line: {fix}"


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a line of JSON, in place of one that a crash or a full disk cut short."""
    with open(path, "ab+", opener=no_link) as file:
        file.seek(0)
        complete = file.read().rfind(b"\n") + 1
        file.truncate(complete)
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _sealed_settings(checkpoint: Path) -> dict[str, Any] | None:
    """The settings in a checkpoint's seal; None if it is damaged."""
    try:
        return identity.checked(seal.read(checkpoint).get("settings"))
    except (OSError, ValueError):
        return None
