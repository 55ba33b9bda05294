"""What a run writes about itself while it trains: metrics.jsonl, progress bar, log; W&B and TensorBoard."""

import importlib.util
import json
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import terminal
from common.errors import TrainingError
from common.files import write_text
from common.redaction import RedactingFormatter, redact
from trainer.run_directory import RunDirectory, read_metrics
from trainer.settings import LoggerSettings
from trainer.software import find_commit

log = logging.getLogger(__name__)

PROJECT = "sagebwd"
#: Seconds after which W&B is given up at the start and the end. Without a network it would wait for longer.
TIMEOUTS = {"init_timeout": 20, "finish_timeout": 120}


class Record:
    """Reports records (flat dicts with `step`) to all of these. Used on the main rank only."""

    def __init__(
        self,
        metrics: Path,
        loggers: "dict[str, WandbRun | TensorBoard | None]",
        *,
        steps: int,
        first_step: int,
        name: str,
    ):
        self.logged = len(set(logged_steps(metrics)))  # how many steps metrics.jsonl has the loss of
        self._file = open(metrics, "a", buffering=1)  # noqa: SIM115 - open as long as the run; line-buffered
        self._loggers = {name: logger for name, logger in loggers.items() if logger is not None}
        self._bar = tqdm(
            total=steps,
            initial=first_step,
            desc=name if len(name) <= 40 else f"…{name[-39:]}",
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 15,  # few lines in a log file
            dynamic_ncols=True,
        )

    def write(self, values: dict[str, Any]) -> None:
        infinite = [k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)]
        values = redact(values | dict.fromkeys(infinite))  # JSON has no NaN
        self._file.write(json.dumps(values) + "\n")
        self.logged += "loss" in values
        shown = {k: v for k, v in values.items() if k != "step" and v is not None}
        self._call_loggers(lambda logger: logger.log(shown, step=values["step"]))

    def sync(self) -> None:
        """Return when all records are on the disk: a checkpoint is not to be ahead of them."""
        os.fsync(self._file.fileno())

    def progress(self, loss: float, tokens_per_second: float, mfu: float | None) -> None:
        shown = {"loss": f"{loss:.3f}", "tok/s": f"{tokens_per_second:,.0f}"}
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


def logged_steps(metrics: Path) -> list[int]:
    """The steps that metrics.jsonl has the loss of, in the order of its lines; none if there is no file."""
    records = read_metrics(metrics) if metrics.exists() else []
    return [record["step"] for record in records if "loss" in record]


def warn_of_holes(metrics: Path, logged: int) -> None:
    """Warn if metrics.jsonl lacks some of the steps that were `logged` before a checkpoint."""
    there = {*logged_steps(metrics)}
    if len(there) < logged:
        lost = f"{logged - len(there)} of {logged} records are missing"
        log.warning("%s: %s. Training continues; they are not written again", metrics, lost)


def log_to(file: Path | None) -> None:
    """Send messages to the console, around the progress bar, and to `file`; only warnings if that is None."""
    handlers: list[logging.Handler] = [_BarSafeHandler()]
    if file is not None:
        handlers.append(_LogFile(file))
    for handler in handlers:
        handler.setFormatter(RedactingFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for package in ("trainer", "model", "data", "common", "sagebwd"):  # not those of other libraries
        logging.getLogger(package).setLevel(logging.WARNING if file is None else logging.INFO)


class _LogFile(logging.FileHandler):
    """log.txt. The console has the same messages, so a disk that refuses them is reported once."""

    def handleError(self, record: logging.LogRecord) -> None:
        logging.getLogger().removeHandler(self)
        log.warning("%s cannot be written any more: %s", self.baseFilename, sys.exc_info()[1])


class _BarSafeHandler(logging.Handler):
    def filter(self, record: logging.LogRecord) -> Any:
        """Leave out what `terminal` logs: it may hold the lock of the bar, which another `emit` awaits."""
        return record.name != terminal.__name__ and super().filter(record)

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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not counting what is done within; where it was paused before, it stays so."""
        running = self._started is not None
        if running:
            self._elapsed += self._now() - self._started
            self._started = None
        yield
        if running:
            self.start()

    def take(self) -> float:
        """Seconds counted since the last call; keeps running if it was running."""
        with self.paused():
            elapsed, self._elapsed = self._elapsed, 0.0
        return elapsed


# ---------------------------------------------------------------------- W&B and TensorBoard


class WandbRun:
    """A W&B run as a logger: tokens are the x-axis, samples a table."""

    def __init__(self, run: Any, metrics: Path):
        self._run = run
        records = read_metrics(metrics) if metrics.exists() else []  # of before this start
        self._samples = [
            [one["step"], one.get("tokens"), one["sample"]] for one in records if one.get("sample")
        ]
        run.define_metric("tokens")
        run.define_metric("*", step_metric="tokens")

    def log(self, values: dict[str, Any], step: int) -> None:
        if "sample" in values:
            self._samples.append([step, values.get("tokens"), values["sample"]])
            import wandb

            # Anew each time: a table that was logged does not change any more.
            table = wandb.Table(columns=["step", "tokens", "text"], data=list(self._samples))
            values = {**values, "sample": table}
        self._run.log(values, step=step)

    def finish(self) -> None:
        self._run.finish()


def start_wandb(settings: LoggerSettings, *, folder: Path, config: dict[str, Any]) -> WandbRun | None:
    """A W&B run, continued if the run had one; None when it is off, or "auto" and not installed.

    "auto" obeys WANDB_MODE; without it, it logs online when an API key is configured and offline otherwise.
    If the service cannot be reached the run is logged offline, and can be uploaded later with `wandb sync`.
    The other WANDB_* variables hold where the settings leave a value out.
    """
    mode = os.environ.get("WANDB_MODE", "auto") if settings.wandb == "auto" else settings.wandb
    if mode in ("off", "disabled"):
        return None
    if importlib.util.find_spec("wandb") is None:
        if settings.wandb != "auto":
            log.warning("logger.wandb=%s, but wandb is not installed: pip install wandb", settings.wandb)
        return None
    import wandb  # slow to import, and optional

    if mode == "auto":
        mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
    arguments = _arguments(settings, folder)
    for attempt in dict.fromkeys((mode, "offline")):
        try:
            run = wandb.init(
                **arguments,
                config=redact(config),
                mode=attempt,
                settings=wandb.Settings(**_client_settings(wandb)),
            )
        except Exception as error:  # its own, its service's: none of them may end a training run
            log.warning("W&B (%s): %s", attempt, error)
            wandb.teardown(exit_code=1)  # its service would say that the id is in use
        else:
            if run.offline:  # W&B itself is silent, because it would write into the progress bar
                log.info("W&B is offline; to upload this run later: wandb sync %s", Path(run.dir).parent)
            else:
                log.info("W&B: %s", run.url)
            return WandbRun(run, RunDirectory(folder).metrics)
    return None


def _arguments(settings: LoggerSettings, folder: Path) -> dict[str, Any]:
    """Names and places. A setting that is given wins, then W&B's variable, then our default."""
    environ = os.environ
    return {
        "project": settings.project or environ.get("WANDB_PROJECT") or PROJECT,
        "group": settings.group or environ.get("WANDB_RUN_GROUP"),
        "name": environ.get("WANDB_NAME") or folder.name,
        "id": _id_of(folder),
        "dir": environ.get("WANDB_DIR") or folder,
        "resume": environ.get("WANDB_RESUME") or "allow",
    }


def _client_settings(wandb: Any) -> dict[str, Any]:
    """Settings of W&B's client: those of its variables win, except that the git remote names a user."""
    defaults = {"console": "off", "silent": True, **TIMEOUTS}
    known = wandb.Settings.model_fields
    chosen = {
        key: value
        for key, value in defaults.items()
        if key in known and f"WANDB_{key.upper()}" not in os.environ  # older versions have fewer
    }
    return {**chosen, "disable_git": True, "git_commit": find_commit()}


def _id_of(folder: Path) -> str:
    """The id of the run in this folder. It is stored before W&B starts, so that a killed run keeps it."""
    file = RunDirectory(folder).wandb_id
    stored = file.read_text().strip() if file.exists() else ""
    run_id = os.environ.get("WANDB_RUN_ID") or stored or secrets.token_hex(4)
    write_text(file, f"{run_id}\n")
    return run_id


class TensorBoard:
    """Event files of one start of a run. The x-axis is the step, and `tokens` one of the curves."""

    def __init__(self, folder: Path, first_step: int):
        """Raises TrainingError if tensorboard is not installed.

        first_step: steps done before this start. Later ones of an earlier start are hidden: they run again.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional
        except ImportError as error:
            raise TrainingError(
                "logger.tensorboard=true needs the package tensorboard: pip install -e "
                "'.[train,tensorboard]' -c constraints.txt, or leave the setting out"
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def log(self, values: dict[str, Any], step: int) -> None:
        for key, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, step)
            elif isinstance(value, int | float):
                self._writer.add_scalar(key, value, step)

    def finish(self) -> None:
        self._writer.close()
