"""Losses of trained models: Figures 1 and 4, fine-tuning, presets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from scripts.paper import published as paper
from scripts.paper.loss_statistics import short
from scripts.paper.report.markdown import table
from scripts.paper.report.pool import alike_but_tokens_per_step, ended, groups_of, pooled
from scripts.paper.report.rules import GAP, OPEN
from scripts.paper.report.section import Section
from scripts.paper.report.verdicts import (
    Verdict,
    difference,
    divergence_verdict,
    interaction_verdict,
    k_smoothing_verdict,
    loss_verdict,
    tokens_of,
)
from scripts.paper.result_files import Results
from scripts.paper.variants import FULL_PRECISION, NO_QK_NORM, SAGE, title_of

#: The paper's own algorithm; SAGE is the default of SageConfig.
PAPER, CONSISTENT = f"{SAGE}, paper", f"{SAGE}, consistent"
#: Pairs of variants whose difference the front page of the report shows, by experiment, where they were run.
GRID = (
    (SAGE, FULL_PRECISION),
    (PAPER, FULL_PRECISION),
    (SAGE + NO_QK_NORM, FULL_PRECISION + NO_QK_NORM),
    (PAPER + NO_QK_NORM, FULL_PRECISION + NO_QK_NORM),
)
SHOWN = {
    "figure1a": GRID,
    "figure1b": (*GRID, (CONSISTENT + NO_QK_NORM, FULL_PRECISION + NO_QK_NORM)),
    "figure4": (
        (f"{SAGE}, no smoothing", SAGE),
        (f"{SAGE}, Q+K smoothing", SAGE),
        (f"{PAPER}, no smoothing", PAPER),
        (f"{PAPER}, Q+K smoothing", PAPER),
    ),
    "finetune": GRID[:2],
    "long_runs": (*GRID[:2], (CONSISTENT, FULL_PRECISION)),
    "presets": tuple(
        (f"{SAGE}{name}", FULL_PRECISION) for name in ("", ", paper", ", consistent", ", accurate")
    ),
}


def figure1a(results: Results) -> Section:
    data, groups, all_groups = read(results, "figure1a")
    verdicts = []
    for group in groups:
        place = f"learning rate {group['lr']:g}" if len(groups) > 1 else ""
        for own, case in algorithms(group, place):
            gap = (own, FULL_PRECISION)
            verdicts.append(loss_verdict("gap", data, group, gap, GAP, case))
            verdicts += [
                interaction_verdict("interaction", data, group, small, gap, paper.FIGURE_1_INTERACTION, case)
                for small in alike_but_tokens_per_step(group, all_groups)
            ]
        for own, case in algorithms(group, place, NO_QK_NORM):
            full = FULL_PRECISION + NO_QK_NORM
            verdicts.append(divergence_verdict(data, group, own + NO_QK_NORM, full, case))
    if not any(own.claim == "interaction" for own in verdicts):
        why = "no runs of as many tokens with fewer tokens per step"
        verdicts.append(Verdict("interaction", OPEN, why, "", why))
    made = section("figure1a", data, groups, verdicts, paper.FIGURE_1[2097152])
    numbers = [
        own.numbers.split(":")[0] for own in verdicts if own.claim == "interaction" and ":" in own.numbers
    ]
    return replace(made, fields=made.fields | {"interaction": numbers[0] if numbers else "an unknown amount"})


def figure1b(results: Results) -> Section:
    data, groups, _ = read(results, "figure1b")
    verdicts = []
    for group in groups:
        place = size(group) if len(groups) > 1 else ""
        for claim, ending in (("qk_norm", ""), ("no_qk_norm", NO_QK_NORM)):
            for own, case in algorithms(group, place, ending):
                pair = (own + ending, FULL_PRECISION + ending)
                verdicts.append(loss_verdict(claim, data, group, pair, paper.FIGURE_1B_GAP, case))
    return section("figure1b", data, groups, verdicts, paper.FIGURE_1[262144])


def figure4(results: Results) -> Section:
    data, groups, _ = read(results, "figure4")
    verdicts = []
    for group in groups:
        place = f"{group['tokens_per_step']:,} tokens per step"
        for own, case in algorithms(group, place, ", no smoothing"):
            verdicts.append(k_smoothing_verdict(data, group, (f"{own}, no smoothing", own), case))
        for own, case in algorithms(group, place, ", Q+K smoothing"):
            pair = (f"{own}, Q+K smoothing", own)
            verdicts.append(loss_verdict("q_smoothing", data, group, pair, 0.0, case))
    return section("figure4", data, groups, verdicts)


def finetune(results: Results) -> Section:
    data, groups, _ = read(results, "finetune")
    verdicts = [
        loss_verdict("match", data, group, (own, FULL_PRECISION), 0.0, case)
        for group in groups
        for own, case in algorithms(group, "")
    ]
    return section("finetune", data, groups, verdicts)


def presets(results: Results) -> Section:
    data, groups, _ = read(results, "presets")
    made = section("presets", data, groups, [])
    tried = {title_of(run["variant"]) for run in data["runs"]} - {FULL_PRECISION}
    return Section(made.setting, made.tables, [], made.fields | {"clear": clear_gaps(groups, tried)})


def read(results: Results, name: str) -> tuple[dict, list[dict], list[dict]]:
    """The file of an experiment; the groups of its runs, pooled over all experiments; all groups."""
    data, groups = results.json(f"{name}.json"), pooled(results)
    return data, groups_of(data, groups), groups


def algorithms(group: dict, place: str, ending: str = "") -> list[tuple[str, str]]:
    """Variants that stand for SageBwd, the default and PAPER if that was run, each with a verdict's case.

    ending: of the variant that the verdict is on.
    """
    was_run = any(own["variant"] == PAPER + ending for own in group["variants"])
    return [(SAGE, place), *([(PAPER, f"{place}, `paper()`".removeprefix(", "))] if was_run else [])]


def section(
    name: str, data: dict, groups: list[dict], verdicts: list[Verdict], printed: dict | None = None
) -> Section:
    unfinished = [run["name"] for run in data["runs"] if not (run["finished"] or run["diverged"])]
    shown = {run["variant"] for run in data["runs"]} | {title_of(run["variant"]) for run in data["runs"]}
    shown |= {name for pair in SHOWN.get(name, ()) for name in pair}
    tables = {group_title(group): variant_table(group, shown, printed or {}) for group in groups}
    if unfinished:
        tables["Not finished, left out"] = table(["run"], [[name] for name in unfinished])
    fields = {
        "differences": difference_table(SHOWN.get(name, ()), groups),
        "tokens": " or ".join(dict.fromkeys(f"{tokens_of(group) / 1e6:,.3g} million" for group in groups)),
        "rates": " and ".join(dict.fromkeys(f"{group['lr']:g}" for group in groups)),
        **{f"gap.{key}": text for key, text in gaps_by_place(groups).items()},
    }
    return Section(provenance(data, groups, shown), tables, verdicts, fields)


def gaps_by_place(groups: list[dict]) -> dict[str, str]:
    """{"34.7M.16384.0.001.sagebwd": "+0.0013 ± 0.0084 (2 seeds)"}, for sentences about single differences."""
    names = {SAGE: "sagebwd", PAPER: "paper", CONSISTENT: "consistent"}
    found = {}
    for group in groups:
        place = f"{group['parameters'] / 1e6:.3g}M.{group['tokens_per_step']}.{group['lr']:g}"
        for own, name in names.items():
            for ending, norm in (("", ""), (NO_QK_NORM, ".no_qk_norm")):
                gap = difference(group, own + ending, FULL_PRECISION + ending)
                if gap:
                    found[f"{place}.{name}{norm}"] = f"{gap}"
    return found


def provenance(data: dict, groups: list[dict], shown: set[str]) -> str:
    """Algorithms, text, tokens per step, seeds and commits of what a section shows."""
    variants = [own for group in groups for own in group["variants"] if own["variant"] in shown]
    commits = list(dict.fromkeys(commit for own in variants for commit in own["commits"]))
    texts = dict.fromkeys(group["text"] for group in groups)
    losses = [bool(run.get("last_losses")) for run in ended(data["runs"])]
    left_out = [
        f"{run['name']} ({short(run['commit'])})"
        for group in groups
        for run in group["left_out"]
        if run["variant"] in shown
    ]
    steps = [f"{group['tokens_per_step']:,}" for group in groups]
    parts = [
        f"Scale: {data['scale']}; {data['hardware']}",
        f"Algorithms: {listed(title_of(own['variant']) for own in variants)}",
        f"Text: {listed(texts)}",
        f"Tokens per step: {listed(steps)}",
        f"Seeds: {listed(seed for own in variants for seed in own['seeds'])}",
        f"Commits: {listed(commits)}",
    ]
    if len(commits) > 1:
        parts.append("Runs of different commits are compared")
    if left_out:
        parts.append(f"Not counted, a seed that another commit repeated: {listed(left_out)}")
    if not all(losses):
        parts.append("Stored without the losses behind each final loss, which later runs keep")
    return ". ".join(parts) + "."


def listed(items: Iterable) -> str:
    """Each once. Semicolons, because names hold commas."""
    return "; ".join(f"{item}" for item in dict.fromkeys(items))


def clear_gaps(groups: list[dict], tried: set[str]) -> str:
    """Per group: the settings, of those `tried`, whose interval to full precision leaves out zero."""
    parts = []
    for group in groups:
        gaps = {
            own["variant"]: found
            for own in group["variants"]
            if own["variant"] in tried
            and (found := difference(group, own["variant"], FULL_PRECISION))
            and found.half_width is not None
        }
        clear = [f"{title_of(name)}: {gap}" for name, gap in gaps.items() if abs(gap.mean) > gap.half_width]
        parts.append(f"{'; '.join(clear) or 'none'} of {len(gaps)} at learning rate {group['lr']:g}")
    return "; ".join(parts)


def difference_table(pairs: tuple[tuple[str, str], ...], groups: list[dict]) -> str:
    """A line for each group and pair that was run: the difference of their final losses."""
    rows = []
    for group in groups:
        run = {own["variant"] for own in group["variants"]}
        for of, minus in (pair for pair in pairs if run.issuperset(pair)):
            found = difference(group, of, minus)
            schedule = f"{group['tokens_per_step']:,}, lr {group['lr']:g}"
            shown = "diverged" if found is None else f"{found}"
            rows.append([size(group).removesuffix(" parameters"), schedule, f"{of} − {minus}", shown])
    return table(["model", "tokens per step", "difference of final losses", ""], rows, left=3)


def group_title(group: dict) -> str:
    noise, degrees = group["noise"], group["degrees_of_freedom"]
    known = "noise of a run unknown (no common seeds, no repetition)"
    if noise is not None:
        known = (
            f"noise of a run {noise:.4f} ({degrees} degree{'s' * (degrees > 1)} of freedom; "
            f"{sum(own['runs'] for own in group['variants'])} runs of all experiments)"
        )
    return (
        f"{size(group)}, context {group['context']}, {group['tokens_per_step']:,} tokens per step, "
        f"{group['steps']:,} steps, learning rate {group['lr']:g}, {group['warmup_steps']:,} warm-up steps; "
        f"{known}"
    )


def variant_table(group: dict, shown: set[str], printed: dict) -> str:
    variants = [own for own in group["variants"] if own["variant"] in shown]
    first = variants[0]["variant"]
    rows = []
    for own in variants:
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
