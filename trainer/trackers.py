"""A run in W&B and in TensorBoard: the same records as in metrics.jsonl."""

import importlib.util
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from data.files import write_text
from model.config import parameter_count
from trainer.checks import Sizes
from trainer.errors import TrainingError
from trainer.interrupt import say
from trainer.machine import find_commit
from trainer.redaction import redact
from trainer.run_directory import RunDirectory, read_metrics
from trainer.settings import LoggerSettings, Settings

log = logging.getLogger(__name__)

PROJECT = "sagebwd"
#: Seconds after which W&B is given up at the start and the end. Without a network it would wait for longer.
TIMEOUTS = {"init_timeout": 20, "finish_timeout": 120}


class WandbRun:
    """A W&B run as a logger: tokens are the x-axis, samples a table."""

    def __init__(self, run: Any, metrics: Path):
        self._run = run
        self.id: str = run.id
        self._samples = _samples_in(metrics)
        run.define_metric("tokens")
        run.define_metric("*", step_metric="tokens")

    @property
    def summary(self) -> Any:
        return self._run.summary

    def log(self, values: dict[str, Any], step: int) -> None:
        if "sample" in values:
            self._samples.append([step, values.get("tokens"), values["sample"]])
            values = {**values, "sample": self._table()}
        self._run.log(values, step=step)

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title=title, text=text)

    def finish(self) -> None:
        self._run.finish()

    def _table(self) -> Any:
        import wandb

        # Anew each time: a table that was logged does not change any more.
        return wandb.Table(columns=["step", "tokens", "text"], data=list(self._samples))


def _samples_in(metrics: Path) -> list[list[Any]]:
    """[step, tokens, text] of the samples before this start of the run."""
    records = read_metrics(metrics) if metrics.exists() else []
    return [[one["step"], one.get("tokens"), one["sample"]] for one in records if one.get("sample")]


def start_wandb(
    settings: LoggerSettings,
    *,
    folder: Path,
    config: dict[str, Any],
    run_id: str | None,
) -> WandbRun | None:
    """A W&B run, continued if the run had one; None when it is off, or "auto" and not installed.

    "auto" obeys WANDB_MODE; without it, it logs online when an API key is configured and offline otherwise.
    If the service cannot be reached the run is logged offline, and can be uploaded later with `wandb sync`.
    The other WANDB_* variables hold where the settings leave a value out.

    run_id: the run's id in its checkpoint. Without one, the id is that of the run directory, which gets it
    before W&B starts.
    """
    mode = settings.wandb
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE", "auto")
    if mode in ("off", "disabled") or (settings.wandb == "auto" and _is_true("WANDB_DISABLED")):
        return None
    if importlib.util.find_spec("wandb") is None:
        if settings.wandb != "auto":
            log.warning("logger.wandb=%s, but wandb is not installed: pip install wandb", settings.wandb)
        return None
    import wandb  # slow to import, and optional

    if mode == "auto":
        mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
    arguments = _arguments(settings, folder)
    run_id = run_id or os.environ.get("WANDB_RUN_ID") or _id_of(folder)
    for attempt in dict.fromkeys((mode, "offline")):
        try:
            run = wandb.init(
                **arguments,
                id=run_id,
                config=redact(config),
                mode=attempt,
                settings=wandb.Settings(**_client_settings(wandb)),
            )
        except Exception as error:  # its own, its service's: none of them may end a training run
            log.warning("W&B (%s): %s", attempt, error)
            wandb.teardown(exit_code=1)  # its service would say that the id is in use
        else:
            _say_where(run)
            return WandbRun(run, RunDirectory(folder).metrics)
    return None


def _arguments(settings: LoggerSettings, folder: Path) -> dict[str, Any]:
    """Names and places. A setting that is given wins, then W&B's variable, then our default."""
    environ = os.environ
    given = [tag.strip() for tag in environ.get("WANDB_TAGS", "").split(",")]
    return {
        "project": settings.project or environ.get("WANDB_PROJECT") or PROJECT,
        "entity": settings.entity or environ.get("WANDB_ENTITY"),
        "group": settings.group or environ.get("WANDB_RUN_GROUP"),
        "tags": [*dict.fromkeys(filter(None, (*settings.tags, *given)))] or None,
        "name": environ.get("WANDB_NAME") or folder.name,
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
    if not file.exists() or not file.read_text().strip():
        write_text(file, f"{secrets.token_hex(4)}\n")
    return file.read_text().strip()


def _say_where(run: Any) -> None:
    """W&B itself is silent, because it would write into the progress bar."""
    if run.offline:
        log.info("W&B is offline; to upload this run later: wandb sync %s", Path(run.dir).parent)
    else:
        log.info("W&B: %s", run.url)


def forget_one_run(planned: int) -> None:
    """Drop W&B's variables that name one run, where several are planned: all would write into that one."""
    for variable in ("WANDB_RUN_ID", "WANDB_NAME"):
        if planned > 1 and os.environ.pop(variable, None):
            say(f"{variable} is ignored: it names one run, and {planned} are planned")


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on")


def derived(settings: Settings, sizes: Sizes, devices: int) -> dict[str, int]:
    """What follows from the settings, for W&B's config."""
    return {
        "parameters": parameter_count(settings.model),
        "steps": sizes.steps,
        "tokens_per_step": sizes.tokens_per_step,
        "total_tokens": sizes.steps * sizes.tokens_per_step,
        "devices": devices,
    }


class TensorBoard:
    """Event files of one start of a run. The x-axis is the step, and `tokens` one of the curves."""

    def __init__(self, folder: Path, *, first_step: int):
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


def start_tensorboard(settings: LoggerSettings, *, folder: Path, first_step: int) -> TensorBoard | None:
    """The run's TensorBoard, or None if it is off. Raises TrainingError if tensorboard is not installed."""
    return TensorBoard(folder / "tensorboard", first_step=first_step) if settings.tensorboard else None
