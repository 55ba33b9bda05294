"""How far a tensor is from its reference: the measures of the paper's tables and figures, and one of rows.

All sums are in float64. A NaN in either tensor gives NaN.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.linalg import vector_norm


def cosine_similarity(actual: Tensor, reference: Tensor) -> float:
    """⟨a, r⟩ / (‖a‖·‖r‖). Where a vector is all zeros: 1 if both are, else 0."""
    a, r = _as_vectors(actual, reference)
    norms = _norm(a) * _norm(r)
    if norms == 0:
        return float(_norm(a) == _norm(r))
    return (a @ r).item() / norms


def relative_l2(actual: Tensor, reference: Tensor) -> float:
    """‖a − r‖ / ‖r‖. Where the reference is all zeros: 0 if ``actual`` is too, else inf."""
    a, r = _as_vectors(actual, reference)
    error, norm = _norm(a - r), _norm(r)
    if norm == 0:
        return error if error == 0 or math.isnan(error) else math.inf
    return error / norm


def small_rows_left(actual: Tensor, reference: Tensor) -> float:
    """What small rows keep: of the smallest quarter of the reference's rows, the median of ⟨a, r⟩ / ‖r‖².

    Rows are (…, D); those that are zero do not count, and without any other it is 1. Of dQ and dK it tells
    what relative L2 hides, because large rows dominate that: where small elements of dS round to zero, small
    rows shrink in every step, which raises the loss of training.

    The median, because of a row that is zero but for rounding (the first query's, under a causal mask) the
    share may be anything. Shares are cut to 0…2; it is at one of these if most small rows are such noise, as
    with logits in the hundreds.
    """
    _as_vectors(actual, reference)
    a, r = (x.detach().double().reshape(-1, x.shape[-1]) for x in (actual, reference))
    if a.isnan().any() or r.isnan().any():
        return math.nan
    squares = r.square().sum(-1)
    a, r, squares = (x[squares > 0] for x in (a, r, squares))
    if not len(r):
        return 1.0
    small = squares.topk(math.ceil(len(r) / 4), largest=False).indices
    return ((a * r).sum(-1) / squares)[small].clamp(0, 2).median().item()


def _as_vectors(actual: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    if actual.shape != reference.shape:
        raise ValueError(
            f"actual is {tuple(actual.shape)}, reference {tuple(reference.shape)}; compare equal shapes"
        )
    return actual.detach().double().flatten(), reference.detach().double().flatten()


def _norm(x: Tensor) -> float:
    return vector_norm(x).item()
