"""How every picture looks: one meaning per colour, told apart by colour-blind readers and in black and white.

The colours are those of Okabe and Ito (2008). A line differs from its neighbours in colour and
dashes, a bar in colour and hatch.
"""

from typing import NamedTuple


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
}

#: For anything else: layers, matrix products, other libraries.
CYCLE = (
    *ATTENTION.values(),
    Style("#56B4E9", (0, (1, 1)), "X", "+++"),
    Style("#888888", "--", "*", "ooo"),
)


def style(name: str, index: int) -> Style:
    """The style of an attention in :data:`ATTENTION`, and of anything else by its place in a picture."""
    return ATTENTION.get(name, CYCLE[index % len(CYCLE)])
