"""Model families of other libraries, tried with SageBwd; a module for each library.

A module has ``families() -> list[Row]``, which tries them all, and ``NAMES``, the families that it knows.
``python -m scripts.integration_table`` runs the modules in :data:`scripts.integration_table.LIBRARIES`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sagebwd import Report


@dataclass(frozen=True)
class Row:
    """How one training step of a model family went.

    Attributes:
        library: with its version.
        family: as people call it.
        model: the class that was tried.
        int8_calls, full_calls: calls of attention in INT8 and in full precision, where the library is asked
            to fall back.
        fallback: what was in full precision, and why; "" for nothing.
        refusal: the message where the library is not asked to fall back; "" if nothing was refused.
        cosine: of the gradients of all parameters to those in full precision; None without any.
        attention_cosine: the same for the parameters of attention layers alone.
        exact_cosine: that of all parameters with nothing in INT8, which no mask, scale or head that is wrong
            leaves at 1.
        lost: number of parameters whose gradient is there in full precision only.
    """

    library: str
    family: str
    model: str
    int8_calls: int = 0
    full_calls: int = 0
    fallback: str = ""
    refusal: str = ""
    cosine: float | None = None
    attention_cosine: float | None = None
    exact_cosine: float | None = None
    lost: int = 0

    @property
    def outcome(self) -> str:
        """In a word or two."""
        if self.int8_calls and self.full_calls:
            return "INT8 in part"
        if self.int8_calls:
            return "INT8"
        return "full precision" if self.full_calls else "never called" if not self.refusal else "refused"


def calls_of(report: Report) -> dict[str, int | str]:
    """``int8_calls``, ``full_calls`` and ``fallback`` of a :class:`Row`."""
    full = [row for row in report.rows if not row.kernels]
    return {
        "int8_calls": sum(row.calls for row in report.rows if row.kernels),
        "full_calls": sum(row.calls for row in full),
        "fallback": "; ".join(sorted({row.reason for row in full})),
    }


def compare_gradients(
    found: dict[str, Tensor], truth: dict[str, Tensor], attention: set[str]
) -> dict[str, float | int | None]:
    """``cosine``, ``attention_cosine`` and ``lost`` of a :class:`Row`.

    Args:
        found, truth: gradients by parameter, without those that are None.
        attention: names of the parameters of attention layers.
    """
    lost = [name for name, x in truth.items() if x.any() and (name not in found or not found[name].any())]
    names = [name for name in truth if name in found]
    return {
        "cosine": _cosine(found, truth, names),
        "attention_cosine": _cosine(found, truth, [name for name in names if name in attention]),
        "lost": len(lost),
    }


def _cosine(found: dict[str, Tensor], truth: dict[str, Tensor], names: list[str]) -> float | None:
    if not names:
        return None
    x, y = (torch.cat([side[name].flatten().double() for name in names]) for side in (found, truth))
    return float(x @ y / (x.norm() * y.norm()))
