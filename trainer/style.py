"""How every picture looks: one meaning per colour, readable for colour-blind readers and in black and white.

The colours are those of Okabe and Ito (2008). Styles also differ in marker, and in dashes and hatch except
for the first two, which differ most in lightness.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Style(NamedTuple):
    """A colour, the dashes of a line, the marker of a point and the hatch of a bar."""

    color: str
    dashes: str | tuple[int, tuple[int, ...]]
    marker: str
    hatch: str


#: What is compared in most pictures; the keys are the names of ``configs/attention/``.
ATTENTION = {
    "fpa": Style("#000000", "-", "o", ""),
    "sagebwd": Style("#0072B2", "-", "s", ""),
    "sagebwd_paper": Style("#D55E00", "--", "^", "///"),
    "sagebwd_consistent": Style("#009E73", "-.", "D", "\\\\\\"),
    "sagebwd_accurate": Style("#CC79A7", ":", "v", "..."),
    "sagebwd_strictly_causal": Style("#E69F00", (0, (5, 1, 1, 1)), "P", "xxx"),
    "sagebwd_low_bias": Style("#56B4E9", (0, (1, 1)), "X", "oo"),
    "sagebwd_int8_scores": Style("#8C564B", (0, (3, 1, 1, 1, 1, 1)), "<", "++"),
}

#: For anything else: matrix products, other libraries, runs that differ in something other than attention.
CYCLE = (
    *ATTENTION.values(),
    Style("#888888", "--", "*", "ooo"),
)

#: What a picture compares with, such as the error of 16-bit attention.
BASELINE = "#888888"

#: A limit that should not be exceeded.
LIMIT = "#D55E00"


def style(name: str, index: int) -> Style:
    """The style of an attention in :data:`ATTENTION`, and of anything else by its place in a picture."""
    return ATTENTION.get(name, CYCLE[index % len(CYCLE)])


def ordered(count: int) -> list[Style]:
    """Styles for things with an order, such as layers: from dark to light, with different markers."""
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    shades = matplotlib.colormaps["viridis"]
    positions = [0.85 * index / max(count - 1, 1) for index in range(count)]
    return [
        Style(matplotlib.colors.to_hex(shades(position)), look.dashes, look.marker, look.hatch)
        for position, look in zip(positions, (CYCLE * (count // len(CYCLE) + 1))[1:], strict=False)
    ]


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
