"""The logsumexp of the logits, from what the operators save for the backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sagebwd.interface import AttentionParams
from sagebwd.kernels.layout import document_starts


def natural_lse(q: Tensor, lse: Tensor, k_mean: Tensor, params: AttentionParams) -> Tensor:
    """log Σ exp(scale · q·k) over the keys that a query sees, (B, H, N_q) fp32; −inf if it sees none.

    Smoothing subtracted the mean of K, μ, from the keys, and so scale · q·μ from the logits of a query.

    Autograd gives dQ the term of μ, which the backward leaves out because it multiplies dS with the smoothed
    K. dK needs none: whatever is subtracted from all keys, lse is the same.

    Args:
        q: (B, H, N_q, D).
        lse, k_mean: of :class:`~sagebwd.interface.ForwardResult`.
    """
    if params.kernels != "reference":
        lse = lse * math.log(2)
    if params.config.add_mean_k_term:  # dQ has the term of μ already
        q = q.detach()
    # −inf stays, whatever q holds, and is a constant.
    return (lse + _shift(q, k_mean, params)).masked_fill(lse == -torch.inf, -torch.inf)


def smoothed_lse(q: Tensor, lse: Tensor, k_mean: Tensor, params: AttentionParams) -> Tensor:
    """The inverse of :func:`natural_lse`: the lse that ``sagebwd::backward`` takes."""
    lse = torch.where(lse == -torch.inf, lse, lse - _shift(q, k_mean, params)).contiguous()
    return lse if params.kernels == "reference" else lse / math.log(2)


def _shift(q: Tensor, k_mean: Tensor, params: AttentionParams) -> Tensor | float:
    """scale · q·μ (B, H, N_q) fp32, with the mean of K in each query's document; 0 without smoothing."""
    if not k_mean.shape[-1]:
        return 0.0
    # NaN is the mean of keys that no query sees, or that make lse NaN by themselves.
    mean = k_mean.nan_to_num(0.0, 0.0, 0.0)
    mean = mean.unflatten(-1, (params.documents, -1))[..., : q.shape[-1]]  # (B, H_kv, documents, D)
    if params.cu_seqlens is not None:
        mean = mean[:, :, _document_of_tokens(params.cu_seqlens, q.shape[-2])]
    groups = q.float().unflatten(1, (k_mean.shape[1], -1))
    return params.scale * (groups * mean.unsqueeze(2)).sum(-1).flatten(1, 2)


def _document_of_tokens(cu_seqlens: Tensor, n: int) -> Tensor:
    """The document of each of n tokens; any for a token of no document."""
    inner_starts = document_starts(cu_seqlens, n)[1:-1].contiguous()
    tokens = torch.arange(n, device=cu_seqlens.device, dtype=inner_starts.dtype)
    return torch.searchsorted(inner_starts, tokens, right=True)
