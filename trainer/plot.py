"""Loss curves, and the probe's, as pictures."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.style import ATTENTION, BASELINE, CYCLE, LIMIT, Style, ordered, pyplot

PROBED = {"o": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}  # keys of metrics.jsonl, and the paper's names

LINES = 6  # in one picture; more cannot be told apart
SET = "val_loss/"  # begins the key of a named validation set
_LAYER = re.compile(r"probe/layer_(\d+)/")
_SEED = re.compile(r"(^|\+)seed[-=]\d+(?=\+|$)")
_ATTENTION = re.compile(r"(?:^|\+)(?:attention[-=])?(\w+)(?=\+|$)")

Records = list[dict[str, Any]]  # of a metrics.jsonl


# ------------------------------------------------------------------ losses


def plot_losses(
    runs: Mapping[str, Records], path: Path, *, groups: Mapping[str, str] | None = None
) -> list[Path]:
    """Draw training and validation loss over tokens. Returns the files written.

    Training loss is a smoothed line, validation loss markers. Runs of one group differ in the seed alone:
    they are drawn as their mean with a band from the lowest to the highest. Named validation sets have a
    panel below. If there are several groups, a panel at the bottom has each group's training loss minus the
    first group's. More than LINES groups take more pictures (path_2.png, …), each with the first group in it.

    runs: a label and the records of metrics.jsonl of each run.
    groups: the group of each label; by default, the label without its `seed-N`.
    """
    members: dict[str, list[Records]] = {}
    for label, records in runs.items():
        group = group_of(label) if groups is None else groups[label]
        members.setdefault(group, []).append(records)
    styles = _styles(list(members))
    first, *others = members
    pages = [others[start : start + LINES - 1] for start in range(0, len(others), LINES - 1)] or [[]]
    paths = []
    for number, page in enumerate(pages, start=1):
        paths.append(path if number == 1 else path.with_name(f"{path.stem}_{number}{path.suffix}"))
        _plot_page({name: members[name] for name in (first, *page)}, styles, paths[-1])
    return paths


def group_of(label: str) -> str:
    """What the seeds of one setting share: the label without its seed."""
    return _SEED.sub("", label).lstrip("+") or "all seeds"


def _styles(groups: Sequence[str]) -> dict[str, Style]:
    """Attentions have a style of their own, as long as it tells the groups apart; else by order."""
    named = [next((n for n in _ATTENTION.findall(group) if n in ATTENTION), None) for group in groups]
    if None not in named and len(set(named)) == len(named):
        return {group: ATTENTION[name] for group, name in zip(groups, named, strict=True)}
    return {
        # The first, which the others are compared with, keeps its style in every picture.
        group: CYCLE[0 if index == 0 else 1 + (index - 1) % (LINES - 1)]
        for index, group in enumerate(groups)
    }


def _plot_page(groups: Mapping[str, list[Records]], styles: Mapping[str, Style], path: Path) -> None:
    with pyplot() as plt:
        several = len(groups) > 1
        sets = named_sets(records for seeds in groups.values() for records in seeds)
        height = (
            (4.2 if several else 3.6) + 0.25 * len(groups) + (1.6 if several else 0) + (2.0 if sets else 0)
        )
        ratios = [3, *([1.8] if sets else []), *([1.5] if several else [])]
        figure, panels = plt.subplots(
            len(ratios), figsize=(8, height), sharex=True, squeeze=False, height_ratios=ratios
        )
        losses = panels[0, 0]
        for group, seeds in groups.items():
            _draw_losses(losses, group, seeds, styles[group])
        losses.set_ylabel("cross-entropy loss (nats per token)")
        losses.set_title("Training loss (line, smoothed) and validation loss (markers)")
        if sets:
            _draw_sets(panels[1, 0], groups, sets, styles)
        if several:
            first, *others = groups
            below = panels[-1, 0]
            _draw_differences(below, {name: groups[name] for name in others}, groups[first], styles)
            below.axhline(0, color=styles[first].color, linewidth=1)
            below.set_title(f"Training loss minus that of {_shorten(first, 50)}")
            below.set_ylabel("difference (nats)")
        _label_tokens(panels[-1, 0])
        figure.legend(loc="outside lower center", ncols=1 if max(map(len, groups)) > 30 else 3)
        figure.savefig(path)
        plt.close(figure)


def _draw_losses(axes: Any, group: str, seeds: list[Records], look: Style) -> None:
    label = _shorten(group) + (f" ({len(seeds)} seeds: mean, lowest to highest)" if len(seeds) > 1 else "")
    tokens, values = together(seeds, "loss")
    if len(seeds) == 1 and len(tokens):
        axes.plot(tokens, values[0], color=look.color, alpha=0.2, linewidth=0.6)
    smoothed = np.array([smooth(one) for one in values])
    if len(seeds) > 1:
        axes.fill_between(tokens, smoothed.min(0), smoothed.max(0), color=look.color, alpha=0.2, linewidth=0)
    axes.plot(tokens, smoothed.mean(0), color=look.color, linestyle=look.dashes, linewidth=1.6)
    tokens, values = together(seeds, "val_loss")
    hollow = {"markersize": 7, "markerfacecolor": "none", "markeredgewidth": 1.6}  # none hides another
    if len(tokens):  # with clip_on=False an empty line has no place, and the layout fails
        axes.plot(tokens, values.mean(0), look.marker, color=look.color, clip_on=False, zorder=3, **hollow)
    axes.plot([], [], color=look.color, linestyle=look.dashes, marker=look.marker, label=label, **hollow)


def named_sets(runs: Iterable[Records]) -> list[str]:
    """The names of the validation sets that the runs have, in order of appearance."""
    keys = (key for records in runs for record in records for key in record)
    return list(dict.fromkeys(key.removeprefix(SET) for key in keys if key.startswith(SET)))


def _draw_sets(
    axes: Any, groups: Mapping[str, list[Records]], sets: Sequence[str], styles: Mapping[str, Style]
) -> None:
    """Loss on the first LINES named validation sets: a colour for each group, a marker for each set."""
    handles: list[Any] = []
    for name, look in zip(sets, CYCLE[:LINES], strict=False):
        line = {"linestyle": look.dashes, "marker": look.marker, "markersize": 5, "linewidth": 1.2}
        for group, seeds in groups.items():
            tokens, values = together(seeds, SET + name)
            axes.plot(tokens, values.mean(0), **line, color=styles[group].color)
        handles += axes.plot([], [], **line, color=BASELINE)  # no label: the figure's legend has the groups
    axes.set_ylabel("loss (nats)")
    left_out = f" (the first {LINES} of {len(sets)})" if len(sets) > LINES else ""
    axes.set_title(f"Loss on named validation sets{left_out}")
    axes.legend(handles, [*map(_shorten, sets[:LINES])], ncols=LINES)


def _draw_differences(
    axes: Any, groups: Mapping[str, list[Records]], baseline: list[Records], styles: Mapping[str, Style]
) -> None:
    base = dict(zip(*_mean(baseline), strict=True))
    settled = []  # what is left once the first tenth is over
    for group, seeds in groups.items():
        loss = dict(zip(*_mean(seeds), strict=True))
        tokens = np.array([count for count in loss if count in base])
        values = smooth(np.array([loss[count] - base[count] for count in tokens]))
        look = styles[group]
        axes.plot(tokens, values, color=look.color, linestyle=look.dashes, linewidth=1.4)
        settled += values[tokens > 0.1 * tokens.max()].tolist() if len(tokens) else []
    if settled:
        low, high = min(*settled, 0.0), max(*settled, 0.0)
        margin = 0.25 * (high - low) or 1e-3
        axes.set_ylim(low - margin, high + margin)


def _mean(seeds: list[Records]) -> tuple[np.ndarray, np.ndarray]:
    tokens, values = together(seeds, "loss")
    return tokens, values.mean(0)


def together(seeds: Sequence[Records], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Token counts (T,) at which every run has `key`, and its values there (runs, T)."""
    curves = [dict(zip(*series(records, key), strict=True)) for records in seeds]
    tokens = [count for count in curves[0] if all(count in curve for curve in curves)]
    values = [[curve[count] for count in tokens] for curve in curves]
    return np.array(tokens, dtype=float), np.array(values, dtype=float)


# ------------------------------------------------------------------ probe


def plot_probe(records: Records, path: Path, *, alarm: float | None = None, title: str = "SageBwd") -> None:
    """Draw the probe's relative L2 errors of O, dQ, dK and dV over tokens, one line per layer.

    Grey is the error of full-precision (16-bit) attention in these layers: median and range. alarm: the limit
    that gradients should stay below, or None. title: the attention whose error was measured. At most LINES
    layers are drawn. Writes no picture if `records` hold no measurement.
    """
    measured = [record for record in records if "probe/seconds" in record and record.get("tokens")]
    if not measured:
        return
    with pyplot() as plt:
        found = sorted(
            {int(match[1]) for record in measured for key in record if (match := _LAYER.match(key))}
        )
        layers = evenly(found, LINES)
        figure, panels = plt.subplots(2, 2, figsize=(8, 6.6), sharex=True, sharey=True)
        for axes, (name, tensor) in zip(panels.flat, PROBED.items(), strict=True):
            _draw_baseline(axes, measured, name, layers)
            for layer, look in zip(layers, ordered(len(layers)), strict=True):
                line = {"linestyle": look.dashes, "marker": look.marker, "markersize": 4, "linewidth": 1.3}
                axes.plot(*_positive(measured, f"probe/layer_{layer}/{name}_l2"), **line, color=look.color)
            if alarm is not None and name != "o":  # the alarm watches the gradients
                axes.axhline(alarm, color=LIMIT, linestyle=(0, (6, 2)), linewidth=1.2)
            axes.set_title(tensor)
        if any(len(line.get_xdata()) for line in panels[0, 0].lines):
            panels[0, 0].set_yscale("log")
        for axes in panels[:, 0]:
            axes.set_ylabel("relative L2 error")
        for axes in panels[1]:
            _label_tokens(axes)
        some = (
            f" (layers {', '.join(map(str, layers))} of those measured)" if len(layers) < len(found) else ""
        )
        figure.suptitle(f"Error of {title} on the run's own q, k, v and dO{some}")
        has_baseline = any("/fpa_" in key for record in measured for key in record)
        handles = _probe_legend(layers, alarm, has_baseline=has_baseline)
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        figure.savefig(path)
        plt.close(figure)


def _draw_baseline(axes: Any, measured: Records, name: str, layers: Sequence[int]) -> None:
    """The error of full-precision attention in these layers: median, and range from lowest to highest."""
    keys = [f"probe/layer_{layer}/fpa_{name}_l2" for layer in layers]
    rows = [(record["tokens"], [record[key] for key in keys if record.get(key)]) for record in measured]
    rows = [(tokens, errors) for tokens, errors in rows if errors]
    if rows:
        tokens, errors = zip(*rows, strict=True)
        lowest, highest = list(map(min, errors)), list(map(max, errors))
        axes.fill_between(tokens, lowest, highest, color=BASELINE, alpha=0.25, linewidth=0)
        axes.plot(tokens, list(map(np.median, errors)), color=BASELINE, linewidth=1.3)


def _positive(records: Records, key: str) -> tuple[list[float], list[float]]:
    """Tokens and values of the records in which `key` is greater than zero, as a logarithmic axis needs."""
    points = [(record["tokens"], record[key]) for record in records if record.get(key)]
    return ([x for x, _ in points], [y for _, y in points])


def _probe_legend(layers: Sequence[int], alarm: float | None, *, has_baseline: bool) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=look.color, linestyle=look.dashes, marker=look.marker, label=f"layer {layer}")
        for layer, look in zip(layers, ordered(len(layers)), strict=True)
    ]
    if has_baseline:
        handles.append(Line2D([], [], color=BASELINE, label="full-precision attention (median, range)"))
    if alarm is not None:
        handles.append(Line2D([], [], color=LIMIT, linestyle=(0, (6, 2)), label=f"probe.alarm={alarm:g}"))
    return handles


def evenly(items: Sequence[int], count: int) -> list[int]:
    """At most `count` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


# ------------------------------------------------------------------ both


def _label_tokens(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _shorten(label: str, length: int = 90) -> str:
    """A label that fits into a picture, without its middle if it is too long.

    Characters that the font lacks become ?, and $ stands for itself: a label may be a folder's name.
    """
    from matplotlib.font_manager import FontProperties, findfont, get_font

    half = (length - 1) // 2
    short = label if len(label) <= length else f"{label[:half]}…{label[-half:]}"
    known = get_font(findfont(FontProperties())).get_charmap()
    return "".join(char if ord(char) in known else "?" for char in short).replace("$", r"\$")


def series(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and values of the records that have `key`."""
    chosen = [(one["tokens"], one[key]) for one in records if None not in (one.get(key), one.get("tokens"))]
    tokens, values = zip(*chosen, strict=True) if chosen else ((), ())
    return np.array(tokens, dtype=float), np.array(values, dtype=float)


def smooth(values: np.ndarray, share: float = 0.02) -> np.ndarray:
    """Exponential moving average over about `share` of the curve, unbiased at its start."""
    decay = 1 - 1 / max(share * len(values), 1)
    smoothed, average, weight = np.empty_like(values), 0.0, 0.0
    for index, value in enumerate(values):
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        smoothed[index] = average / weight
    return smoothed
