"""Error of the gradients against time, of the settings of SageBwd that were timed.

    python -m scripts.paper.error_against_time

Brings together what other commands measured, from one folder of results:

    time     of bench_attention*.json: forward and backward, causal, as a multiple of the default's in the
             same run and shape, replayed as a CUDA graph if it was; of a setting that several files have,
             the newest
    error    of gradient_error.json: relative L2 of dQ and dK of the algorithm, at the last step of each
             trained model, mean over layers and heads, geometric mean over models

Writes OUT.json and OUT.png. 16-bit attention is included with the time of PyTorch's kernels; its error is
that of SageBwd with 16-bit products.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from data.files import write_json
from scripts.bench.attention_tables import DEFAULT, relative_times
from scripts.bench.measuring import describe_run
from scripts.command_line import command_parser
from scripts.output import with_ending
from scripts.paper import drawing
from scripts.paper import gradient_error_rows as study
from scripts.paper.attention_errors import TITLES
from scripts.paper.gradient_error_rows import PARTS
from scripts.paper.result_files import OUT, DamagedResult, Results

PROGRAM = "python -m scripts.paper.error_against_time"
GRAPH = "both, graph"

#: What scripts.bench.attention calls it: what scripts.paper.gradient_error does.
VARIANT_OF = {
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
        timed = [results.json(name) for name in names_of_benchmarks(folder)]
        errors = errors_of(results.json("gradient_error.json"))
    except DamagedResult as error:
        raise SystemExit(str(error)) from error
    times = newest_times(timed, arguments.head_dim)
    rows = [
        {"setting": name, "variant": VARIANT_OF[name], "commit": times[name]["commit"]}
        | {"time": times[name]["time"], "relative_l2": errors[VARIANT_OF[name]]}
        for name in VARIANT_OF
        if name in times and VARIANT_OF[name] in errors
    ]
    if not rows:
        print(f"no setting in {folder} was both timed on a GPU and studied, so nothing is written")
        return
    shown = Namespace(results=str(folder), head_dim=arguments.head_dim, device="cpu")
    values = "time: multiple of the default's, by tokens; relative_l2: geometric mean over models"
    result = {"values": values, **describe_run(PROGRAM, argv, shown, ()), "rows": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(with_ending(arguments.out, ".json"), result)
    drawing.save(draw(rows, arguments.head_dim), with_ending(arguments.out, ".png"))
    print(f"{len(rows)} settings, written to {arguments.out}.json and .png")


def names_of_benchmarks(folder: Path) -> list[str]:
    """bench_attention*.json, plain or compressed, by their plain names."""
    found = [*folder.glob("bench_attention*.json"), *folder.glob("bench_attention*.json.gz")]
    return sorted({path.name.removesuffix(".gz") for path in found})


def parse_arguments(argv: list[str] | None) -> Namespace:
    parser = command_parser(PROGRAM, __doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="folder to read (default %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT / "error_against_time",
        help="beginning of the files' names (default %(default)s)",
    )
    parser.add_argument("--head-dim", type=int, default=64, help="of the times (default %(default)s)")
    arguments = parser.parse_args(argv)
    if not Results(arguments.results).has("gradient_error.json"):
        parser.error(
            f"{arguments.results} has no gradient_error.json; python -m scripts.paper.gradient_error --out "
            f"{shlex.quote(str(arguments.results / 'gradient_error'))} makes it"
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
    sources = [study.HeadSource(**source) for source in data["sources"].values()]
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
    """A panel each for dQ and dK: a point for each setting, at the length that most were timed at."""
    counts = [tokens for row in rows for tokens in row["time"]]
    tokens = max(sorted(set(counts)), key=counts.count)
    figure, panels = drawing.grid(1, len(PARTS), width=4.6, height=3.8, sharey=True)
    looks = drawing.styles([row["setting"] for row in rows])
    for axes, tensor in zip(panels[0], PARTS, strict=True):
        for row in rows:
            if tokens in row["time"]:
                look = looks[row["setting"]]
                point = row["time"][tokens], row["relative_l2"][tensor]
                axes.plot(*point, look.marker, color=look.color, label=row["setting"], markersize=8)
        drawing.log_axis(axes.yaxis)
        axes.set_xlabel("time, default = 1")
        axes.set_title(f"Error of {TITLES[tensor]}")
        axes.grid(alpha=0.3, which="both")
    panels[0][0].set_ylabel("relative L2, mean over runs")
    drawing.legend_below(figure, *panels[0][0].get_legend_handles_labels())
    figure.suptitle(
        f"Error of the gradients against time, forward and backward, causal, D {head_dim}, N {tokens}",
        fontsize=11,
    )
    return figure


if __name__ == "__main__":
    main()
