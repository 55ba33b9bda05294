"""Fill the report, results/README.md, from its template and the JSON files of results/.

    python -m scripts.paper.report                # write results/README.md
    python -m scripts.paper.report --names        # what a template may name, with today's values

The template, results/report.template.md, is written by hand. `{{name}}` in it is a number or table of
`facts`.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from common.files import write_text
from common.terminal import command_parser
from scripts.output import number, read_json, table
from scripts.paper import branches
from scripts.paper import published as paper
from scripts.paper.gradient_bias_tables import count, decimal
from scripts.paper.losses import Row, read_rows
from scripts.paper.table1 import TENSORS, TITLES
from scripts.paper.variants import FULL_PRECISION, SAGE
from trainer.plot import PROBED

RESULTS = Path("results")
#: Errors this close to the paper's count as the same.
SAME = 0.1
FIELD = re.compile(r"\{\{(.+?)\}\}")


class Share(NamedTuple):
    """A claim holds in so many of the cases in which it was tried."""

    holds: int
    cases: int

    def __str__(self) -> str:
        return f"{self.holds} of {self.cases}"


# --- Numbers and tables by name -----------------------------------------------------------------------------


def facts(results: Path) -> dict[str, Any]:
    """Everything that the template may name."""
    known: dict[str, Any] = {}
    for add in (
        branch_facts, loss_facts, rate_facts, table1_facts, bias_facts, layer_facts, speed_facts, step_facts,
    ):  # fmt: skip
        known |= add(results)
    return known


def branch_facts(results: Path) -> dict[str, Any]:
    found = branches.read_branches(results)
    return {
        "gaps": branches.summary(found),
        "gaps at equal sums": branches.at_equal_learning(found),
        "ablation": branches.ablation_table(*branches.read_ablation(results)),
    }


def loss_facts(results: Path) -> dict[str, Any]:
    """ "35m-16k | SageBwd | training" and so on."""
    rows = by_name(read_rows(read_json(results / "losses/losses.json")))
    return {f"{name} | {loss}": gap for name, row in rows.items() for loss, gap in row.losses.items()}


def by_name(rows: Iterable[Row]) -> dict[str, Row]:
    return {f"{row.setup} | {row.variant}": row for row in rows}


def rate_facts(results: Path) -> dict[str, Any]:
    """Losses of the default minus full precision's at the same learning rate and seed, with QK-norm."""
    runs = read_json(results / "losses/learning_rate.json")["runs"]
    losses = {(run["variant"], run["seed"], run["group"]["lr"]): run["final_loss"] for run in runs}
    pairs = [(loss, losses.get((FULL_PRECISION, *at))) for (own, *at), loss in losses.items() if own == SAGE]
    gaps = [loss - other for loss, other in pairs if other is not None]
    above = sum(gap > 0 for gap in gaps)
    return {"rates.SageBwd": f"{fmean(gaps):+.3f} on average, {above} of {len(gaps)} above"}


def table1_facts(results: Path) -> dict[str, Any]:
    """Shares of Table 1's entries within SAME, at the shape of table1.json and at those of accuracy.json."""
    rows = read_json(results / "accuracy/table1.json")["rows"]
    known: dict[str, Any] = {}
    shapes: dict[tuple, list[dict]] = {}
    for row in read_json(results / "accuracy/accuracy.json")["shapes"]:
        shapes.setdefault((row["tokens"], row["head_dim"], row["causal"]), []).append(row)
    for variant in ("row", "block"):
        known[f"table1.{variant}"] = same_errors(rows, variant)
        give_it = [is_the_table(same_errors(own, variant)) for own in shapes.values()]
        known[f"table1.shapes.{variant}"] = Share(sum(give_it), len(give_it))
    tiles = read_json(results / "accuracy/table1.json")["tiles"]
    known["table1.tiles"] = ", ".join(f"{errors['dq'][1]:.3f} ({tile})" for tile, errors in tiles.items())
    lines = [
        [f"{row['sigma']:g}", row["variant"], *(f"{row[name][1]:.4f}" for name in TENSORS)]
        for row in rows
        if row["sigma"] in (1, 5)
    ]
    known["table1"] = table(["σ", "", *TITLES.values()], lines)
    return known


def same_errors(rows: Iterable[dict], variant: str) -> Share:
    """How many of the relative L2 errors are within SAME of the paper's."""
    same = [
        abs(row[name][1] - printed) <= SAME * printed
        for row in rows
        if row["variant"] == variant
        for name, (_, printed) in zip(TENSORS, paper.TABLE_1[row["sigma"]], strict=True)
    ]
    return Share(sum(same), len(same))


def is_the_table(found: Share) -> bool:
    """All entries but one: dV at σ = 1 is out with every choice of scales that INT8 products allow."""
    return found.holds >= found.cases - 1


#: {title: (file, run)}: the models whose gradients were measured.
BIAS_MODELS = {
    "35M": ("gradient_bias", "qk-norm"),
    "35M, no QK-norm": ("gradient_bias", "no-qk-norm"),
    "325M": ("gradient_bias_325m", "qk-norm"),
    "325M, no QK-norm": ("gradient_bias_325m_no_qk_norm", "fpa-no_qk_norm-seed2"),
}
BIAS_SETTINGS = {
    "control": "full precision, cuDNN",
    "paper": "`paper()`",
    "default": "default",
    "smooth_v_unsigned_p": "`low_bias()`",
    "consistent": "`consistent()`",
    "only_o": "only O in INT8",
    "only_dq_dk": "only dQ and dK in INT8",
}


def bias_facts(results: Path) -> dict[str, Any]:
    """ "325M | paper | k | T*" and so on, at the end of runs; "… | adam | T*": as Adam scales them."""
    known: dict[str, Any] = {}
    for title, (file, run) in BIAS_MODELS.items():
        rows = read_json(results / f"accuracy/{file}.json")["rows"]
        last = max(row["step"] for row in rows if row["run"] == run)
        for row in rows:
            if (row["run"], row["step"], row["layer"]) == (run, last, None):
                view = "" if row["view"] == "raw" else " | adam"
                name = f"{title} | {row['setting']} | {row['group']}{view}"
                known[f"{name} | bias"] = decimal(row["bias"][0])
                known[f"{name} | along"] = number(row["along"][0], ".4f").lstrip("-")
                known[f"{name} | noise"] = number(row["noise"][0], ".1%")
                known[f"{name} | T*"] = count(row["critical_tokens"][0])
    for group, title in (("all", "all weights"), ("qk", "q, k")):
        lines = [
            [words, *(known.get(f"{model} | {setting} | {group} | bias", "") for model in BIAS_MODELS)]
            + [known.get(f"{model} | {setting} | {group} | T*", "") for model in BIAS_MODELS]
            for setting, words in BIAS_SETTINGS.items()
        ]
        heads = [f"{what}, {model}" for what in ("bias", "T*") for model in BIAS_MODELS]
        known[f"bias.{group}"] = table([title, *heads], lines)
    return known


def layer_facts(results: Path) -> dict[str, Any]:
    """Errors in trained models that have the paper's smoothing, and in how many of them its claims hold."""
    tried: dict[str, list[bool]] = {}
    models: dict[tuple[str, bool], list[dict]] = {}  # those that differ by their seed as one
    for file in ("layers", "layers_branches"):
        data = read_json(results / f"accuracy/{file}.json")
        for run in (run for run in data["runs"] if "smooth" not in run):
            rows = [row for row in data["rows"] if row["run"] == run]
            qk_norm = data["runs"][run]["qk_norm"]
            models.setdefault((re.sub(r"-s(eed)?\d+$", "", run), qk_norm), []).extend(rows)
            holds = layer_claims(rows, data["table2"][run]["paper"])
            holds["ds" if qk_norm else "ds, no QK-norm"] = holds.pop("ds")
            for claim, held in holds.items():
                tried.setdefault(f"layers.{claim}", []).append(held)

    lines = []
    for (name, qk_norm), rows in models.items():
        cells = [
            f"{mean_error(rows, variant, x):.4f}" for variant in ("paper", "default") for x in ("dq", "dk")
        ]
        logit = max(row["statistics"]["largest_logit"] for row in rows)
        lines.append([name, "on" if qk_norm else "off", *cells, f"{logit:.0f}"])
    heads = [f"{words}, {PROBED[x]}" for words in ("`paper()`", "default") for x in ("dq", "dk")]
    known: dict[str, Any] = {claim: Share(sum(held), len(held)) for claim, held in tried.items()}
    return known | {"layers": table(["models", "QK-norm", *heads, "largest logit"], lines)}


def mean_error(rows: Iterable[dict], variant: str, tensor: str) -> float:
    """Relative L2, mean over layers."""
    return fmean(row["errors"][variant][f"{tensor}_l2"] for row in rows)


def layer_claims(rows: list[dict], table2: dict[str, Any]) -> dict[str, bool]:
    """Which claims about the layers of a trained model hold under `paper()`.

    dq_dk: dQ and dK have larger errors than O and dV. ds: dS, before its own rounding, has a larger one than
    P, dP and δ in the layer of Table 2. rms: the RMS of dS is below that of dP as far as the paper's (§4.2),
    within a factor of 10.
    """
    error = {x: mean_error(rows, "paper", x) for x in ("o", "dq", "dk", "dv")}
    dp, ds = (fmean(row["statistics"][f"{x}_rms"] for row in rows) for x in ("dp", "ds"))
    times = (dp / ds) / (paper.RMS["dp"] / paper.RMS["ds"])
    return {
        "dq_dk": min(error["dq"], error["dk"]) > max(error["o"], error["dv"]),
        "ds": table2["ds"][1] > max(table2[x][1] for x in ("p", "dp", "delta")),
        "rms": 0.1 <= times <= 10,
    }


def speed_facts(results: Path) -> dict[str, Any]:
    """Forward and backward on the H200 of bench_attention.json, times the speed of a peer."""
    rows = read_json(results / "speed/bench_attention.json")["rows"]
    own = [row for row in rows if row["implementation"] == "sagebwd" and row["mode"] == "both"]
    known: dict[str, Any] = {}
    lines = []
    for peer in ("FlashAttention-2", "cuDNN"):
        found: dict[tuple[int, bool], dict[int, float]] = {}
        for row in own:
            if peer in (row["speedup"] or {}):
                shape = row["shape"]
                panel = found.setdefault((shape["head_dim"], shape["causal"]), {})
                panel[shape["tokens"]] = row["speedup"][peer]
        for (head_dim, causal), speeds in found.items():
            if causal:
                cells = [f"{speeds[n]:.2f}" if n in speeds else "" for n in paper.LENGTHS]
                lines.append([f"{peer}, D {head_dim}", *cells])
        if peer == "FlashAttention-2":
            every = [speed for panel in found.values() for speed in panel.values()]
            known["speed.best"] = f"{max(every):.2f}"
            known["speed.as_fast"] = Share(sum(speed >= paper.BEST_SPEED_UP for speed in every), len(every))
            known["speed.faster"] = Share(sum(speed > 1 for speed in every), len(every))
    for head_dim in (64, 128):
        printed = paper.speed_ups(head_dim)
        lines.append(
            [
                f"FlashAttention-2, D {head_dim}, the paper on an RTX 4090",
                *(f"{x:.2f}" for x in printed.values()),
            ]
        )
    known["speed"] = table(["causal, over", *(f"N {n}" for n in paper.LENGTHS)], lines)
    return known


def step_facts(results: Path) -> dict[str, Any]:
    """Tokens per second of a training step, by context."""
    every = read_json(results / "speed/bench_training.json")["rows"]
    rows = [row for row in every if row["tokens_per_second"]]
    contexts = sorted({row["context"] for row in rows})
    names = [row["attention"] for row in rows]
    speeds = {(name, row["context"]): row["tokens_per_second"] for name, row in zip(names, rows, strict=True)}
    lines = [
        [name, *(f"{speeds[name, n]:,.0f}" if (name, n) in speeds else "" for n in contexts)]
        for name in dict.fromkeys(name for name, _ in speeds)
    ]
    return {"steps": table(["tokens/s", *(f"context {n:,}" for n in contexts)], lines)}


# --- Filling ------------------------------------------------------------------------------------------------


def fill(template: str, known: dict[str, Any]) -> str:
    """Raises KeyError, naming the field, for one that is not known."""
    return FIELD.sub(lambda found: str(known[found[1].strip()]), template)


def write(results: Path) -> Path:
    """Write the report of a folder of results."""
    template = (results / "report.template.md").read_text(encoding="utf-8")
    head = "<!-- Filled from report.template.md by `python -m scripts.paper.report`; edit that. -->\n\n"
    path = results / "README.md"
    write_text(path, head + fill(template, facts(results)))
    return path


def main(argv: list[str] | None = None) -> None:
    parser = command_parser("python -m scripts.paper.report", __doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=RESULTS, help="folder of results (default results)"
    )
    parser.add_argument("--names", action="store_true", help="print what a template may name, and end")
    arguments: Namespace = parser.parse_args(argv)
    if arguments.names:
        short = {
            name: str(value) for name, value in facts(arguments.folder).items() if "\n" not in str(value)
        }
        print(json.dumps(short, indent=1, ensure_ascii=False))
        return
    try:
        print(f"report: {write(arguments.folder)}")
    except KeyError as error:
        raise SystemExit(f"the template names {error}, which is none of --names") from error


if __name__ == "__main__":
    main()
