"""Store training runs for a comparison: every loss, settings, text, commit; and draw their curves.

    python -m scripts.paper.curves runs/35m-131k/* --out runs/paper/figure1a
    python -m scripts.paper.curves runs/no_qk_norm/* --window 130 152 --out runs/paper/loss_gap

Reads run directories (config.yaml, metrics.jsonl, environment.jsonl) and writes OUT.json.gz and, of runs that
are no branches (scripts.paper.branches draws them), OUT.png. Such a JSON file replaces its runs, whose
directories may be deleted: name it together with further runs to merge them. scripts.paper.losses compares
the runs of all such files.

    final loss   mean training loss of the last tenth of the steps, or of the steps of --window
    diverged     a loss or gradient that is not finite, or at the end a final loss more than 0.3 above the
                 lowest mean of an earlier tenth

Only runs on the same text are compared. Its fingerprint is in the run's checkpoints; --text names the text of
runs that were copied without them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ends_with_message
from common.files import read_lines
from common.statistics import last_tenth
from common.terminal import command_parser, positive_int
from model.config import LlamaConfig, parameter_count
from scripts.bench.measuring import describe_run
from scripts.output import read_json, save_figure, with_ending, write_compressed
from scripts.paper.experiments import items
from scripts.paper.losses import compare, losses_table
from scripts.paper.pictures import draw_curves
from scripts.paper.variants import variant_of
from scripts.runs import fingerprint
from trainer import identity
from trainer.plot import SET, named_sets, series
from trainer.run_directory import RunDirectory
from trainer.settings import PAPER_TOKENS

PROGRAM = "python -m scripts.paper.curves"
DIVERGED_BY = 0.3  # nats above the lowest tenth
DIGITS = 5  # of a stored loss, after the point

Window = Sequence[int] | None  # first and last step whose mean loss counts; None: the last tenth of the run


@ends_with_message()
def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    runs = [run for path in arguments.runs for run in read(path, arguments.window, arguments.text)]
    finished = [run for run in runs if run["finished"] or run["diverged"]]
    if not finished:
        reached = "reached the window" if arguments.window else "is finished"
        raise ValueError(
            f"none of the {len(runs)} runs {reached}; train them first: the same train.py commands"
        )
    rows = compare(finished)
    result = {
        "values": "losses in nats per token",
        **describe_run(PROGRAM, argv, Namespace(device="cpu"), ()),
        "hardware": ", ".join(sorted({run["device"] for run in finished})),  # of the runs, as their commits
        "runs": runs,
    }
    written = write_compressed(arguments.out, result)
    item = items().get(arguments.out.name)
    title = item.title if item else "Training loss"
    whole = [run for run in finished if "branch_step" not in run["group"]]
    if whole:
        save_figure(draw_curves(whole, title), with_ending(arguments.out, ".png"))
    print(losses_table(rows))
    print(f"{len(finished)} of {len(runs)} runs compared, written to {written}")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="run directories, or OUT.json.gz of this command")
    add("--out", type=Path, required=True, help="beginning of the files' names; of an item, its name")
    add(
        "--window", nargs=2, type=positive_int, metavar=("FIRST", "LAST"), help="steps whose mean loss counts"
    )
    add("--text", help="the text's fingerprint, of runs without checkpoints")
    return parser.parse_args(argv)


# --- A run --------------------------------------------------------------------------------------------------


def read(path: Path, window: Window = None, text: str | None = None) -> list[dict[str, Any]]:
    """The run of a directory, or those of an earlier comparison. Raises ValueError if it is neither."""
    path = path.with_name(path.name.removesuffix(".gz"))
    if path.suffix != ".json":
        return [read_run(path, window, text)]
    try:
        return read_json(path)["runs"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a comparison that scripts.paper.curves wrote ({error!r}); give an OUT.json.gz "
            "of that command"
        ) from error


def read_run(path: Path, window: Window = None, text: str | None = None) -> dict[str, Any]:
    """What a run directory says. Raises ValueError if it holds no run.

    text: the fingerprint of the text of a run that has no checkpoint, which would say it.
    """
    directory = RunDirectory(path)
    for file in (directory.config, directory.metrics, directory.environment):
        if not file.exists():
            raise ValueError(
                f"{path} holds no {file.name}, so it is not a run directory; train the run first"
            )
    config = without_places(identity.read(directory.config))
    records = directory.records()
    directory.check(directory.environment)
    start = read_lines(directory.environment)[-1]
    tokens, losses = series(records, "loss")
    losses = losses.round(DIGITS)
    steps = [record["step"] for record in records if record.get("loss") is not None]
    reached = steps[-1] if steps else 0
    group = group_of(config, fingerprint(directory) or text)
    return {
        "name": path.name,
        "group": group | ({"window": list(window)} if window else {}),
        "variant": variant_of(config),
        "attention": config["attention"]["backend"],
        "qk_norm": config["model"]["qk_norm"],
        "seed": config["seed"],
        "finished": reached >= window[1] if window else directory.is_finished,
        "diverged": divergence(directory, losses),
        "steps": reached,
        "final_loss": None if directory.diverged_at() else mean_loss(steps, losses, window),
        "validation": validation_of(records, window),
        "curve": {"tokens": tokens.astype(int).tolist(), "loss": losses.tolist()},
        "device": start["device"],
        "torch": start["torch"],
        "commit": start["commit"],
        "config": config,
    }


def mean_loss(steps: list[int], losses: np.ndarray, window: Window) -> float | None:
    """Mean training loss of the window, or of the last tenth of the logged steps; None without any."""
    losses = losses[[window[0] <= step <= window[1] for step in steps]] if window else last_tenth(losses)
    return float(losses.mean()) if len(losses) else None


def validation_of(records: list[dict], window: Window) -> dict[str, dict[str, float]]:
    """By validation set ("" is the run's own), the last loss within the window and its step."""
    within = [record for record in records if not window or record["step"] <= window[1]]
    found = {}
    for name, key in {"": "val_loss", **{name: SET + name for name in named_sets([records])}}.items():
        measured = [record for record in within if record.get(key) is not None]
        if measured:
            found[name] = {"step": measured[-1]["step"], "loss": measured[-1][key]}
    return found


def divergence(directory: RunDirectory, losses: np.ndarray) -> str | None:
    """By which rule the run diverged, or None."""
    step = directory.diverged_at()
    if step:
        return f"loss or gradient not finite at step {step}"
    if not directory.is_finished or len(losses) < 20:  # a run under way may come down again
        return None
    *earlier, last = (part.mean() for part in np.array_split(losses, 10))
    if last - min(earlier) > DIVERGED_BY:
        return f"ends {last - min(earlier):.2f} above its lowest tenth"
    return None


def without_places(config: dict[str, Any]) -> dict[str, Any]:
    """The settings without the folders of the machine that the run was on; of files the names remain."""
    settings = {name: value for name, value in config.items() if name not in ("run_dir", "runs_dir")}
    data = {name: value for name, value in config["data"].items() if name != "root"}
    for name in ("path", "val_path"):
        data[name] = data.get(name) and Path(data[name]).name
    if settings.get("init_from"):
        settings["init_from"] = Path(settings["init_from"]).parent.name  # the run that it starts from
    if settings.get("branch_from"):
        settings["branch_from"] = Path(settings["branch_from"]).name
    return settings | {"data": data}


def group_of(config: dict[str, Any], text: str | None) -> dict[str, Any]:
    """What runs that may be compared share; what few runs set is left out where it has its default.

    text: the fingerprint of the tokens; without it the name of the files counts.
    """
    tokens_per_step = config["tps"]["tokens_per_step"] // config["tps"]["divide_by"]
    steps = config["steps"] or (config["total_tokens"] or PAPER_TOKENS) // tokens_per_step
    unusual = {
        "qk_norm_gain": (config["model"].get("qk_norm_gain", 1.0), 1.0),
        "train_sequences": (config.get("train_sequences"), None),
        "branch_step": (config.get("branch_step"), None),  # each seed has a trunk of its own
    }
    return {
        "parameters": parameter_count(LlamaConfig(**(config["model"] | {"qk_norm": False}))),
        "context": config["context"],
        "tokens_per_step": tokens_per_step,
        "steps": steps,
        "lr": config["optimizer"]["lr"],
        "warmup_steps": config["tps"]["warmup_steps"],
        "text": text or config["data"]["path"] or config["data"]["source"],
        "init_from": config.get("init_from"),
        **{name: value for name, (value, usual) in unusual.items() if value != usual},
    }


if __name__ == "__main__":
    main()
