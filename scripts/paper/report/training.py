"""Losses of trained models: Figures 1 and 4, fine-tuning, presets."""

from __future__ import annotations

from collections.abc import Callable

from scripts.paper import published as paper
from scripts.paper.report.markdown import table
from scripts.paper.report.section import Section
from scripts.paper.report.verdicts import (
    Verdict,
    difference,
    divergence_verdict,
    gap_verdict,
    k_smoothing_verdict,
    match_verdict,
)
from scripts.paper.result_files import Results
from scripts.paper.variants import FULL_PRECISION, NO_QK_NORM, SAGE, title_of

#: The paper's own algorithm; SAGE is the default of SageConfig.
PAPER = f"{SAGE}, paper"
#: Pairs of variants whose difference the front page of the report shows, by experiment.
SHOWN = {
    "figure1a": ((SAGE, FULL_PRECISION), (SAGE + NO_QK_NORM, FULL_PRECISION + NO_QK_NORM)),
    "figure1b": ((SAGE, FULL_PRECISION), (SAGE + NO_QK_NORM, FULL_PRECISION + NO_QK_NORM)),
    "figure4": ((f"{SAGE}, no smoothing", SAGE), (f"{SAGE}, Q+K smoothing", SAGE)),
    "finetune": ((SAGE, FULL_PRECISION),),
}


def figure1a(results: Results) -> Section:
    data = results.json("figure1a.json")
    verdicts = []
    for group in data["groups"]:
        place = f"learning rate {group['lr']:g}" if len(data["groups"]) > 1 else ""
        for own, case in algorithms(group, place):
            without = own + NO_QK_NORM
            verdicts.append(gap_verdict("gap", data, group, own, FULL_PRECISION, case))
            verdicts.append(divergence_verdict(data, group, without, FULL_PRECISION + NO_QK_NORM, case))
    return section("figure1a", data, verdicts, paper.FIGURE_1[2097152])


def figure1b(results: Results) -> Section:
    data = results.json("figure1b.json")
    verdicts = []
    for group in data["groups"]:
        place = size(group) if len(data["groups"]) > 1 else ""
        for own, case in algorithms(group, place):
            for claim, ending in (("qk_norm", ""), ("no_qk_norm", NO_QK_NORM)):
                full = FULL_PRECISION + ending
                verdicts.append(match_verdict(claim, data, group, own + ending, full, case))
    return section("figure1b", data, verdicts, paper.FIGURE_1[262144])


def figure4(results: Results) -> Section:
    data = results.json("figure4.json")
    verdicts = []
    for group in data["groups"]:
        for own, case in algorithms(group, f"{group['tokens_per_step']:,} tokens per step"):
            verdicts.append(k_smoothing_verdict(data, group, f"{own}, no smoothing", own, case))
            verdicts.append(match_verdict("q_smoothing", data, group, f"{own}, Q+K smoothing", own, case))
    return section("figure4", data, verdicts)


def finetune(results: Results) -> Section:
    data = results.json("finetune.json")
    verdicts = [
        match_verdict("match", data, group, own, FULL_PRECISION, case)
        for group in data["groups"]
        for own, case in algorithms(group, "")
    ]
    return section("finetune", data, verdicts)


def presets(results: Results) -> Section:
    data = results.json("presets.json")
    made = section("presets", data, [])
    return Section(made.setting, made.tables, [], made.fields | {"clear": clear_gaps(data["groups"])})


def algorithms(group: dict, place: str) -> list[tuple[str, str]]:
    """Variants that stand for SageBwd, the default and, if run, PAPER; and the case of a verdict on each."""
    was_run = any(own["variant"] == PAPER for own in group["variants"])
    return [(SAGE, place), *([(PAPER, f"{place}, `paper()`".removeprefix(", "))] if was_run else [])]


def section(name: str, data: dict, verdicts: list[Verdict], printed: dict | None = None) -> Section:
    unfinished = [run["name"] for run in data["runs"] if not (run["finished"] or run["diverged"])]
    tables = {group_title(group): variant_table(group, printed or {}) for group in data["groups"]}
    if unfinished:
        tables["Not finished, left out"] = table(["run"], [[name] for name in unfinished])
    fields = {"differences": difference_table(SHOWN.get(name, ()), data["groups"])}
    return Section(f"scale: {data['scale']}, {data['hardware']}", tables, verdicts, fields)


def clear_gaps(groups: list[dict]) -> str:
    """Per group: the settings whose difference to full precision has an interval without zero."""
    parts = []
    for group in groups:
        gaps = {
            own["variant"]: found
            for own in group["variants"]
            if (found := difference(group, own["variant"], FULL_PRECISION)) and found.half_width is not None
        }
        clear = [f"{title_of(name)}: {gap}" for name, gap in gaps.items() if abs(gap.mean) > gap.half_width]
        parts.append(f"{'; '.join(clear) or 'none'} of {len(gaps)} at learning rate {group['lr']:g}")
    return "; ".join(parts)


def difference_table(pairs: tuple[tuple[str, str], ...], groups: list[dict]) -> str:
    """A line for each group and pair: the difference of their final losses."""
    rows = []
    for group in groups:
        for of, minus in pairs:
            found = difference(group, of, minus)
            schedule = f"{group['tokens_per_step']:,}, lr {group['lr']:g}"
            shown = "" if found is None else f"{found}"
            rows.append([size(group).removesuffix(" parameters"), schedule, f"{of} − {minus}", shown])
    return table(["model", "tokens per step", "difference of final losses", ""], rows, left=3)


def group_title(group: dict) -> str:
    noise, degrees = group["noise"], group["degrees_of_freedom"]
    known = "noise of a run unknown (no common seeds, no repetition)"
    if noise is not None:
        known = f"noise of a run {noise:.4f} ({degrees} degree{'s' * (degrees > 1)} of freedom)"
    return (
        f"{size(group)}, context {group['context']}, {group['tokens_per_step']:,} tokens per step, "
        f"{group['steps']:,} steps, learning rate {group['lr']:g}, {group['warmup_steps']:,} warm-up steps; "
        f"{known}"
    )


def variant_table(group: dict, printed: dict) -> str:
    first = next(iter(group["variants"]))["variant"]
    rows = []
    for own in group["variants"]:
        key = own["attention"], own["qk_norm"]
        plain = own["variant"] in (FULL_PRECISION, SAGE, SAGE + NO_QK_NORM, PAPER, PAPER + NO_QK_NORM)
        on_paper = "" if key not in printed or not plain else loss_or_diverges(printed[key])
        gap = difference(group, own["variant"], first)
        rows.append(
            [
                title_of(own["variant"]),
                seeds_and_runs(own),
                f"diverged ({own['diverged']})" if own["diverged"] else f"{own['final_loss']:.4f}",
                "" if own["spread"] is None else f"{own['spread']:.4f}",
                "" if own["held_out_loss"] is None else f"{own['held_out_loss']:.4f}",
                "" if gap is None else str(gap),
                *([on_paper] if printed else []),
            ]
        )
    header = ["attention", "seeds", "final loss", "range", "validation loss", f"minus {first}"]
    return table([*header, *(["paper"] if printed else [])], rows)


def seeds_and_runs(variant: dict) -> str:
    """ "2", or where a seed was repeated "2 (3 runs)"."""
    seeds, runs = len(variant["seeds"]), variant["runs"]
    return f"{seeds}" if runs == seeds else f"{seeds} ({runs} runs)"


def loss_or_diverges(loss: float | None) -> str:
    return "diverges" if loss is None else f"{loss:.3f}"


def size(group: dict) -> str:
    return f"{group['parameters'] / 1e6:.3g}M parameters"


SECTIONS: dict[str, Callable[[Results], Section]] = {
    "figure1a": figure1a,
    "figure1b": figure1b,
    "figure4": figure4,
    "finetune": finetune,
    "presets": presets,
}
