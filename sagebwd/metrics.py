"""How far a tensor is from its reference: the measures of the tables and figures of the paper.

Every tensor counts as one flat vector and is summed in float64. A NaN in either tensor gives NaN.
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


def _as_vectors(actual: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    if actual.shape != reference.shape:
        raise ValueError(
            f"actual is {tuple(actual.shape)}, reference {tuple(reference.shape)}; compare equal shapes"
        )
    return actual.detach().double().flatten(), reference.detach().double().flatten()


def _norm(x: Tensor) -> float:
    return vector_norm(x).item()
