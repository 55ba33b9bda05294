"""How the pictures of scripts/paper look, and those of losses."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.pictures import ATTENTION, BASELINE, CYCLE, Style, grid, legend_below
from scripts.paper.variants import NO_QK_NORM, base_of, is_null

POINTS = 100  # of a drawn curve
#: Names in tables and files: those of configs/attention/.
CONFIG_NAMES = {"full precision": "fpa", "default": "sagebwd", "SageBwd": "sagebwd"}


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A style for each name: a preset's own, or the next of CYCLE that no other has."""
    found = {name: ATTENTION.get(config_name(name)) for name in names}
    free = iter([look for look in CYCLE if look not in found.values()] * len(names))
    return {name: look or next(free) for name, look in found.items()}


def config_name(name: str) -> str:
    """ "SageBwd, low bias" and "low_bias" are one preset, "SageBwd" and "default" the default."""
    short = name.removeprefix("SageBwd, ").replace(" ", "_")
    return CONFIG_NAMES.get(name, f"sagebwd_{short}")


def tokens_axis(axes: Any) -> None:
    """Tokens seen, as 10M."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


# --- Curves -------------------------------------------------------------------------------------------------


def draw_curves(runs: Sequence[dict], title: str) -> Any:
    """A pair of panels for each group of runs, three a row: loss over tokens, and below it the difference.

    The difference is to full precision at the same seed. A line is the mean over seeds, a band the range.
    """
    groups: dict[str, list[dict]] = {}
    for run in runs:
        groups.setdefault(group_name(run["group"]), []).append(run)
    columns = min(len(groups), 3)
    rows = math.ceil(len(groups) / columns)
    figure, panels = grid(2 * rows, columns, width=6, height=2.9, height_ratios=(3, 2) * rows)
    # From rows of losses and rows of differences to one (losses, difference) a group.
    pairs = panels.reshape(rows, 2, columns).swapaxes(1, 2).reshape(-1, 2)
    for axes in pairs[len(groups) :].flat:
        axes.set_visible(False)
    looks = variant_styles([run["variant"] for run in runs])
    shown: dict[str, Any] = {}
    for (losses, gaps), (name, own) in zip(pairs, groups.items(), strict=False):
        gaps.sharex(losses)
        losses.tick_params(labelbottom=False)
        for variant in dict.fromkeys(run["variant"] for run in own):
            curves = [thin(run["curve"]) for run in own if run["variant"] == variant]
            shown[variant] = draw_band(losses, curves, looks[variant])
            draw_band(gaps, gaps_of(own, variant), looks[variant])
        losses.set_title(name, fontsize=9)
        losses.set_ylabel("training loss, nats")
        gaps.set_ylabel("minus baseline,\nsame seed", fontsize=9)
        gaps.axhline(0, color="0.5", linewidth=0.8)
        tokens_axis(gaps)
        zoom(losses, own)
        for axes in (losses, gaps):
            axes.grid(alpha=0.3)
    legend_below(figure, list(shown.values()), list(shown), columns=2 * columns)
    lines = textwrap.wrap(title, 60 * columns)
    figure.suptitle("\n".join([*lines, "line: mean over seeds, band: range"]), fontsize=11)
    return figure


def variant_styles(names: Sequence[str]) -> dict[str, Style]:
    """The style of each variant's attention, grey for a null; without QK-norm the same colour, dashed."""
    own = dict.fromkeys(name.replace(NO_QK_NORM, "") for name in names)
    looks = styles([name for name in own if not is_null(name)])
    looks |= {name: Style(BASELINE, ":", "") for name in own if is_null(name)}
    dashed = {name: looks[name.replace(NO_QK_NORM, "")] for name in names}
    return {
        name: look._replace(dashes=(0, (4, 2))) if NO_QK_NORM in name else look
        for name, look in dashed.items()
    }


Curve = tuple[np.ndarray, np.ndarray]  # tokens and values


def thin(curve: Mapping[str, Sequence[float]]) -> Curve:
    """At most POINTS points, each the mean of a stretch of the curve."""
    tokens, losses = np.array(curve["tokens"]), np.array(curve["loss"], dtype=float)
    parts = min(POINTS, len(losses)) or 1
    means = [part.mean() for part in np.array_split(losses, parts) if len(part)]
    return np.array([part[-1] for part in np.array_split(tokens, parts) if len(part)]), np.array(means)


def gaps_of(runs: Sequence[dict], variant: str) -> list[Curve]:
    """Each run's loss minus that of the mean of its baseline's runs at the same seed and tokens."""
    base, gaps = base_of(variant), []
    for run in (run for run in runs if run["variant"] == variant and variant != base):
        tokens, losses = thin(run["curve"])
        others = [other for other in runs if (other["variant"], other["seed"]) == (base, run["seed"])]
        curves = [thin(other["curve"]) for other in others]
        same = [values for places, values in curves if np.array_equal(places, tokens)]
        if same:
            gaps.append((tokens, losses - np.mean(same, axis=0)))
    return gaps


def draw_band(axes: Any, curves: Sequence[Curve], look: Style) -> Any:
    """The mean of the curves, and their range as a band; those of other lengths (diverged) as thin lines."""
    longest = max((tokens for tokens, _ in curves), key=len, default=np.array([]))
    whole = [values for tokens, values in curves if np.array_equal(tokens, longest)]
    for tokens, values in curves:
        if not np.array_equal(tokens, longest):
            axes.plot(tokens, values, color=look.color, linestyle=look.dashes, linewidth=0.7)
    if len(whole) > 1:
        axes.fill_between(longest, np.min(whole, 0), np.max(whole, 0), color=look.color, alpha=0.18, lw=0)
    line = (longest, np.mean(whole, 0)) if whole else ([], [])
    return axes.plot(*line, color=look.color, linestyle=look.dashes, linewidth=1.4)[0]


def zoom(axes: Any, runs: Sequence[dict]) -> None:
    """Leave out the fall of the first steps, where all curves are one."""
    losses = [own for run in runs if len(own := thin(run["curve"])[1]) > 20]
    if losses:
        low, high = min(own.min() for own in losses), max(own[len(own) // 12 :].max() for own in losses)
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def group_name(group: Mapping[str, Any]) -> str:
    """ "34.7M parameters, 131,072 tokens per step, 382 steps, lr 0.001, gain 4", in two lines."""
    size = f"{group['parameters'] / 1e6:.3g}M parameters"
    start = ", from trained weights" if group["init_from"] else ""
    gain = f", gain {group['qk_norm_gain']:g}" if "qk_norm_gain" in group else ""
    schedule = f"{group['tokens_per_step']:,} tokens per step"
    return f"{size}, {schedule},\n{group['steps']:,} steps, lr {group['lr']:g}{gain}{start}"
