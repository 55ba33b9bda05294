"""What attention computes on the way, by name: the same names for SageBwd and for exact attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionResult:
    """Out, gradients and intermediates of one attention; what was not computed is None.

    Attributes:
        out: (B, H, N_q, D_v).
        lse: (B, H, N_q), the logsumexp of the logits. −inf for a query that sees no key. Of
            :func:`sagebwd.reference.attention`, with the smoothed K: that of the plain logits is
            lse + scale · q·μ_K.
        p, dp, ds: (B, H, N_q, N_kv), P, dP and dS; zero where the mask hides a key, and between
            documents.
        delta: (B, H, N_q), δ.
        dq, dk, dv, dsinks: shaped as q, k, v and the sinks.
    """

    out: Tensor
    lse: Tensor
    p: Tensor | None = None
    dp: Tensor | None = None
    ds: Tensor | None = None
    delta: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None
