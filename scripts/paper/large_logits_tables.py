"""What scripts.paper.large_logits compares, as rows and tables."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.bench.measuring import origin_of
from scripts.output import align, number
from scripts.paper import published as paper

Interval = dict[str, float | None]  # mean and half_width; None: not known
UNKNOWN: Interval = {"mean": None, "half_width": None}

SIGHT = {
    True: "A positive control ends above full precision: the assay sees errors of this size.",
    False: "No positive control ends above full precision: the assay is blind here, a match means nothing.",
    None: "Whether the assay sees anything is open: no interval of a positive control.",
}


@dataclass(frozen=True)
class Row:
    """A setting at one gain of one assay. diverged: number of runs. probe: mean over layers and runs."""

    assay: str  # "fresh text" or "one batch"
    gain: float
    setting: str
    seeds: list[int]
    diverged: int
    validation: Interval
    training: Interval
    gap: Interval
    mean_gap: Interval
    largest_logit: float | None
    probe: dict[str, float]
    is_positive_control: bool


def excludes_zero(interval: Interval) -> bool | None:
    """None: there is no interval."""
    if interval["mean"] is None or interval["half_width"] is None:
        return None
    return abs(interval["mean"]) > interval["half_width"]


def lies_above_zero(interval: Interval) -> bool | None:
    """None: there is no interval."""
    excludes = excludes_zero(interval)
    return None if excludes is None else excludes and interval["mean"] > 0


def to_markdown(result: dict, rows: list[Row]) -> str:
    lines = [
        "# Large logits: gains of QK-norm",
        "",
        origin_of(result),
        "",
        f"Runs: {len(result['runs'])}, on {', '.join(result['trained_on'])}, commit "
        f"{', '.join(result['trained_at'])}, text {', '.join(result['text'])}. "
        "`python -m scripts.paper.large_logits --help` says what the columns are. A gap in bold excludes 0. "
        "Errors: relative L2 of the run's own attention; in the row of full precision, that of "
        "`attention=sagebwd` on its tensors. "
        f"The paper's Table 2: dQ {paper.TABLE_2['dq'][1]}, dK {paper.TABLE_2['dk'][1]}.",
    ]
    for cell in result["cells"]:
        own = [row for row in rows if (row.assay, row.gain) == (cell["assay"], cell["gain"])]
        lines += ["", f"## {cell['assay'].capitalize()}, gain {cell['gain']:g}", ""]
        lines += [SIGHT[cell["sees"]], "", *table(own)]
    return "\n".join([*lines, ""])


def table(rows: list[Row]) -> list[str]:
    header = ["setting", "seeds", "diverged", "validation", "training", "gap", "mean gap"]
    header += ["largest logit", "O", "dQ", "dK", "dV"]
    return align(header, [cells(row) for row in rows])


def cells(row: Row) -> list[str]:
    return [
        row.setting,
        str(len(row.seeds)),
        str(row.diverged or ""),
        in_words(row.validation),
        in_words(row.training),
        gap_in_words(row.gap),
        gap_in_words(row.mean_gap),
        number(row.largest_logit, ".1f"),
        *(number(row.probe.get(f"{name}_l2"), ".4f") for name in ("o", "dq", "dk", "dv")),
    ]


def in_words(interval: Interval, form: str = ".4f") -> str:
    """ "3.1234 ± 0.0100"; empty if there is no mean."""
    if interval["mean"] is None:
        return ""
    half_width = interval["half_width"]
    return f"{interval['mean']:{form}}" + ("" if half_width is None else f" ± {half_width:.4f}")


def gap_in_words(interval: Interval) -> str:
    """With its sign, in bold if the interval excludes 0."""
    text = in_words(interval, "+.4f")
    return f"**{text}**" if excludes_zero(interval) else text
