"""Fill the report, results/README.md, from its template and the JSON files of results/.

    python -m scripts.paper.report

The template, results/report.template.md, is written by hand. `{{name}}` in it is a number or table of
`facts`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common.files import write_text
from common.terminal import command_parser
from scripts.output import number, read_json, table
from scripts.paper import branches
from scripts.paper import published as paper
from scripts.paper.gradient_bias_tables import count, decimal
from scripts.paper.losses import read_rows
from scripts.paper.table1 import TENSORS, TITLES
from scripts.paper.variants import FULL_PRECISION, SAGE
from trainer.plot import PROBED

#: Errors this close to the paper's count as the same.
SAME = 0.1
FIELD = re.compile(r"\{\{(.+?)\}\}")


def share(held: Sequence[bool]) -> str:
    """In how many of the cases in which it was tried a claim held."""
    return f"{sum(held)} of {len(held)}"


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
    rows = read_rows(read_json(results / "losses/losses.json"))
    return {f"{row.setup} | {row.variant} | {loss}": gap for row in rows for loss, gap in row.losses.items()}


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
    table1 = read_json(results / "accuracy/table1.json")
    shapes: dict[tuple, list[dict]] = {}
    for row in read_json(results / "accuracy/accuracy.json")["shapes"]:
        shapes.setdefault((row["tokens"], row["head_dim"], row["causal"]), []).append(row)
    # All entries but one: dV at σ = 1 is out with every choice of scales that INT8 products allow.
    give_it = [sum(same) >= len(same) - 1 for same in map(same_errors, shapes.values())]
    lines = [
        [f"{row['sigma']:g}", row["variant"], *(f"{row[name][1]:.4f}" for name in TENSORS)]
        for row in table1["rows"]
        if row["sigma"] in (1, 5)
    ]
    tiles = [f"{errors['dq'][1]:.3f} ({tile})" for tile, errors in table1["tiles"].items()]
    return {
        "table1": table(["σ", "", *TITLES.values()], lines),
        "table1.row": share(same_errors(table1["rows"])),
        "table1.shapes.row": share(give_it),
        "table1.tiles": ", ".join(tiles),
    }


def same_errors(rows: Iterable[dict]) -> list[bool]:
    """Which of the relative L2 errors, with a scale per row, are within SAME of the paper's."""
    return [
        abs(row[name][1] - printed) <= SAME * printed
        for row in rows
        if row["variant"] == "row"
        for name, (_, printed) in zip(TENSORS, paper.TABLE_1[row["sigma"]], strict=True)
    ]


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
    """Bias and T* of all weights, and of those of q and k, at the end of runs."""
    cells: dict[tuple[str, ...], str] = {}
    for model, (file, run) in BIAS_MODELS.items():
        rows = [row for row in read_json(results / f"accuracy/{file}.json")["rows"] if row["run"] == run]
        last = max(row["step"] for row in rows)
        for row in rows:
            if (row["step"], row["layer"], row["view"]) == (last, None, "raw"):
                place = model, row["setting"], row["group"]
                cells[("bias", *place)] = decimal(row["bias"][0])
                cells[("T*", *place)] = count(row["critical_tokens"][0])
    columns = [(what, model) for what in ("bias", "T*") for model in BIAS_MODELS]
    known = {}
    for group, title in (("all", "all weights"), ("qk", "q, k")):
        lines = [
            [words, *(cells.get((*column, setting, group), "") for column in columns)]
            for setting, words in BIAS_SETTINGS.items()
        ]
        known[f"bias.{group}"] = table([title, *map(", ".join, columns)], lines)
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
    known = {claim: share(held) for claim, held in tried.items()}
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
    flash = [row["speedup"]["FlashAttention-2"] for row in own]
    lines = []
    for peer, head_dim in itertools.product(("FlashAttention-2", "cuDNN"), (64, 128)):
        found = {
            row["shape"]["tokens"]: row["speedup"].get(peer)
            for row in own
            if row["shape"]["causal"] and row["shape"]["head_dim"] == head_dim
        }
        lines.append([f"{peer}, D {head_dim}", *(number(found.get(n), ".2f") for n in paper.LENGTHS)])
    for head_dim in (64, 128):
        printed = paper.speed_ups(head_dim)
        title = f"FlashAttention-2, D {head_dim}, the paper on an RTX 4090"
        lines.append([title, *(f"{x:.2f}" for x in printed.values())])
    return {
        "speed": table(["causal, over", *(f"N {n}" for n in paper.LENGTHS)], lines),
        "speed.best": f"{max(flash):.2f}",
        "speed.faster": share([over > 1 for over in flash]),
    }


def step_facts(results: Path) -> dict[str, Any]:
    """Tokens per second of a training step, by context."""
    rows = read_json(results / "speed/bench_training.json")["rows"]
    speeds = {(row["attention"], row["context"]): row["tokens_per_second"] for row in rows}
    names, contexts = (dict.fromkeys(axis) for axis in zip(*speeds, strict=True))
    lines = [[name, *(number(speeds.get((name, n)), ",.0f") for n in contexts)] for name in names]
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
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results"), help="default: %(default)s")
    folder = parser.parse_args(argv).folder
    try:
        print(f"report: {write(folder)}")
    except KeyError as error:
        raise SystemExit(f"the template names {error}, which this report does not know") from error


if __name__ == "__main__":
    main()
