"""How the pictures of scripts/paper look: figures, colours and small files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.output import replace_file
from trainer.style import ATTENTION, Style

DPI = 110
COLORS = 256  # of a picture's palette

#: Anything but presets, in its order in a picture: told apart by colour and marker.
OTHERS = (
    Style("#999933", (0, (1, 1)), "H", "+++"),
    Style("#888888", (0, (4, 2)), "*", "ooo"),
    Style("#999933", "-", "4", "--"),
    Style("#888888", "-.", ">", "||"),
    Style("#999933", "--", "d", "//"),
    Style("#888888", (0, (1, 3)), "p", "xx"),
)

#: Names in tables and files: those of configs/attention/.
CONFIG_NAMES = {
    "full precision": "fpa",
    "all in 16 bit": "fpa",
    "cuDNN": "fpa",
    "sagebwd": "sagebwd",
    "default": "sagebwd",
    "paper": "sagebwd_paper",
    "block": "sagebwd_paper",
    "consistent": "sagebwd_consistent",
    "accurate": "sagebwd_accurate",
    "strictly causal": "sagebwd_strictly_causal",
    "low bias": "sagebwd_low_bias",
    "S alone in INT8": "sagebwd_int8_scores",
}


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A style for each name: a preset's own, or the next of OTHERS."""
    others = [name for name in names if preset(name) is None]
    return {
        name: ATTENTION[found] if (found := preset(name)) else OTHERS[others.index(name) % len(OTHERS)]
        for name in names
    }


def preset(name: str) -> str | None:
    """ "SageBwd, consistent", "sagebwd consistent" and "consistent" are one preset, "SageBwd" the default."""
    short = name.removeprefix("SageBwd, ").removeprefix("sagebwd ")
    return CONFIG_NAMES.get("default" if short == "SageBwd" else short)


def grid(rows: int, columns: int, *, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure and its rows × columns of axes; width and height: inches of each."""
    import matplotlib  # slow to import; only needed for pictures

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (width * columns, height * rows)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


def log_axis(axis: Any) -> None:
    """A logarithmic axis (axes.xaxis or axes.yaxis) with plain numbers: 0.01, 0.02, 0.05."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def tokens_axis(axes: Any) -> None:
    """Tokens seen, as 10M."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def legend_below(figure: Any, handles: Sequence[Any], labels: Sequence[str], columns: int = 4) -> None:
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def save(figure: Any, path: Path) -> None:
    """Write a picture, whole or not at all, with a palette instead of full colour: half the size."""
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI, format="png")
    plt.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_with_palette(buffer.getvalue(), path)


def save_with_palette(png: bytes, path: Path) -> None:
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    replace_file(path, lambda temporary: picture.save(temporary, format="PNG", optimize=True))
