"""Loss curves, and the probe's, as pictures."""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.pictures import ATTENTION, BASELINE, CYCLE, LIMIT, Style, pyplot

PROBED = {"o": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}  # keys of metrics.jsonl, and the paper's names

LINES = 6  # in one picture of losses; more cannot be told apart
SET = "val_loss/"  # begins the key of a named validation set
_LAYER = re.compile(r"probe/layer_(\d+)/")
_ATTENTION = re.compile(r"(?:^|[+ ])(?:attention[-=])?(\w+)(?=[+ ]|$)")

Records = list[dict[str, Any]]  # of a metrics.jsonl


# ------------------------------------------------------------------ losses


def plot_losses(
    groups: Mapping[str, Sequence[Records]], path: Path, *, baselines: Mapping[str, str] | None = None
) -> list[Path]:
    """Draw training and validation loss over tokens. Returns the files written.

    Training loss is a smoothed line, validation loss markers. The seeds of a group are drawn as their mean
    with a band from the lowest to the highest. Named validation sets have a panel below. The lowest panel has
    each group's training loss minus that of its baseline. More than LINES groups take more pictures
    (path_2.png, …), with the baseline of each group in its picture.

    groups: by label, the records of metrics.jsonl of each seed. baselines: {label: label of its baseline}.
    """
    baselines = baselines or {}
    paths = []
    for number, page in enumerate(_pages([*groups], baselines), start=1):
        paths.append(path if number == 1 else path.with_stem(f"{path.stem}_{number}"))
        _plot_page({name: groups[name] for name in page}, baselines, paths[-1])
    return paths


def _pages(groups: Sequence[str], baselines: Mapping[str, str]) -> list[list[str]]:
    """At most LINES groups each; those with a common baseline together, or each part after the baseline."""
    families: dict[str, list[str]] = {}
    for group in groups:
        others = families.setdefault(baselines.get(group, group), [])
        others += [group] if group in baselines else []
    pages: list[list[str]] = [[]]
    for baseline, others in families.items():
        for start in range(0, len(others) or 1, LINES - 1):
            part = [baseline, *others[start : start + LINES - 1]]
            pages += [[]] if len(pages[-1]) + len(part) > LINES else []
            pages[-1] += part
    return pages


def _styles(groups: Sequence[str]) -> dict[str, Style]:
    """Attentions have a style of their own, as long as it tells the groups apart; else by order."""
    named = [next((n for n in _ATTENTION.findall(group) if n in ATTENTION), None) for group in groups]
    if None not in named and len(set(named)) == len(named):
        return {group: ATTENTION[name] for group, name in zip(groups, named, strict=True)}
    return dict(zip(groups, CYCLE, strict=False))


def _plot_page(groups: Mapping[str, Sequence[Records]], baselines: Mapping[str, str], path: Path) -> None:
    styles, sets = _styles([*groups]), named_sets(records for seeds in groups.values() for records in seeds)
    compared = any(group in baselines for group in groups)
    ratios = [3, *([1.8] if sets else []), *([1.5] if compared else [])]
    height = 3.6 + 0.25 * len(groups) + (2.2 if compared else 0) + (2.0 if sets else 0)
    with pyplot() as plt:
        figure, panels = plt.subplots(
            len(ratios), figsize=(8, height), sharex=True, squeeze=False, height_ratios=ratios
        )
        losses, below = panels[0, 0], panels[-1, 0]
        for group, seeds in groups.items():
            _draw_losses(losses, group, seeds, styles[group])
        bands = ", bands: all seeds" if any(len(seeds) > 1 for seeds in groups.values()) else ""
        losses.set_ylabel("cross-entropy loss (nats per token)")
        losses.set_title(f"Training loss (lines, smoothed{bands}) and validation loss (markers)")
        if sets:
            _draw_sets(panels[1, 0], groups, sets, styles)
        if compared:
            _draw_differences(below, groups, baselines, styles)
        _label_tokens(below)
        longest = max(map(len, losses.get_legend_handles_labels()[1]))
        figure.legend(loc="outside lower center", ncols=1 if longest > 25 else 3)
        figure.savefig(path)
        plt.close(figure)


def _draw_losses(axes: Any, group: str, seeds: Sequence[Records], look: Style) -> None:
    label = _shorten(group) + (f" ({len(seeds)} seeds)" if len(seeds) > 1 else "")
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
    axes.plot([], [], label=label, **look.line, **hollow)


def named_sets(runs: Iterable[Records]) -> list[str]:
    """The names of the validation sets that the runs have, in order of appearance."""
    keys = (key for records in runs for record in records for key in record)
    return list(dict.fromkeys(key.removeprefix(SET) for key in keys if key.startswith(SET)))


def _draw_sets(
    axes: Any, groups: Mapping[str, Sequence[Records]], sets: Sequence[str], styles: Mapping[str, Style]
) -> None:
    """Loss on the first LINES named validation sets: a colour for each group, a marker for each set."""
    handles: list[Any] = []
    for name, look in zip(sets, CYCLE[:LINES], strict=False):
        line = {**look.line, "markersize": 5, "linewidth": 1.2}
        for group, seeds in groups.items():
            tokens, values = together(seeds, SET + name)
            axes.plot(tokens, values.mean(0), **line | {"color": styles[group].color})
        # No label: the figure's legend has the groups.
        handles += axes.plot([], [], **line | {"color": BASELINE})
    axes.set_ylabel("loss (nats)")
    left_out = f" (the first {LINES} of {len(sets)})" if len(sets) > LINES else ""
    axes.set_title(f"Loss on named validation sets{left_out}")
    axes.legend(handles, [*map(_shorten, sets[:LINES])], ncols=LINES)


def _draw_differences(
    axes: Any,
    groups: Mapping[str, Sequence[Records]],
    baselines: Mapping[str, str],
    styles: Mapping[str, Style],
) -> None:
    """Each group's training loss minus its baseline's, at the tokens that both have."""
    curves = {group: together(seeds, "loss") for group, seeds in groups.items()}
    settled = [0.0]  # what is left once the first tenth is over
    compared = {group: baselines[group] for group in groups if group in baselines}
    for group, baseline in compared.items():
        (its_tokens, its), (base_tokens, base) = curves[group], curves[baseline]
        tokens, here, there = np.intersect1d(its_tokens, base_tokens, return_indices=True)
        values = smooth(its.mean(0)[here] - base.mean(0)[there])
        axes.plot(tokens, values, color=styles[group].color, linestyle=styles[group].dashes, linewidth=1.4)
        settled += values[tokens > 0.1 * tokens.max(initial=0)].tolist()
    margin = 0.25 * (max(settled) - min(settled)) or 1e-3
    axes.set_ylim(min(settled) - margin, max(settled) + margin)
    first, *more = dict.fromkeys(compared.values())
    of = "full precision with the same other settings" if more else _shorten(first, 50)
    axes.axhline(0, color=BASELINE if more else styles[first].color, linewidth=1)
    axes.set_title(f"Training loss minus that of {of}")
    axes.set_ylabel("difference (nats)")


def together(seeds: Sequence[Records], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Token counts (T,) at which every run has `key`, and its values there (runs, T)."""
    curves = [dict(zip(*series(records, key), strict=True)) for records in seeds]
    tokens = [count for count in curves[0] if all(count in curve for curve in curves)]
    values = [[curve[count] for count in tokens] for curve in curves]
    return np.array(tokens, dtype=float), np.array(values, dtype=float)


# ------------------------------------------------------------------ probe


def plot_probe(records: Records, path: Path, *, alarm: float | None = None, title: str = "SageBwd") -> None:
    """Draw the probe's relative L2 errors of O, dQ, dK and dV over tokens, one line per layer.

    Later layers are lighter. Grey is the error of full-precision (16-bit) attention in these layers: median
    and range. alarm: the limit that gradients should stay below, or None. title: the attention whose error
    was measured. Writes no picture if `records` hold no measurement.
    """
    measured = [record for record in records if "probe/seconds" in record and record.get("tokens")]
    if not measured:
        return
    layers = sorted({int(match[1]) for record in measured for key in record if (match := _LAYER.match(key))})
    with pyplot() as plt:
        figure, panels = plt.subplots(2, 2, figsize=(8, 6.6), sharex=True, sharey=True)
        shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(layers)))
        for axes, (name, tensor) in zip(panels.flat, PROBED.items(), strict=True):
            _draw_baseline(axes, measured, [f"probe/layer_{layer}/fpa_{name}_l2" for layer in layers])
            for index, (layer, shade) in enumerate(zip(layers, shades, strict=True)):
                line = CYCLE[(index + 1) % len(CYCLE)].line | {"color": shade}
                points = series(measured, f"probe/layer_{layer}/{name}_l2")
                axes.plot(*points, **line, markersize=4, linewidth=1.3, label=f"layer {layer}")
            if alarm is not None and name != "o":  # the alarm watches the gradients
                label = f"probe.alarm={alarm:g}"
                axes.axhline(alarm, color=LIMIT, linestyle=(0, (6, 2)), linewidth=1.2, label=label)
            axes.set_title(tensor)
        panels[0, 0].set_yscale("log", nonpositive="mask")
        for axes in panels[:, 0]:
            axes.set_ylabel("relative L2 error")
        for axes in panels[1]:
            _label_tokens(axes)
        figure.suptitle(f"Error of {title} on the run's own q, k, v and dO")
        figure.legend(*panels[1, 1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.savefig(path)
        plt.close(figure)


def _draw_baseline(axes: Any, measured: Records, keys: Sequence[str]) -> None:
    """The error of full-precision attention in these layers: median, and range from lowest to highest."""
    rows = [(record["tokens"], [record[key] for key in keys if record.get(key)]) for record in measured]
    rows = [(tokens, errors) for tokens, errors in rows if errors]
    if rows:
        tokens, errors = zip(*rows, strict=True)
        lowest, highest = list(map(min, errors)), list(map(max, errors))
        axes.fill_between(tokens, lowest, highest, color=BASELINE, alpha=0.25, linewidth=0)
        label = "full-precision attention (median, range)"
        axes.plot(tokens, list(map(np.median, errors)), color=BASELINE, linewidth=1.3, label=label)


# ------------------------------------------------------------------ both


def _label_tokens(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _shorten(label: str, length: int = 130) -> str:
    """A label in lines that fit into a picture, without its middle if it is too long; $ stands for itself."""
    half = (length - 1) // 2
    short = label if len(label) <= length else f"{label[:half]}…{label[-half:]}"
    return textwrap.fill(short, 65).replace("$", r"\$")


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
