"""How every picture looks.

One meaning per colour, readable for colour-blind readers and in black and white. The colours are those of
Okabe and Ito (2008). Styles also differ in marker, and in dashes and hatch except for the first two, which
differ most in lightness.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple


class Style(NamedTuple):
    """A colour, the dashes of a line, the marker of a point and the hatch of a bar."""

    color: str
    dashes: str | tuple[int, tuple[int, ...]]
    marker: str
    hatch: str = ""

    @property
    def line(self) -> dict[str, Any]:
        """The style as matplotlib's arguments of a line with markers."""
        return {"color": self.color, "linestyle": self.dashes, "marker": self.marker}


#: What is compared in most pictures; the keys are the names of ``configs/attention/``.
ATTENTION = {
    "fpa": Style("#000000", "-", "o"),
    "sagebwd": Style("#0072B2", "-", "s"),
    "sagebwd_paper": Style("#D55E00", "--", "^", "///"),
    "sagebwd_consistent": Style("#009E73", "-.", "D", "\\\\\\"),
    "sagebwd_strictly_causal": Style("#E69F00", (0, (5, 1, 1, 1)), "P", "xxx"),
    "sagebwd_low_bias": Style("#56B4E9", (0, (1, 1)), "X", "oo"),
    "sagebwd_int8_scores": Style("#8C564B", (0, (3, 1, 1, 1, 1, 1)), "<", "++"),
}

#: For anything else: matrix products, other libraries, runs that differ in something other than attention.
CYCLE = (*ATTENTION.values(), Style("#888888", "--", "*", "ooo"))

#: What a picture compares with, such as the error of 16-bit attention.
BASELINE = "#888888"

#: A limit that should not be exceeded.
LIMIT = "#D55E00"


@contextmanager
def pyplot() -> Iterator[Any]:
    """matplotlib.pyplot, set up for pictures that are written to files. Slow to import, so use it late."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(
        {
            "figure.constrained_layout.use": True,  # nothing is cut off
            "savefig.dpi": 150,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": "medium",
            "axes.titleweight": "bold",
            "figure.titlesize": "medium",
            "figure.titleweight": "bold",
            "legend.frameon": False,
            "legend.handlelength": 3.0,  # long enough to tell dashes apart
        }
    ):
        yield plt


def grid(rows: int, columns: int, *, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure and its rows × columns of axes; width and height: inches of each."""
    import matplotlib  # slow to import; only needed for pictures

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def log_axis(axis: Any) -> None:
    """A logarithmic axis (axes.xaxis or axes.yaxis) with plain numbers: 0.01, 0.02, 0.05."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Any, handles: Sequence[Any], labels: Sequence[str], columns: int = 4) -> None:
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
