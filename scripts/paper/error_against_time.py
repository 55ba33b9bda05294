"""Error of the gradients against time, of the settings of SageBwd that were timed.

    python -m scripts.paper.error_against_time

Brings together what other scripts measured, in one folder of results:

    time     of bench_attention*.json: forward and backward, causal, as a multiple of the default's in the
             same run and shape, replayed as a CUDA graph if it was; of a setting that several files have,
             the newest
    error    of gradient_error.json: relative L2 of dQ and dK of the algorithm, at the last step of each
             trained model, mean over layers and heads, geometric mean over models

Writes error_against_time.json and .png there. 16-bit attention, whose time is that of PyTorch's kernels,
stands beside the settings; its error is that of SageBwd with all products in 16 bit.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from data.files import write_json
from scripts.bench.attention_tables import DEFAULT, relative_times
from scripts.bench.measuring import describe_run
from scripts.paper import gradient_error as study
from scripts.paper.gradient_error import PARTS, TITLES, new_figure, save
from scripts.paper.results import DamagedResult, Results

PROGRAM = "python -m scripts.paper.error_against_time"
GRAPH = "both, graph"

#: What scripts.bench.attention calls it: what scripts.paper.gradient_error does.
VARIANTS = {
    DEFAULT: "default",
    "sagebwd paper": "paper",
    "sagebwd smooth V": "V-smoothing",
    "sagebwd strictly causal": "strictly causal",
    "sagebwd unsigned P": "unsigned P",
    "sagebwd compensated O": "16-bit O, compensated",
    "sagebwd P in 16 bit": "16-bit O, dV",
    "sagebwd consistent": "consistent",
    "sagebwd accurate": "accurate",
    "cuDNN": "all in 16 bit",
    "FlashAttention-2": "all in 16 bit",
}


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    folder, results = arguments.results, Results(arguments.results)
    try:
        timed = [results.json(path.name) for path in sorted(folder.glob("bench_attention*.json"))]
        errors = errors_of(results.json("gradient_error.json"))
    except DamagedResult as error:
        raise SystemExit(str(error)) from error
    times = newest_times(timed, arguments.head_dim)
    rows = [
        {"setting": name, "variant": VARIANTS[name], "commit": times[name]["commit"]}
        | {"time": times[name]["time"], "relative_l2": errors[VARIANTS[name]]}
        for name in VARIANTS
        if name in times and VARIANTS[name] in errors
    ]
    if not rows:
        print(f"no setting in {folder} was both timed on a GPU and studied, so nothing is written")
        return
    shown = Namespace(results=str(folder), head_dim=arguments.head_dim, device="cpu")
    values = "time: multiple of the default's, by tokens; relative_l2: geometric mean over models"
    result = {"values": values, **describe_run(PROGRAM, argv, shown, ()), "rows": rows}
    write_json(folder / "error_against_time.json", result)
    save(draw(rows, arguments.head_dim), folder / "error_against_time.png")
    print(f"{len(rows)} settings, written to {folder}/error_against_time.json and .png")


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder (default %(default)s)")
    parser.add_argument("--head-dim", type=int, default=64, help="of the times (default %(default)s)")
    arguments = parser.parse_args(argv)
    if not (arguments.results / "gradient_error.json").exists():
        parser.error(
            f"{arguments.results} has no gradient_error.json; python -m scripts.paper.gradient_error makes it"
        )
    return arguments


def newest_times(files: list[dict], head_dim: int) -> dict[str, dict[str, Any]]:
    """{implementation: {"commit": …, "time": {tokens: multiple of the default's}}}, the newest of each."""
    newest: dict[str, dict[str, Any]] = {}
    for data in sorted(files, key=lambda data: data["date"]):
        if data["hardware"]["name"] == "cpu":  # times of the reference
            continue
        mode = GRAPH if any(row["mode"] == GRAPH for row in data["rows"]) else "both"
        for name, time in relative_times(data["rows"], mode, head_dim, causal=True).items():
            newest[name] = {"commit": data["commit"], "time": time}
    return newest


def errors_of(data: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{variant: {"dq": …, "dk": …}}."""
    sources = [study.Source(**source) for source in data["sources"].values()]
    rows = [study.Row(**row) for row in data["rows"]]
    panels = {
        tensor: [study.points_of(rows, source, tensor) for source in sources if source.is_last]
        for tensor in PARTS
    }
    names = panels["dq"][0]
    return {
        name: {tensor: geometric_mean([own[name][1] for own in panels[tensor]]) for tensor in PARTS}
        for name in names
    }


def draw(rows: list[dict], head_dim: int) -> Any:
    """dQ and dK beside each other: a point for each setting, at the length that most were timed at."""
    counts = [tokens for row in rows for tokens in row["time"]]
    tokens = max(sorted(set(counts)), key=counts.count)
    figure, panels = new_figure(1, len(PARTS), width=5.5, height=4)
    for axes, tensor in zip(panels[0], PARTS, strict=True):
        for row in rows:
            if tokens in row["time"]:
                axes.plot(row["time"][tokens], row["relative_l2"][tensor], "o", label=row["setting"])
        axes.set_yscale("log")
        axes.set_xlabel(f"time, default = 1; causal, D {head_dim}, N {tokens}")
        axes.set_ylabel(f"relative L2 of {TITLES[tensor]}")
        axes.grid(alpha=0.3, which="both")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure


if __name__ == "__main__":
    main()
