"""Algorithms 1 and 2 of SageBwd (arXiv 2603.02170) in plain PyTorch, with the errata of the print corrected.

Formulas and order of the loops are the paper's. Products are INT8 or of the dtype of the inputs, as
:class:`~sagebwd.config.SageConfig` says; softmax, sums and accumulators are fp32. An Inf counts as NaN in
every operand, sum and δ, so that an Inf in the inputs never becomes a plausible result; a finite gradient
that is too large for fp16 becomes Inf, as everywhere. Memory grows linearly with the sequence.

Shapes: q, out, grad_out and dq are (B, H, N_q, D); k, v, dk and dv (B, H_kv, N_kv, D) with H_kv dividing H;
lse and delta (B, H, N_q).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.interface import AttentionParams
from sagebwd.reference.quantization import (
    OPERAND_AXES,
    PER_BLOCK,
    PER_ROW,
    Products,
    infinite_to_nan,
    product,
    product_in_fp16,
    quantize,
    to_fp16,
)
from sagebwd.reference.scores import ScoreTiles, subtract_token_mean


class Output(NamedTuple):
    """What Algorithm 1 returns.

    out: in the dtype of q; 0 for a query that sees no key.
    lse: fp32, the logsumexp of S with the smoothed K; that of the plain logits is lse + scale · q·μ_K. −inf
        for a query that sees no key.
    residual: the error of rounding out to its dtype, which ``compensate_o`` saves for the backward; otherwise
        None.
    k_mean: (B, H_kv, 1, D), the mean of K that the backward subtracts; None without K-smoothing.
    """

    out: Tensor
    lse: Tensor
    residual: Tensor | None
    k_mean: Tensor | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Output:
    """Algorithm 1."""
    config = params.config
    k, v = _one_head_per_query_head(q, k, v)
    scores = ScoreTiles(q, k, "s_fwd", params)
    products = Products(q.dtype, config)
    v_smooth, v_mean = subtract_token_mean(v.float()) if config.smooth_v else (v, 0.0)
    v_blocks = products.token_blocks(v_smooth, "o", scores.block_kv)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)

    for i, q_block in enumerate(scores.q_blocks):
        o = torch.zeros_like(q_block)
        l = torch.zeros_like(o[..., :1])
        m = torch.full_like(l, -torch.inf)
        has_keys = torch.zeros(1, 1, dtype=torch.bool, device=q.device)
        for j in scores.visible_columns(i):
            s, mask = scores.tile(i, j), scores.mask(i, j)
            has_keys = has_keys | mask.any(-1, keepdim=True)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            shift = torch.where(has_keys, m_new, 0.0)  # before a row has keys its maximum is −inf
            p = (s - shift).exp_()
            rescale = (m - shift).exp_()
            weights = p.to(q.dtype).float() if config.compensate_o else p
            l = rescale * l + weights.sum(-1, keepdim=True)
            # The scale of a row is exp(rowmax(S) − m) / 127, or 255 if P is unsigned: kernels get it from
            # the online softmax. (Not with a scale per token, which multiplies P first.)
            o = rescale * o + products.contract_tokens(p, v_blocks[j], "o", PER_ROW, mask)
            m = m_new
        o = o / l + v_mean
        out[..., scores.rows(i), :] = torch.where(has_keys, o, 0.0)
        lse[..., scores.rows(i)] = (m + l.log()).squeeze(-1)
    out = infinite_to_nan(out)
    rounded = out.to(q.dtype)
    return Output(rounded, lse, (out - rounded).to(q.dtype) if config.compensate_o else None)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Output,
    params: AttentionParams,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: return dq, dk, dv in the dtype of the inputs. ``saved`` comes from :func:`forward`."""
    config, scale = params.config, params.scale
    tiles = SoftmaxGradientTiles(grad_out, q, k, v, saved, params, grad_lse)
    scores = tiles.scores
    products = Products(q.dtype, config)
    do_blocks = products.token_blocks(grad_out, "dv", scores.block_q)
    k_blocks = [products.tokens(block, "dq") for block in scores.k_blocks]
    q_blocks = [products.tokens(block, "dk") for block in scores.q_blocks]
    shared = PER_ROW if config.granularity == "row" else PER_BLOCK

    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = q.new_zeros((2, *q.shape[:2], *k.shape[2:]), dtype=torch.float32)
    for j in range(len(k_blocks)):
        columns = scores.columns(j)
        for i in scores.visible_rows(j):
            rows, mask = scores.rows(i), scores.mask(i, j)
            p, _, ds = tiles.tile(i, j)
            dv[..., columns, :] += products.contract_tokens(p.mT, do_blocks[i], "dv", shared, mask.mT)
            dq[..., rows, :] += products.contract_tokens(ds, k_blocks[j], "dq", shared, mask)
            dk[..., columns, :] += products.contract_tokens(ds.mT, q_blocks[i], "dk", shared, mask.mT)
            if config.smooth_q:
                dk[..., columns, :] += ds.sum(-2).unsqueeze(-1) * scores.q_means[i]

    dq, dk = dq.mul_(scale), dk.mul_(scale)
    return infinite_to_nan(dq).to(q.dtype), _sum_over_group(dk, k), _sum_over_group(dv, v)


class SoftmaxGradientTiles:
    """The tiles of P, dP and dS = P ∘ (dP − δ) in the backward, before they are quantized for a product.

    Attributes:
        scores: the tiles of S of the backward.
        delta: δ (B, H, N_q), fp32, minus the gradient of lse if there is one.
    """

    def __init__(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        saved: Output,
        params: AttentionParams,
        grad_lse: Tensor | None = None,
    ) -> None:
        out, lse, residual, k_mean = saved
        config = params.config
        k, v = _one_head_per_query_head(q, k, v)
        if k_mean is not None:
            (k_mean,) = _one_head_per_query_head(q, k_mean)
        self.scores = ScoreTiles(q, k, "s_bwd", params, k_mean)
        self._lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # P of a query without keys is zero
        products = Products(q.dtype, config)
        self._do_blocks = products.token_blocks(grad_out, "dp", self.scores.block_q)
        self._v_blocks = products.token_blocks(v, "dp", self.scores.block_kv)
        if config.dp_fp16_accumulation:
            # V is below 2 and dO below 2 · 127 · 64 / D: no sum of D products reaches 2¹⁵.
            # 127, because kernels find the scale of dO from the one in INT8.
            shared, factor = OPERAND_AXES[config.operand_scales], max(q.shape[-1], 64) / 64
            self._do_blocks = [to_fp16(x, factor * quantize(x, shared).scale) for x, _ in self._do_blocks]
            self._v_blocks = [to_fp16(x, x.abs().amax(shared, keepdim=True)) for x, _ in self._v_blocks]
        whole_out = out.float() if residual is None else out.float() + residual.float()
        delta = (grad_out.float() * whole_out).sum(-1)
        self.delta = infinite_to_nan(delta if grad_lse is None else delta - grad_lse)

    def tile(self, i: int, j: int) -> tuple[Tensor, Tensor, Tensor]:
        """P, dP and dS (B, H, rows, columns) of tile (i, j), fp32."""
        rows = self.scores.rows(i)
        p = self._hide((self.scores.tile(i, j) - self._lse[..., rows, None]).exp_(), i, j)
        multiply = product_in_fp16 if self.scores.config.dp_fp16_accumulation else product
        dp = self._hide(multiply(self._do_blocks[i], self._v_blocks[j].mT), i, j)
        return p, dp, self._hide(p * (dp - self.delta[..., rows, None]), i, j)

    def _hide(self, x: Tensor, i: int, j: int) -> Tensor:
        """With a scale per token: zero where the mask hides a key, whose NaN would come through otherwise.

        With a scale per block a NaN poisons its whole tile in any case.
        """
        if self.scores.config.operand_scales == "block":
            return x
        return torch.where(self.scores.mask(i, j), x, 0.0)


def _one_head_per_query_head(q: Tensor, *keys_and_values: Tensor) -> tuple[Tensor, ...]:
    """Repeat each (B, H_kv, N_kv, D) tensor to the H heads of q; consecutive query heads share one."""
    return tuple(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in keys_and_values)


def _sum_over_group(grad: Tensor, like: Tensor) -> Tensor:
    """Add the gradients of the query heads that share a key head, and round to the dtype of ``like``."""
    return infinite_to_nan(grad.unflatten(1, (like.shape[1], -1)).sum(2)).to(like.dtype)
