"""What a run leaves on disk: settings, metrics, weights, DONE or DIVERGED; checkpoints, and their seals."""

import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

from common.files import damaged_line, read_bytes, read_line, read_lines, write_text

SEAL = "seal.json"
METADATA = ".metadata"  # torch.distributed.checkpoint's list of what is in the other files
NAME = re.compile(r"step_\d+")  # of a checkpoint's folder
CHECKSUM = "checksum"  # of the seal itself

# Values of metrics.jsonl and spikes.jsonl that are computed with.
NUMBERS = re.compile(r"tokens|lr|mfu|tokens_per_second|(typical_)?(loss|grad_norm)|(val_|probe/).*")


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
        self.wandb_id = path / ".wandb_id"  # the run's id in W&B
        self.done = path / "DONE"
        self.diverged = path / "DIVERGED"
        self.saved = path / ".saved"  # the step of the newest checkpoint

    @property
    def is_finished(self) -> bool:
        return self.done.exists()

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

    def finish(self) -> None:
        """Mark the run finished: DONE has the sizes and checksums of its results, which are on the disk."""
        weights = sorted({*self.weights.glob("*")} - {self.weights / "README.md"})  # which one may edit
        pictures = (self.loss_plot, self.probe_plot)
        results = (*weights, self.metrics, self.spikes, self.environment, *pictures)
        files = {}
        for path in filter(Path.is_file, results):
            sync(path)
            files[path.relative_to(self.path).as_posix()] = fingerprint(path)
        for folder in filter(Path.exists, (self.weights, self.path)):
            sync(folder)
        write_text(self.done, seal_text({"files": files}))
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
            files = read_sealed_file(self.done)["files"]
            within = [path.relative_to(self.path) for path in results or (self.path,)]
            chosen = {name: files[name] for name in files if any(map(Path(name).is_relative_to, within))}
            verify_files(self.path, chosen)
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


# ---------------------------------------------------------------------- checkpoints and their seals
#
# A seal says what a checkpoint is of, and the size and checksum of each of its files, and of itself. DONE of
# a finished run is one, too, of its results. It finds damage: truncation, flipped bits, files of another
# checkpoint. It does not find tampering, because anyone can compute a CRC. That a checkpoint runs no code
# when it is read does not rest on it: see trainer/checkpoint.py.


def write_seal(folder: Path, contents: dict[str, Any]) -> None:
    """Seal all files of `folder`. They and the folder are on the disk when this returns."""
    files = {path.name: fingerprint(path) for path in sorted(folder.iterdir())}
    write_text(folder / SEAL, seal_text({**contents, "files": files}))
    sync(folder)


def seal_text(sealed: dict[str, Any]) -> str:
    """A seal as JSON."""
    sealed = json.loads(json.dumps(sealed))
    return json.dumps({**sealed, CHECKSUM: _checksum(sealed)}, indent=1)


def read_seal(folder: Path) -> dict[str, Any]:
    """The contents of the seal; the files are not looked at.

    Raises OSError, or ValueError if it is damaged.
    """
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link; put there what it leads to")
    sealed = read_sealed_file(folder / SEAL)
    if step_of(folder) != sealed.get("step"):
        raise ValueError(f"{SEAL} is that of step {sealed.get('step')}")
    return sealed


def read_sealed_file(path: Path) -> dict[str, Any]:
    """What `seal_text` made. Raises OSError, or ValueError if it is damaged."""
    try:
        sealed = json.loads(read_bytes(path, links=False))
        checksum = sealed.pop(CHECKSUM, None) if isinstance(sealed, dict) else None
        found = _checksum(sealed)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    if not (isinstance(sealed, dict) and isinstance(sealed.get("files"), dict)):
        raise ValueError(f"{path.name} lists no files")
    if checksum != found:
        raise ValueError(f"{path.name} does not match its own checksum")
    return sealed


def verify_seal(folder: Path) -> dict[str, Any]:
    """The contents of the seal. Raises ValueError or OSError naming what does not match it."""
    sealed = read_seal(folder)
    verify_files(folder, {METADATA: None, **sealed["files"]})
    return sealed


def verify_files(folder: Path, files: dict[str, Any]) -> None:
    """Compare files, by their paths in `folder`, with their fingerprints. Raises as `verify_seal` does."""
    for name, expected in files.items():
        path = folder / name
        outside = {"/", ".."} & {*Path(name).parts}
        if outside or path.is_symlink() or not path.is_file():  # nor a pipe that never ends
            raise ValueError(f"{name} is missing, or no file of this folder")
        found = size = f"{path.stat().st_size} bytes"
        if str(expected).startswith(f"{size}, "):  # a sparse file of a stranger may have any size
            found = fingerprint(path)
        if found != expected:
            raise ValueError(f"{name} is {found}, was written as {expected}")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first; none if there is no folder.

    Raises OSError if the folder cannot be read, or is a link to a place that is not there.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return []
    return sorted(folder / name for name in names if NAME.fullmatch(name))


def step_of(folder: Path) -> int:
    """The step that the name of a checkpoint's folder, step_<n>, says. Raises ValueError if it says none."""
    return int(folder.name.removeprefix("step_"))


def checkpoint_of(folder: Path, step: int) -> Path:
    """The checkpoint of one step. Raises ValueError, naming the steps that exist, if there is none."""
    path = path_of(folder, step)
    if not path.is_dir():
        there = ", ".join(map(str, steps_in(folder))) or "none"
        raise ValueError(f"{folder} has no checkpoint of step {step}; there: {there}")
    return path


def steps_in(folder: Path) -> list[int]:
    """The steps whose checkpoints are in `folder`."""
    return [step_of(path) for path in checkpoints_in(folder)]


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint of `folder`. Raises ValueError if there is none."""
    if steps := steps_in(folder):
        return steps[-1]
    raise ValueError(f"{folder} holds no checkpoint; train the run, or restore them")


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step_{step:08d}"


def sync(path: Path) -> None:
    """Return when the content of the file, or the names in the folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(sealed: dict[str, Any]) -> str:
    return f"crc {zlib.crc32(json.dumps(sealed, sort_keys=True).encode()):08x}"


def fingerprint(path: Path) -> str:
    """Size and checksum of a file, some 2 GB/s."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return f"{path.stat().st_size} bytes, crc {checksum:08x}"
