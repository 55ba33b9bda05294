"""Algorithms 1 and 2 of SageBwd (arXiv 2603.02170) in plain PyTorch, with the errata of the print corrected.

Formulas and order of the loops are the paper's. Products are INT8 or of the dtype of the inputs, as
:class:`~sagebwd.config.SageConfig` says; softmax, sums and accumulators are fp32. Memory grows linearly with
the sequence.

Shapes: q, out, grad_out and dq are (B, H, N_q, D); k, v, dk and dv (B, H_kv, N_kv, D) with H_kv dividing H;
lse and delta (B, H, N_q).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.config import SageConfig
from sagebwd.quantization import PER_BLOCK, PER_COLUMN, PER_ROW, Operand, product, quantize, round_to
from sagebwd.scores import ScoreTiles


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, config: SageConfig
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: return out in the dtype of q, and lse in fp32.

    lse is the logsumexp of S with the smoothed K; that of the plain logits is lse + scale · q·μ_K.
    """
    k, v = _one_head_per_query_head(q, k, v)
    scores = ScoreTiles(q, k, "s_fwd", is_causal=is_causal, scale=scale, config=config)
    v_blocks = [_operand(block, "o", q.dtype, config) for block in v.float().split(config.block_kv, -2)]
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)

    for i, q_block in enumerate(scores.q_blocks):
        o = torch.zeros_like(q_block)
        l = torch.zeros_like(o[..., :1])
        m = torch.full_like(l, -torch.inf)
        for j in scores.visible_columns(i):
            s = scores.tile(i, j)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p = (s - m_new).exp_()
            rescale = (m - m_new).exp_()
            l = rescale * l + p.sum(-1, keepdim=True)
            # The scale of a row is exp(rowmax(S) − m) / 127: kernels have it from the online softmax.
            o = rescale * o + product(_operand(p, "o", q.dtype, config, PER_ROW), v_blocks[j])
            m = m_new
        out[..., scores.rows(i), :] = o / l
        lse[..., scores.rows(i)] = (m + l.log()).squeeze(-1)
    return out.to(q.dtype), lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
    config: SageConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: return dq, dk, dv in the dtype of the inputs; out and lse come from :func:`forward`."""
    tiles = SoftmaxGradientTiles(grad_out, q, k, v, out, lse, is_causal=is_causal, scale=scale, config=config)
    scores = tiles.scores
    do_blocks = [
        _operand(block, "dv", q.dtype, config) for block in grad_out.float().split(config.block_q, -2)
    ]
    k_blocks = [_operand(block, "dq", q.dtype, config) for block in scores.k_blocks]
    q_blocks = [_operand(block, "dk", q.dtype, config) for block in scores.q_blocks]
    per_query, per_key = (PER_ROW, PER_COLUMN) if config.granularity == "row" else (PER_BLOCK, PER_BLOCK)

    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = q.new_zeros((2, *q.shape[:2], *k.shape[2:]), dtype=torch.float32)
    for j in range(len(k_blocks)):
        columns = scores.columns(j)
        for i in scores.visible_rows(j):
            rows = scores.rows(i)
            p, _, ds = tiles.tile(i, j)
            dv[..., columns, :] += product(_operand(p, "dv", q.dtype, config, per_key).mT, do_blocks[i])
            dq[..., rows, :] += product(_operand(ds, "dq", q.dtype, config, per_query), k_blocks[j])
            dk[..., columns, :] += product(_operand(ds, "dk", q.dtype, config, per_key).mT, q_blocks[i])
            if config.add_mean_k_term:
                dq[..., rows, :] += ds.sum(-1, keepdim=True) * scores.k_mean
            if config.smooth_q:
                dk[..., columns, :] += ds.sum(-2).unsqueeze(-1) * scores.q_means[i]

    dq, dk = dq.mul_(scale), dk.mul_(scale)
    return dq.to(q.dtype), _sum_over_group(dk, k), _sum_over_group(dv, v)


class SoftmaxGradientTiles:
    """The tiles of P, dP and dS = P ∘ (dP − δ) in the backward, before they are quantized for a product.

    Attributes:
        scores: the tiles of S of the backward.
        delta: δ (B, H, N_q), fp32.
    """

    def __init__(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float,
        config: SageConfig,
    ) -> None:
        k, v = _one_head_per_query_head(q, k, v)
        self.scores = ScoreTiles(q, k, "s_bwd", is_causal=is_causal, scale=scale, config=config)
        self._lse = lse
        self._do_blocks = [
            _operand(block, "dp", q.dtype, config) for block in grad_out.float().split(config.block_q, -2)
        ]
        self._v_blocks = [
            _operand(block, "dp", q.dtype, config) for block in v.float().split(config.block_kv, -2)
        ]
        self.delta = self._exact_delta() if config.exact_delta else (grad_out.float() * out.float()).sum(-1)

    def tile(self, i: int, j: int) -> tuple[Tensor, Tensor, Tensor]:
        """P, dP and dS (B, H, rows, columns) of tile (i, j), fp32."""
        p, dp = self._p_and_dp(i, j)
        return p, dp, p * (dp - self.delta[..., self.scores.rows(i), None])

    def _p_and_dp(self, i: int, j: int) -> tuple[Tensor, Tensor]:
        p = (self.scores.tile(i, j) - self._lse[..., self.scores.rows(i), None]).exp_()
        return p, product(self._do_blocks[i], self._v_blocks[j].mT)

    def _exact_delta(self) -> Tensor:
        """rowsum(P ∘ dP), which makes the rows of dS sum to zero whatever the errors of P and dP."""
        delta = torch.zeros_like(self._lse)
        for i in range(len(self.scores.q_blocks)):
            for j in self.scores.visible_columns(i):
                p, dp = self._p_and_dp(i, j)
                delta[..., self.scores.rows(i)] += (p * dp).sum(-1)
        return delta


def _operand(
    x: Tensor, matmul: str, dtype: torch.dtype, config: SageConfig, shared: tuple[int, ...] = PER_BLOCK
) -> Operand:
    """``x`` as ``matmul`` takes it: INT8 with scales shared along ``shared``, or rounded to ``dtype``."""
    return quantize(x, shared) if config.is_int8(matmul) else round_to(x, dtype)


def _one_head_per_query_head(q: Tensor, *keys_and_values: Tensor) -> tuple[Tensor, ...]:
    """Repeat each (B, H_kv, N_kv, D) tensor to the H heads of q; consecutive query heads share one."""
    return tuple(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in keys_and_values)


def _sum_over_group(grad: Tensor, like: Tensor) -> Tensor:
    """Add the gradients of the query heads that share a key head, and round to the dtype of ``like``."""
    return grad.unflatten(1, (like.shape[1], -1)).sum(2).to(like.dtype)
