"""Compare training runs over seeds: final losses, divergence, differences and how sure they are.

    python -m scripts.paper.curves runs/35m-131k/* --out results/figure1a

Reads run directories (config.yaml, metrics.jsonl, environment.jsonl) and writes OUT.json, with the loss
curves thinned out, so that the runs themselves need not be kept, and OUT.png. Such a JSON file may be given
in the place of its runs, so that later ones are compared with them:

    python -m scripts.paper.curves results/figure1a.json runs/more/* --out results/figure1a

Runs of one model and schedule make a group; within it, runs that differ in the seed alone make a variant.

    final loss   mean training loss of the last tenth of the steps
    diverged     a loss or gradient that is not finite, or at the end a final loss more than 0.3 above the
                 lowest mean of an earlier tenth
    difference   of two variants' final losses, with a 95% interval. The runs of a seed share initialisation
                 and order of the data, so a loss is taken as variant + seed + noise, by least squares over
                 the group; the noise is what that leaves. One seed gives no interval, unless a run of it
                 was repeated: then the noise is that between repetitions.
"""

from __future__ import annotations

import argparse
import itertools
import json
from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from data.files import write_json
from model.config import LlamaConfig, parameter_count
from sagebwd import SageConfig
from scripts.bench.measuring import beside, describe_run, finite, save_figure
from scripts.paper.results import final_loss, held_out_loss
from trainer.plot import series
from trainer.run_directory import RunDirectory, read_metrics

PROGRAM = "python -m scripts.paper.curves"
POINTS = 100  # of a thinned curve
DIVERGED_BY = 0.3  # nats above the lowest tenth

#: 97.5% quantiles of Student's t for 1, 2, … degrees of freedom, and of the normal distribution.
STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
NORMAL = 1.96


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        runs = [run for path in arguments.runs for run in read(path)]
        finished = [run for run in runs if run["finished"] or run["diverged"]]
        if not finished:
            raise ValueError(
                f"none of the {len(runs)} runs is finished; train them first: the same train.py commands"
            )
        groups = compare(finished)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    result = {**describe(argv, arguments, finished), "runs": runs, "groups": groups}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(beside(arguments.out, ".json"), finite(result))
    draw(result["groups"], finished, beside(arguments.out, ".png"))
    print(f"{len(finished)} of {len(runs)} runs compared, written to {arguments.out}.json and .png")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or JSON files of this script")
    parser.add_argument("--out", type=Path, required=True, help="what the files' names begin with")
    parser.add_argument("--item", help="the experiment these runs belong to (scripts/paper/experiments.py)")
    parser.add_argument("--scale", default="scaled", help="its scale (default %(default)s)")
    return parser.parse_args(argv)


# --- Reading runs -------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """The run of a directory, or those of an earlier comparison. Raises ValueError if it is neither."""
    if path.suffix != ".json":
        return [read_run(path)]
    try:
        return json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no comparison that this script wrote ({error}); give OUT.json of an earlier one"
        ) from error


def read_run(path: Path) -> dict[str, Any]:
    """What a run directory says, curves thinned. Raises ValueError if it holds no run."""
    directory = RunDirectory(path)
    environment = path / "environment.jsonl"
    for file in (directory.config, directory.metrics, environment):
        if not file.exists():
            raise ValueError(f"{path} holds no {file.name}, so it is no run directory; train the run first")
    config = without_places(OmegaConf.to_container(OmegaConf.load(directory.config)))
    records = read_metrics(directory.metrics)
    starts = read_metrics(environment)
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
        "held_out_loss": held_out_loss(records),
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


def without_places(config: dict[str, Any]) -> dict[str, Any]:
    """The settings without where things lay on the machine of the run: of files the names remain."""
    kept = {name: value for name, value in config.items() if name not in ("run_dir", "runs_dir")}
    data = {name: value for name, value in config["data"].items() if name != "root"}
    for name in ("path", "val_path"):
        data[name] = data.get(name) and Path(data[name]).name
    if kept.get("init_from"):
        kept["init_from"] = Path(kept["init_from"]).parent.name  # the run that it starts from
    return kept | {"data": data}


def group_of(config: dict[str, Any]) -> dict[str, Any]:
    """What runs that may be compared share."""
    tokens_per_step = config["tps"]["tokens_per_step"] // config["tps"]["divide_by"]
    steps = config["steps"] or config["total_tokens"] // tokens_per_step
    return {
        "parameters": parameter_count(LlamaConfig(**(config["model"] | {"qk_norm": False}))),
        "context": config["context"],
        "tokens_per_step": tokens_per_step,
        "steps": steps,
        "lr": config["optimizer"]["lr"],
        "warmup_steps": config["tps"]["warmup_steps"],
        "text": config["data"]["path"] or config["data"]["source"],
        "init_from": config.get("init_from"),
    }


def variant_of(config: dict[str, Any]) -> str:
    """The attention's settings and QK-norm, in words: "SageBwd, no QK-norm"."""
    attention = dict(config["attention"])
    if preset := preset_of(attention):
        return ", ".join([f"SageBwd, {preset}", *([] if config["model"]["qk_norm"] else ["no QK-norm"])])
    backend, smooth_k, smooth_q = (attention.pop(name, None) for name in ("backend", "smooth_k", "smooth_q"))
    parts = [{"fpa": "full precision", "sagebwd": "SageBwd"}.get(backend, backend)]
    if not config["model"]["qk_norm"]:
        parts.append("no QK-norm")
    if backend == "sagebwd" and not (smooth_k and not smooth_q):
        smoothed = [name for name, on in (("Q", smooth_q), ("K", smooth_k)) if on]
        parts.append(f"{'+'.join(smoothed) or 'no'} smoothing")
    defaults = json.loads(json.dumps(asdict(SageConfig())))  # config.yaml has every setting, and lists
    for name, value in attention.items():
        if value not in (None, defaults.get(name)) and name not in ("implementation", "sdpa"):
            parts.append(f"{name}={json.dumps(value).strip(chr(34))}")
    return ", ".join(parts)


def preset_of(attention: dict[str, Any]) -> str | None:
    """The name of the preset whose settings these are (attention=sagebwd_… of the configs), if of any."""
    switches = {field.name for field in fields(SageConfig)}
    given = {name: value for name, value in attention.items() if name in switches and value is not None}
    if attention["backend"] != "sagebwd":
        return None
    presets = {"accurate": SageConfig.accurate(), "consistent": SageConfig.consistent()}
    return next((name for name, preset in presets.items() if SageConfig(**given) == preset), None)


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
    kept = (("step", "step"), *((key, key.removeprefix("probe/")) for key in (measured or [{}])[-1]))
    chosen = (measured or [{}])[-1]
    return {
        short: chosen[key]
        for key, short in kept
        if key in chosen and (key == "step" or key.startswith("probe/layer"))
    }


# --- Comparing ----------------------------------------------------------------------------------------------


def compare(runs: list[dict]) -> list[dict[str, Any]]:
    """The groups, each with its variants and the differences between all of them.

    Raises ValueError if one run is given twice.
    """
    groups: dict[str, list[dict]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run["group"]), []).append(run)
    return [compare_group(json.loads(key), own) for key, own in groups.items()]


def compare_group(group: dict[str, Any], runs: list[dict]) -> dict[str, Any]:
    variants: dict[str, list[dict]] = {}
    for run in runs:
        variants.setdefault(run["variant"], []).append(run)
    for own in variants.values():
        check_runs(own)
    # A variant of which one seed diverged has no mean to compare.
    cells = [
        (name, run["seed"], run["final_loss"])
        for name, own in variants.items()
        if not any(run["diverged"] for run in own)
        for run in own
    ]
    return {
        **group,
        "variants": [summary(name, own) for name, own in variants.items()],
        **differences(cells),
    }


def check_runs(runs: list[dict]) -> None:
    """Raise ValueError if two runs are one and the same: a repetition of a seed has a curve of its own."""
    for one, other in itertools.combinations(runs, 2):
        if one["seed"] == other["seed"] and one["curve"] == other["curve"]:
            raise ValueError(
                f"{one['name']} and {other['name']}, {one['variant']} with seed {one['seed']}, are the same "
                "run twice; leave one out"
            )


def summary(name: str, runs: list[dict]) -> dict[str, Any]:
    """A variant over its seeds. spread: largest minus smallest final loss of all runs."""
    whole = [run["final_loss"] for run in runs if run["final_loss"] is not None]
    return {
        "variant": name,
        "attention": runs[0]["attention"],
        "qk_norm": runs[0]["qk_norm"],
        "seeds": sorted({run["seed"] for run in runs}),
        "runs": len(runs),
        "diverged": sum(bool(run["diverged"]) for run in runs),
        "final_loss": mean_over_seeds(runs, "final_loss"),
        "spread": max(whole) - min(whole) if len(whole) > 1 else None,
        "held_out_loss": mean_over_seeds(runs, "held_out_loss"),
    }


def mean_over_seeds(runs: list[dict], loss: str) -> float | None:
    """A seed that was repeated counts once, with its mean."""
    by_seed: dict[int, list[float]] = {}
    for run in runs:
        if run[loss] is not None:
            by_seed.setdefault(run["seed"], []).append(run[loss])
    return mean_or_none([float(np.mean(losses)) for losses in by_seed.values()])


def mean_or_none(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def differences(cells: list[tuple[str, int, float]]) -> dict[str, Any]:
    """Differences of all pairs of variants that have a seed in common, and the noise.

    cells: variant, seed and loss of each run. Loss = variant + seed + noise is fitted by least squares, so
    that a run that is missing costs a degree of freedom and not the comparison of the others.
    """
    seeds_of: dict[str, set[int]] = {}
    for variant, seed, _ in cells:
        seeds_of.setdefault(variant, set()).add(seed)
    variants, seeds = list(seeds_of), sorted({seed for _, seed, _ in cells})
    design = np.array(
        [[name in (variant, seed) for name in (*variants, *seeds)] for variant, seed, _ in cells], dtype=float
    )
    values = np.array([loss for *_, loss in cells])
    if not cells:
        return {"noise": None, "degrees_of_freedom": 0, "differences": []}
    covariance = np.linalg.pinv(design.T @ design)  # of the effects, in units of the noise's variance
    effects = covariance @ design.T @ values
    degrees = len(cells) - int(np.linalg.matrix_rank(design))
    noise = None
    if degrees:
        noise = float(np.sqrt(np.square(values - design @ effects).sum() / degrees))

    def difference(i: int, j: int) -> dict[str, Any]:
        variance = covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]
        return {
            "of": variants[i],
            "minus": variants[j],
            "mean": float(effects[i] - effects[j]),
            "half_width": None if noise is None else quantile(degrees) * noise * float(variance) ** 0.5,
            "seeds": len(seeds_of[variants[i]] & seeds_of[variants[j]]),
        }

    pairs = [difference(i, j) for i, j in itertools.permutations(range(len(variants)), 2)]
    return {
        "noise": noise,
        "degrees_of_freedom": degrees,
        "differences": [pair for pair in pairs if pair["seeds"]],
    }


def quantile(degrees: int) -> float:
    """97.5% quantile of Student's t."""
    if degrees <= len(STUDENT):
        return STUDENT[degrees - 1]
    return NORMAL + (NORMAL**3 + NORMAL) / (4 * degrees)  # its expansion in 1 / degrees, right to 1%


# --- Files --------------------------------------------------------------------------------------------------


def describe(argv: list[str] | None, arguments: Namespace, runs: list[dict]) -> dict[str, Any]:
    """What the numbers are; the hardware and commits are the runs' own."""
    settings = Namespace(item=arguments.item, scale=arguments.scale, device="cpu")
    devices = sorted({run["device"] for run in runs})
    return {
        "values": "losses in nats per token; difference ± half_width: 95% interval",
        **describe_run(PROGRAM, argv, settings, ()),
        "item": arguments.item,
        "scale": arguments.scale,
        "hardware": ", ".join(devices),
    }


def draw(groups: list[dict], runs: list[dict], path: Path) -> None:
    """A column for each group: loss over tokens, and below it the distance from the group's first variant."""
    import matplotlib  # slow to import; only needed when all is read

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, grid = plt.subplots(
        2, len(groups), figsize=(7 * len(groups), 6), squeeze=False, sharex="col", layout="constrained",
        height_ratios=(3, 2),
    )  # fmt: skip
    for (losses, gaps), group in zip(grid.T, groups, strict=True):
        own = [run for run in runs if all(group[key] == value for key, value in run["group"].items())]
        names = [variant["variant"] for variant in group["variants"]]
        for run in own:
            color, seen = f"C{names.index(run['variant'])}", {line.get_label() for line in losses.lines}
            label = run["variant"] if run["variant"] not in seen else f"_{run['name']}"
            style = "--" if run["diverged"] else "-"
            losses.plot(*run["curve"].values(), style, color=color, label=label, linewidth=1.2)
            draw_gap(gaps, run, own, names[0], color, style)
        losses.set_title(group_name(group), fontsize=10)
        losses.set_ylabel("training loss")
        losses.legend(fontsize=8)
        gaps.axhline(0, color="C0", linewidth=1)
        gaps.set_ylabel(f"minus {names[0]},\nsame seed")
        gaps.set_xlabel("tokens")
        gaps.xaxis.set_major_formatter(EngFormatter(sep=""))
        losses.grid(alpha=0.3)
        gaps.grid(alpha=0.3)
    save_figure(figure, path)
    plt.close(figure)


def draw_gap(axes: Any, run: dict, runs: list[dict], first: str, color: str, style: str) -> None:
    """The run's loss minus that of the first variant's first run of the same seed.

    Nothing for a run that ended before the other: the points of its thinned curve are means of other steps.
    """
    baseline = [other for other in runs if other["variant"] == first and other["seed"] == run["seed"]]
    if not baseline or run is baseline[0] or run["curve"]["tokens"] != baseline[0]["curve"]["tokens"]:
        return
    gaps = np.subtract(run["curve"]["loss"], baseline[0]["curve"]["loss"])
    axes.plot(run["curve"]["tokens"], gaps, style, color=color, linewidth=1.2)


def group_name(group: dict[str, Any]) -> str:
    """ "35M parameters, 131,072 tokens per step, 382 steps"."""
    size = f"{group['parameters'] / 1e6:.3g}M parameters"
    start = ", from trained weights" if group["init_from"] else ""
    schedule = f"{group['tokens_per_step']:,} tokens per step, {group['steps']:,} steps, lr {group['lr']:g}"
    return f"{size}, {schedule}{start}"


if __name__ == "__main__":
    main()
