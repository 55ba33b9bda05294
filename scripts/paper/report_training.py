"""The report's sections about the loss of trained models: Figures 1 and 4, fine-tuning, presets."""

from __future__ import annotations

from typing import NamedTuple

from scripts.paper import published as paper
from scripts.paper.curves import DIVERGED_BY
from scripts.paper.report_parts import AGREES, CANNOT_TELL, DIFFERS, Body, Verdict, markdown, picture
from scripts.paper.results import Results

#: Final losses that differ by less than this count as equal: half of what the paper's Figure 1a is about.
MARGIN = paper.FIGURE_1_GAP / 2

FULL_PRECISION, SAGE = "full precision", "SageBwd"
RULES = (
    "Final loss: mean training loss of the last tenth. Differences with 95% intervals. A gap agrees if its "
    f"interval lies above zero, and does not if it lies below {MARGIN:.3f}, half of the paper's gap, in runs "
    "as long as the paper's: shorter ones leave open whether it would come. A match agrees if the interval "
    f"lies within ±{MARGIN:.3f}, and does not if it lies outside. Diverged: a loss or gradient that is not "
    f"finite, or a final loss more than {DIVERGED_BY:g} above the lowest mean of an earlier tenth."
)


class Difference(NamedTuple):
    """One variant's final loss minus another's.

    half_width: of the 95% interval, None with one seed. seeds: how many the two have in common.
    """

    mean: float
    half_width: float | None
    seeds: int

    def __str__(self) -> str:
        seeds = f"({self.seeds} seed{'s' * (self.seeds > 1)})"
        if self.half_width is None:
            return f"{self.mean:+.4f} {seeds}"
        return f"{self.mean:+.4f} ± {self.half_width:.4f} {seeds}"


def figure1a(results: Results) -> Body:
    data = results.json("figure1a.json")
    printed = paper.FIGURE_1[2097152]
    verdicts = []
    for group in data["groups"]:
        claim = (
            f"with QK-norm SageBwd ends {paper.FIGURE_1_GAP:.3f} above full precision at 2.1M tokens per step"
        )
        where = f"; learning rate {group['lr']:g}" if len(data["groups"]) > 1 else ""
        verdicts.append(gap_verdict(claim + where, data, group, SAGE, FULL_PRECISION))
        verdicts.append(divergence_verdict(data, group, f"{SAGE}, no QK-norm", where))
    return Body(training_text(data, "figure1a", printed), verdicts)


def figure1b(results: Results) -> Body:
    data = results.json("figure1b.json")
    printed = paper.FIGURE_1[262144]
    gap = printed["sagebwd", True] - printed["fpa", True]
    verdicts = []
    for group in data["groups"]:
        for ending, words in (("", "with QK-norm"), (", no QK-norm", "without QK-norm")):
            claim = f"{words} SageBwd matches full precision ({gap:+.3f}) at 260K tokens per step"
            claim += f"; {size(group)}" if len(data["groups"]) > 1 else ""
            verdicts.append(match_verdict(claim, data, group, SAGE + ending, FULL_PRECISION + ending))
    return Body(training_text(data, "figure1b", printed), verdicts)


def figure4(results: Results) -> Body:
    data = results.json("figure4.json")
    verdicts = []
    for group in data["groups"]:
        place = f" at {group['tokens_per_step']:,} tokens per step"
        none, both = f"{SAGE}, no smoothing", f"{SAGE}, Q+K smoothing"
        claim = f"K-smoothing is needed{place}"
        if diverged_alone(group, none, SAGE):
            verdicts.append(settled(claim, data, AGREES, "Without it the loss diverges."))
        else:
            verdicts.append(gap_verdict(claim, data, group, none, SAGE))
        claim = f"Q-smoothing on top brings nothing{place}"
        verdicts.append(match_verdict(claim, data, group, both, SAGE))
    return Body(training_text(data, "figure4", {}), verdicts)


def finetune(results: Results) -> Body:
    data = results.json("finetune.json")
    verdicts = [
        match_verdict("fine-tuning with SageBwd ends like full precision", data, group, SAGE, FULL_PRECISION)
        for group in data["groups"]
    ]
    text = training_text(data, "finetune", {})
    return Body(
        "A model that was trained here in full precision, trained further on the standard library of "
        "Python. S3 fine-tunes published models and compares their scores on tasks; here it is the "
        f"loss.\n\n{text}",
        verdicts,
    )


def presets(results: Results) -> Body:
    data = results.json("presets.json")
    found = " ".join(gaps_to_full_precision(group) for group in data["groups"])
    return Body(f"{training_text(data, 'presets', {})}\n\n{found}".rstrip())


def gaps_to_full_precision(group: dict) -> str:
    """Which settings end away from full precision, as far as the noise between seeds lets one see."""
    gaps = {
        own["variant"]: difference(group, own["variant"], FULL_PRECISION)
        for own in group["variants"]
        if own["variant"] != FULL_PRECISION
    }
    known = {name: gap for name, gap in gaps.items() if gap is not None and gap.half_width is not None}
    if not known:
        return ""
    where = f"With learning rate {group['lr']:g}"
    clear = [f"{name} ({gap})" for name, gap in known.items() if abs(gap.mean) > gap.half_width]
    if not clear:
        widest = max(gap.half_width for gap in known.values())
        return f"{where} no setting is seen to end away from full precision; the intervals are ±{widest:.4f}."
    return (
        f"{where} the interval leaves out zero for {', '.join(clear)}, of {len(known)} settings; one in "
        "twenty does by chance."
    )


def training_text(data: dict, name: str, printed: dict) -> str:
    """What was run, a table for each group of runs, and the picture."""
    unfinished = [run["name"] for run in data["runs"] if not (run["finished"] or run["diverged"])]
    parts = [f"Scale: {data['scale']}, on {data['hardware']}. {RULES}"]
    for group in data["groups"]:
        parts += [group_text(group), variant_table(group, printed)]
    if unfinished:
        parts.append(f"Not finished, and left out: {', '.join(unfinished)}.")
    return "\n\n".join(
        [*parts, picture(f"{name}.png", "Training loss, and its distance from the first variant")]
    )


def group_text(group: dict) -> str:
    noise = group["noise"]
    degrees = group["degrees_of_freedom"]
    known = "No two variants have two seeds in common and no run was repeated, so the noise is not known."
    if noise is not None:
        freedom = f"{degrees} degree{'s' * (degrees > 1)} of freedom"
        known = f"Noise of a run: standard deviation {noise:.4f} ({freedom})."
    return (
        f"**{size(group)}**, context {group['context']}, {group['tokens_per_step']:,} tokens per step, "
        f"{group['steps']:,} steps, learning rate {group['lr']:g}, {group['warmup_steps']:,} warm-up "
        f"steps. {known}"
    )


def variant_table(group: dict, printed: dict) -> str:
    first = next(iter(group["variants"]))["variant"]
    rows = []
    for own in group["variants"]:
        key = own["attention"], own["qk_norm"]
        plain = own["variant"] in (FULL_PRECISION, SAGE, f"{SAGE}, no QK-norm")
        on_paper = "" if key not in printed or not plain else loss_or_diverges(printed[key])
        gap = difference(group, own["variant"], first)
        rows.append(
            [
                own["variant"],
                seeds_and_runs(own),
                f"diverged ({own['diverged']})" if own["diverged"] else f"{own['final_loss']:.4f}",
                "" if own["spread"] is None else f"{own['spread']:.4f}",
                "" if own["held_out_loss"] is None else f"{own['held_out_loss']:.4f}",
                "" if gap is None else str(gap),
                on_paper,
            ]
        )
    header = ["attention", "seeds", "final loss", "spread", "held-out", f"minus {first}", "paper"]
    return markdown(header, rows)


def seeds_and_runs(variant: dict) -> str:
    """ "2", or where a seed was repeated "2 (3 runs)"."""
    seeds, runs = len(variant["seeds"]), variant["runs"]
    return f"{seeds}" if runs == seeds else f"{seeds} ({runs} runs)"


def loss_or_diverges(loss: float | None) -> str:
    return "diverges" if loss is None else f"{loss:.3f}"


def size(group: dict) -> str:
    return f"{group['parameters'] / 1e6:.3g}M parameters"


def difference(group: dict, of: str, minus: str) -> Difference | None:
    """None if one of the two was not run or diverged."""
    for entry in group["differences"]:
        if entry["of"] == of and entry["minus"] == minus:
            return Difference(entry["mean"], entry["half_width"], entry["seeds"])
    return None


def diverged(group: dict, variant: str) -> bool:
    return any(own["variant"] == variant and own["diverged"] for own in group["variants"])


def diverged_alone(group: dict, variant: str, other: str) -> bool:
    """Whether the variant diverged while the other was run, too, and did not."""
    was_run = any(own["variant"] == other for own in group["variants"])
    return diverged(group, variant) and was_run and not diverged(group, other)


def gap_verdict(claim: str, data: dict, group: dict, of: str, minus: str) -> Verdict:
    """The paper sees the loss of one variant above the other's; that a short run does not leaves it open."""
    found = difference(group, of, minus)
    if found is None or found.half_width is None:
        return without_interval(claim, data, group, of, minus)
    if found.mean - found.half_width > 0:
        return settled(claim, data, AGREES, f"Here {found}.")
    if found.mean + found.half_width < MARGIN:
        return not_seen(claim, data, group, f"Here {found}")
    return Verdict(claim, CANNOT_TELL, f"Here {found}.")


def match_verdict(claim: str, data: dict, group: dict, of: str, minus: str) -> Verdict:
    """The paper sees two losses that are alike."""
    found = difference(group, of, minus)
    if found is None or found.half_width is None:
        return without_interval(claim, data, group, of, minus)
    if abs(found.mean) + found.half_width < MARGIN:
        return settled(claim, data, AGREES, f"Here {found}.")
    if abs(found.mean) - found.half_width > MARGIN:
        return settled(claim, data, DIFFERS, f"Here {found}.")
    return Verdict(claim, CANNOT_TELL, f"Here {found}.")


def divergence_verdict(data: dict, group: dict, variant: str, where: str) -> Verdict:
    """The paper sees this variant diverge; that it does not in a short run says nothing about a long one.

    Where full precision diverges as well, INT8 is not the reason.
    """
    claim = f"without QK-norm SageBwd diverges at 2.1M tokens per step{where}"
    if diverged(group, variant) and diverged(group, variant.replace(SAGE, FULL_PRECISION)):
        return Verdict(claim, CANNOT_TELL, "It diverges here, but so does full precision without QK-norm.")
    if diverged(group, variant):
        return settled(claim, data, AGREES, "It diverges here, too.")
    if not any(own["variant"] == variant for own in group["variants"]):
        return Verdict(claim, CANNOT_TELL, "It was not run.")
    return not_seen(claim, data, group, "It does not")


def not_seen(claim: str, data: dict, group: dict, why: str) -> Verdict:
    """What the paper sees at the end of its run is not there; only a run as long settles that."""
    tokens = group["tokens_per_step"] * group["steps"]
    if data["scale"] == "full":
        return Verdict(claim, DIFFERS, f"{why}.")
    within = f"within {tokens / 1e6:,.3g}M tokens, which says nothing about a longer run"
    return Verdict(claim, CANNOT_TELL, f"{why} {within}.")


def without_interval(claim: str, data: dict, group: dict, of: str, minus: str) -> Verdict:
    """Two variants whose final losses cannot be compared: one diverged, or is missing, or has one seed."""
    if diverged_alone(group, of, minus):
        return settled(claim, data, DIFFERS, f"{of} diverges here, {minus} does not.")
    found = difference(group, of, minus)
    if found is None:
        return Verdict(claim, CANNOT_TELL, "The runs to compare are not there, or diverged.")
    return Verdict(claim, CANNOT_TELL, f"Here {found}, and one seed gives no interval.")


def settled(claim: str, data: dict, answer: str, why: str) -> Verdict:
    """An answer, unless the scale is the one for debugging."""
    if data["scale"] == "debug":
        return Verdict(claim, CANNOT_TELL, f"{why} The debug scale measures nothing.")
    return Verdict(claim, answer, why)
