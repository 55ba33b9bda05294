"""Titles and colours of what the benchmarks compare; the keys are the names that the JSON files hold.

SageBwd has the colours of :mod:`trainer.style`, one for each preset. Everything that computes attention in
full precision is black or grey, with a hatch for each library. The parts of a training step are browns.
So a colour means the same in every picture, and hatches tell bars apart without colour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from scripts.output import save_figure
from trainer.style import ATTENTION


class Look(NamedTuple):
    """How something is called in tables and legends, and the fill of its bars."""

    title: str
    color: str
    hatch: str


def preset(title: str, name: str) -> Look:
    """A preset of SageBwd, by its name in ``configs/attention/``."""
    return Look(title, ATTENTION[name].color, ATTENTION[name].hatch)


def variant(title: str, hatch: str) -> Look:
    """A setting of SageBwd that is not a preset."""
    return Look(f"SageBwd, {title}", ATTENTION["sagebwd_low_bias"].color, hatch)


CUDNN = Look("cuDNN", ATTENTION["fpa"].color, "")
FLASH = Look("FlashAttention-2", "#7f7f7f", "///")
FLASH_4 = Look("FlashAttention-4", "#3c3c3c", "\\\\\\")
SAGEBWD = preset("SageBwd", "sagebwd")

#: Rows of scripts.bench.attention.
ATTENTION_LOOKS = {
    "sagebwd": SAGEBWD,
    "sagebwd low bias": preset("SageBwd, low bias", "sagebwd_low_bias"),
    "sagebwd paper": preset("SageBwd, paper", "sagebwd_paper"),
    "sagebwd consistent": preset("SageBwd, consistent", "sagebwd_consistent"),
    "sagebwd accurate": preset("SageBwd, accurate", "sagebwd_accurate"),
    "sagebwd strictly causal": preset("SageBwd, strictly causal", "sagebwd_strictly_causal"),
    "sagebwd P in 16 bit": variant("16-bit P", "+++"),
    "sagebwd smooth V": variant("smoothed V", "|||"),
    "sagebwd unsigned P": variant("unsigned P", "---"),
    "sagebwd compensated O": variant("compensated O", "***"),
    "sagebwd dQ in 16 bit": variant("16-bit dQ", "ooo"),
    "sagebwd consistent, dQ in 16 bit": variant("consistent, 16-bit dQ", "xxx"),
    "sagebwd S alone in INT8": preset("SageBwd, S alone in INT8", "sagebwd_int8_scores"),
    "cuDNN": CUDNN,
    "FlashAttention-2": FLASH,
    "FlashAttention-4": FLASH_4,
    "FlexAttention": Look("FlexAttention", "#c8c8c8", "..."),
    "FlashAttention-3": Look("FlashAttention-3", "#585858", "xxx"),
    "flash_attn package": Look("flash_attn package", "#9a9a9a", "|||"),
    "SageAttention": Look("SageAttention (INT8, forward only)", "#e6e6e6", "ooo"),
    "SDPA math": Look("PyTorch, math", "#b0b0b0", "---"),
}

#: Rows of scripts.bench.training.
TRAINING_LOOKS = {
    "fpa-cudnn": CUDNN,
    "fpa-flash": FLASH,
    "fpa-fa4": FLASH_4,
    "fpa": CUDNN._replace(title="full precision"),
    "fpa-deterministic": CUDNN._replace(title="full precision, deterministic", hatch="|||"),
    "fpa-graphs": CUDNN._replace(title="full precision, CUDA graphs", hatch="---"),
    "sagebwd": SAGEBWD,
    "sagebwd-deterministic": SAGEBWD._replace(title="SageBwd, deterministic", hatch="|||"),
    "sagebwd-graphs": SAGEBWD._replace(title="SageBwd, CUDA graphs", hatch="---"),
    "sagebwd-16-bit-p": ATTENTION_LOOKS["sagebwd P in 16 bit"],
    "sagebwd-consistent": ATTENTION_LOOKS["sagebwd consistent"],
    "sagebwd-int8-scores": ATTENTION_LOOKS["sagebwd S alone in INT8"],
    "sagebwd-16-bit-dq": ATTENTION_LOOKS["sagebwd consistent, dQ in 16 bit"],
    "hf": Look("transformers Llama", "#9a9a9a", "xxx"),
    "hf-causal": Look("transformers Llama, no mask", "#b8b8b8", "..."),
    "nanogpt": Look("nanoGPT-style GPT", "#d8d8d8", "ooo"),
}

#: Parts of a training step, by the names in the JSON files; "idle" is not in them.
STEP_PARTS = {
    "attention": Look("attention", "#5c3a1e", ""),
    "matrix products": Look("matrix products", "#a9825a", "///"),
    "rest": Look("other kernels", "#d9c3a5", "..."),
    "idle": Look("GPU idle", "#e2e2e2", ""),
}


def look_of(name: str, looks: dict[str, Look]) -> Look:
    """The look of a name; one that is unknown, as in an old file, is shown under its own name."""
    return looks.get(name, Look(name.replace("sagebwd", "SageBwd"), "#f0f0f0", "\\\\\\"))


def fill(look: Look) -> dict[str, Any]:
    """The keyword arguments of a bar: the hatch is white on dark colours, black on light ones."""
    return {"facecolor": look.color, "hatch": look.hatch, "edgecolor": ink(look.color), "linewidth": 0}


def ink(color: str) -> str:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#303030"


def two_lines(title: str) -> str:
    """A title below a bar, broken at its comma."""
    return title.replace(", ", ",\n")


def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure of `size` inches and its grid of axes, without the upper and right frame."""
    import matplotlib  # slow to import; only needed for pictures

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    return figure, grid


def add_legend(figure: Any, looks: list[Look], columns: int) -> None:
    """A box for each look, below the panels."""
    import matplotlib.pyplot as plt

    boxes = [plt.Rectangle((0, 0), 1, 1, **fill(look)) for look in looks]
    options = {"ncols": columns, "frameon": False, "handlelength": 2.5, "handleheight": 1.2}
    figure.legend(boxes, [look.title for look in looks], loc="outside lower center", **options)


def finish(figure: Any, title: str, what: str, path: Path) -> None:
    """Write the picture under a title and a line that says what was measured."""
    import matplotlib.pyplot as plt

    figure.suptitle(f"{title}\n{what}", fontsize=11)
    save_figure(figure, path)
    plt.close(figure)
