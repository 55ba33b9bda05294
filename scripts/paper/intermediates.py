"""What happens in the middle of SageBwd: δ, P, dP and dS of the reference against exact attention (Table 2).

Every matrix here has N × N entries for each head, so some heads are computed at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import sagebwd.reference
from sagebwd import SageConfig
from trainer.probe import Captured, exact_scores, without_tf32

TITLES = {
    "delta": "δ",
    "p": "P",
    "dp": "dP",
    "ds": "dS",
    "o": "O",
    "dq": "dQ",
    "dk": "dK",
    "dv": "dV",
}

ENTRIES_AT_ONCE = 2**26  # of P (256 MiB in float32); some twelve such matrices are alive together


class Comparison:
    """Cosine similarity and relative L2 of a tensor that comes in parts, summed in float64."""

    def __init__(self) -> None:
        self.dot = self.actual = self.exact = self.error = 0.0  # ⟨a, e⟩, ‖a‖², ‖e‖², ‖a − e‖²

    def add(self, actual: Tensor, exact: Tensor) -> None:
        """Add parts of the same shape."""
        a, e = actual.double().flatten(), exact.double().flatten()
        self.dot += (a @ e).item()
        self.actual += (a @ a).item()
        self.exact += (e @ e).item()
        self.error += (a - e).square_().sum().item()

    def values(self) -> tuple[float, float]:
        """(cosine similarity, relative L2), NaN where the exact tensor is zero."""
        if self.exact == 0:
            return math.nan, math.nan
        if self.actual == 0:
            return 0.0, 1.0
        return self.dot / math.sqrt(self.actual * self.exact), math.sqrt(self.error / self.exact)


def measure(captured: Captured, config: SageConfig) -> dict[str, tuple[float, float]]:
    """(cosine similarity, relative L2) of the tensors of TITLES over a layer's heads and sequences."""
    comparisons = {name: Comparison() for name in TITLES}
    with without_tf32():
        for q, k, v, grad_out in parts(captured):
            actual, exact = quantized(q, k, v, grad_out, config), exact_attention(q, k, v, grad_out)
            for name, comparison in comparisons.items():
                comparison.add(actual[name], exact[name])
    return {name: comparison.values() for name, comparison in comparisons.items()}


def parts(captured: Captured) -> list[tuple[Tensor, ...]]:
    """q, k, v, dO of some heads of one sequence, as many as ENTRIES_AT_ONCE allows; groups stay together."""
    group = captured.q.shape[1] // captured.k.shape[1]
    keys_at_once = max(ENTRIES_AT_ONCE // (group * captured.q.shape[2] ** 2), 1)
    heads = (group * keys_at_once, keys_at_once, keys_at_once, group * keys_at_once)
    tensors = (captured.q, captured.k, captured.v, captured.grad_out)
    return [
        part
        for sequence in zip(*(x.split(1) for x in tensors), strict=True)
        for part in zip(*(x.split(n, dim=1) for x, n in zip(sequence, heads, strict=True)), strict=True)
    ]


def quantized(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, config: SageConfig) -> dict[str, Tensor]:
    """The tensors of TITLES under SageBwd's reference."""
    is_gqa = q.shape[1] != k.shape[1]
    found = sagebwd.reference.attention(q, k, v, grad_out, is_causal=True, enable_gqa=is_gqa, config=config)
    return {name: getattr(found, "out" if name == "o" else name) for name in TITLES}


@torch.no_grad()
def exact_attention(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    """The tensors of TITLES in float32, by whole matrices. q, grad_out: (B, H, N, D); k, v: (B, G, N, D)."""
    group = q.shape[1] // k.shape[1]
    q, grad_out = q.float(), grad_out.float()
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    _, p, dp, ds = exact_scores(q, k, v, grad_out)
    dk, dv = ((x.mT @ y).unflatten(1, (-1, group)).sum(2) for x, y in ((ds, q), (p, grad_out)))
    return {
        "delta": (p * dp).sum(-1),
        "p": p,
        "dp": dp,
        "ds": ds,
        "o": p @ v,
        "dq": ds @ k * scale,
        "dk": dk * scale,
        "dv": dv,
    }
