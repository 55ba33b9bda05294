"""What a run writes about itself while it trains: metrics.jsonl, progress bar, log; W&B and TensorBoard."""

import errno
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from trainer import interrupt
from trainer.errors import TrainingError, explain, first
from trainer.redaction import RedactingFormatter, redact
from trainer.run_directory import read_metrics

log = logging.getLogger(__name__)


class Record:
    """Reports records (flat dicts with `step`) to all of these. Used on the main rank only."""

    def __init__(
        self,
        metrics: Path,
        wandb_run: Any | None,
        *,
        steps: int,
        first_step: int,
        name: str,
        tensorboard: Any | None = None,
    ):
        self._path = metrics
        self.logged = len(set(logged_steps(metrics)))  # how many steps metrics.jsonl has the loss of
        self._file = open(metrics, "a", buffering=1)  # noqa: SIM115 - open as long as the run; line-buffered
        self._wandb = wandb_run
        loggers = {"W&B": wandb_run, "TensorBoard": tensorboard}
        self._loggers = {name: logger for name, logger in loggers.items() if logger is not None}
        self._bar = tqdm(
            total=steps,
            initial=first_step,
            desc=name if len(name) <= 40 else f"…{name[-39:]}",
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 15,  # few lines in a log file
            dynamic_ncols=True,
        )

    @property
    def wandb_id(self) -> str | None:
        return self._wandb.id if self._wandb else None

    def write(self, values: dict[str, Any]) -> None:
        values = redact({key: None if _is_not_finite(value) else value for key, value in values.items()})
        with self._naming_the_file():
            if not os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                raise FileNotFoundError(errno.ENOENT, "another file has taken its place")
            self._file.write(json.dumps(values) + "\n")
        self.logged += "loss" in values
        shown = {k: v for k, v in values.items() if k != "step" and v is not None}
        self._call_loggers(lambda logger: logger.log(shown, step=values["step"]))

    def sync(self) -> None:
        """Return when all records are on the disk: a checkpoint is not to be ahead of them."""
        with self._naming_the_file():
            os.fsync(self._file.fileno())

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """An OSError of writing does not say of which file."""
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"could not write to {self._path}: {explain(error)}. Make room or fix the folder; the same "
                "command then continues from the last checkpoint"
            ) from error

    def alert(self, title: str, text: str) -> None:
        """Send a W&B alert (by mail or Slack, as configured there), if W&B is in use."""
        if self._wandb is None:
            return
        try:
            self._wandb.alert(title=title, text=text)
        except Exception as error:  # whatever goes wrong, an alert must not end a training run
            log.warning("the W&B alert could not be sent: %s", error)

    def progress(self, loss: float, tokens_per_second: float | None, mfu: float | None) -> None:
        shown = {"loss": f"{loss:.3f}"}
        if tokens_per_second:
            shown["tok/s"] = f"{tokens_per_second:,.0f}"
        if mfu:
            shown["MFU"] = f"{mfu:.1%}"
        self._bar.set_postfix(shown, refresh=False)

    def advance(self) -> None:
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
        with suppress(OSError):  # retries the write whose failure `record` reported
            self._file.close()
        self._call_loggers(lambda logger: logger.finish())

    def _call_loggers(self, call: Callable[[Any], None]) -> None:
        """Call each logger until it fails; its failures must not end a training run."""
        for name, logger in list(self._loggers.items()):
            try:
                call(logger)
            except Exception as error:  # its own, the network's, a broken pipe to its service
                del self._loggers[name]
                log.warning(
                    "%s failed (%s: %s) and is not used any more in this session; metrics.jsonl is complete",
                    name,
                    type(error).__name__,
                    error,
                )


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)  # JSON has no NaN


def logged_steps(metrics: Path) -> list[int]:
    """The steps that metrics.jsonl has the loss of, in the order of its lines; none if there is no file."""
    records = read_metrics(metrics) if metrics.exists() else []
    return [record["step"] for record in records if "loss" in record]


def warn_of_holes(metrics: Path, *, step: int, logged: int, log_every: int) -> None:
    """Warn if metrics.jsonl has other steps than the `logged` ones of before the checkpoint of `step`."""
    steps, found = logged_steps(metrics), []
    if wrong := [after for before, after in pairwise(steps) if after <= before]:
        found.append(f"records are doubled or out of order, at steps {first(wrong)}")
    there = sorted({*steps})
    if len(there) < logged:
        gaps = [(a + 1, b - 1) for a, b in pairwise([0, *there, step + 1]) if b - a > log_every]
        told = first([str(a) if a == b else f"{a} to {b}" for a, b in gaps])
        found.append(f"{logged - len(there)} of {logged} records are missing, in steps {told}")
    if found:
        log.warning("%s: %s. Training continues; they are not written again", metrics, " and ".join(found))


def log_to(file: Path | None) -> None:
    """Send messages to the console, around the progress bar, and to `file`; only warnings if that is None."""
    handlers: list[logging.Handler] = [_BarSafeHandler()]
    if file is not None:
        handlers.append(_LogFile(file))
    for handler in handlers:
        handler.setFormatter(RedactingFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for package in ("trainer", "model", "data", "sagebwd"):  # not those of other libraries
        logging.getLogger(package).setLevel(logging.WARNING if file is None else logging.INFO)


class _LogFile(logging.FileHandler):
    """log.txt. The console has the same messages, so a disk that refuses them is reported once."""

    def handleError(self, record: logging.LogRecord) -> None:
        logging.getLogger().removeHandler(self)
        log.warning("%s cannot be written any more: %s", self.baseFilename, sys.exc_info()[1])


class _BarSafeHandler(logging.Handler):
    def filter(self, record: logging.LogRecord) -> Any:
        """Leave out what `interrupt` logs: it may hold the lock of the bar, which another `emit` awaits."""
        return record.name != interrupt.__name__ and super().filter(record)

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


class Stopwatch:
    """Measures training time only: paused during evaluation, checkpoints and the like."""

    def __init__(self, device: torch.device):
        self._device = device
        self._elapsed = 0.0
        self._started: float | None = None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def start(self) -> None:
        self._started = self._now()

    def pause(self) -> None:
        if self._started is not None:
            self._elapsed += self._now() - self._started
            self._started = None

    def take(self) -> float:
        """Seconds counted since the last call; keeps running if it was running."""
        running = self._started is not None
        self.pause()
        elapsed, self._elapsed = self._elapsed, 0.0
        if running:
            self.start()
        return elapsed
