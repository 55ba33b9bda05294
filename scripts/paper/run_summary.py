"""What a comparison stores of a training run: losses, a thinned curve, settings, how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from model.config import LlamaConfig, parameter_count
from scripts.paper.result_files import read_json
from scripts.paper.run_metrics import final_loss, last_tenth, validation_loss
from scripts.paper.variants import variant_of
from trainer.plot import series
from trainer.run_directory import RunDirectory, read_lines, read_metrics

POINTS = 100  # of a thinned curve
DIVERGED_BY = 0.3  # nats above the lowest tenth


def read(path: Path) -> list[dict[str, Any]]:
    """The run of a directory, or those of an earlier comparison. Raises ValueError if it is neither."""
    path = path.with_suffix("") if path.name.endswith(".json.gz") else path
    if path.suffix != ".json":
        return [read_run(path)]
    try:
        return stored_runs(read_json(path))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a comparison that scripts.paper.curves wrote ({error!r}); give an OUT.json.gz "
            "of that command"
        ) from error


def stored_runs(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of an earlier comparison, as they are named now: older files spell out what is a preset.

    Raises ValueError if the final loss of a run is not the mean of the losses stored with it, KeyError if
    these are no runs.
    """
    for run in comparison["runs"]:
        losses = run.get("last_losses")
        if losses and run["final_loss"] is not None and run["final_loss"] != float(np.mean(losses)):
            raise ValueError(
                f"{run['name']} has the final loss {run['final_loss']}, but its last losses have the mean "
                f"{float(np.mean(losses))}"
            )
    return [run | {"variant": variant_of(run["config"])} for run in comparison["runs"]]


def read_run(path: Path) -> dict[str, Any]:
    """What a run directory says, curves thinned. Raises ValueError if it holds no run."""
    directory = RunDirectory(path)
    environment = path / "environment.jsonl"
    for file in (directory.config, directory.metrics, environment):
        if not file.exists():
            raise ValueError(
                f"{path} holds no {file.name}, so it is not a run directory; train the run first"
            )
    config = without_places(OmegaConf.to_container(OmegaConf.load(directory.config)))
    records = read_metrics(directory.metrics)
    starts = read_lines(environment)
    diverged = divergence(directory, records)
    return {
        "name": path.name,
        "group": group_of(config),
        "variant": variant_of(config),
        "attention": config["attention"]["backend"],
        "qk_norm": config["model"]["qk_norm"],
        "seed": config["seed"],
        "finished": directory.is_finished,
        "diverged": diverged,
        "steps": records[-1]["step"] if records else 0,
        "final_loss": None if not records or directory.diverged_at() else final_loss(records),
        "last_losses": [float(loss) for loss in last_tenth(records)],
        "held_out_loss": validation_loss(records),
        "curve": thin(*series(records, "loss")),
        "last_probe": last_probe(records),
        "device": starts[-1]["device"],
        "torch": starts[-1]["torch"],
        "commit": starts[-1]["commit"],
        "config": config,
    }


def divergence(directory: RunDirectory, records: list[dict]) -> str | None:
    """By which rule the run diverged, or None."""
    step = directory.diverged_at()
    if step:
        return f"loss or gradient not finite at step {step}"
    losses = series(records, "loss")[1]
    if not directory.is_finished or len(losses) < 20:  # a run under way may come down again
        return None
    *earlier, last = (part.mean() for part in np.array_split(losses, 10))
    if last - min(earlier) > DIVERGED_BY:
        return f"ends {last - min(earlier):.2f} above its lowest tenth"
    return None


def would_diverge(directory: RunDirectory) -> bool:
    """Whether the run diverged, or was left out because others had: then it has no log."""
    if directory.metrics.exists():
        return divergence(directory, read_metrics(directory.metrics)) is not None
    return not directory.path.with_name(f"{directory.path.name}.log").exists()


def without_places(config: dict[str, Any]) -> dict[str, Any]:
    """The settings without the folders of the machine that the run was on; of files the names remain."""
    settings = {name: value for name, value in config.items() if name not in ("run_dir", "runs_dir")}
    data = {name: value for name, value in config["data"].items() if name != "root"}
    for name in ("path", "val_path"):
        data[name] = data.get(name) and Path(data[name]).name
    if settings.get("init_from"):
        settings["init_from"] = Path(settings["init_from"]).parent.name  # the run that it starts from
    return settings | {"data": data}


def group_of(config: dict[str, Any]) -> dict[str, Any]:
    """What runs that may be compared share; what few runs set is left out where it has its default."""
    tokens_per_step = config["tps"]["tokens_per_step"] // config["tps"]["divide_by"]
    steps = config["steps"] or config["total_tokens"] // tokens_per_step
    gain, sequences = config["model"].get("qk_norm_gain", 1.0), config.get("train_sequences")
    unusual = {"qk_norm_gain": (gain, 1.0), "train_sequences": (sequences, None)}
    return {
        "parameters": parameter_count(LlamaConfig(**(config["model"] | {"qk_norm": False}))),
        "context": config["context"],
        "tokens_per_step": tokens_per_step,
        "steps": steps,
        "lr": config["optimizer"]["lr"],
        "warmup_steps": config["tps"]["warmup_steps"],
        "text": config["data"]["path"] or config["data"]["source"],
        "init_from": config.get("init_from"),
        **{name: value for name, (value, usual) in unusual.items() if value != usual},
    }


def thin(tokens: np.ndarray, values: np.ndarray) -> dict[str, list[float]]:
    """At most POINTS points, each the mean of a stretch of the curve."""
    if not len(values):
        return {"tokens": [], "loss": []}
    parts = min(POINTS, len(values))
    return {
        "tokens": [int(part[-1]) for part in np.array_split(tokens, parts)],
        "loss": [round(float(part.mean()), 4) for part in np.array_split(values, parts)],
    }


def last_probe(records: list[dict]) -> dict[str, float]:
    """The last measurement of SageBwd's error in this run's layers: relative L2, RMS, largest logit."""
    measured = [record for record in records if "probe/seconds" in record]
    if not measured:
        return {}
    last = measured[-1]
    layers = {
        key.removeprefix("probe/"): value for key, value in last.items() if key.startswith("probe/layer")
    }
    return {"step": last["step"], **layers}
