"""Attention in float64 with the roundings of SageBwd replaced by noise of the size of their steps.

The error bound of tests/sagebwd/fuzz.py comes from here. INT8 moves an element by at most half a step. A step
is the largest magnitude that shares a scale, divided by 127 (255 for unsigned P). Rounding to fp16 or bf16
moves it by at most half a unit in the last place. A draw moves every element by exactly that much, with a
random sign. It knows the algorithm's formulas and where it rounds, and nothing of how kernels or the
reference compute them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sagebwd import SageConfig
from sagebwd.window import FULL, Window

#: Relative error allowed to a sum of fp32 products: 2⁻²⁴ for each of up to 16 roundings in a row.
FP32_SUM = 2.0**-20
#: And to exp, log and the logsumexp in fp32, relative to the magnitude of the logits.
FP32_LOG = 2.0**-22
#: Smallest normal number of fp32. Below, a number or an INT8 scale may become zero.
FP32_TINY = torch.finfo(torch.float32).tiny


class Gradients(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Noise:
    """Random signs for one draw.

    coherent: the axis of P and dS, -2 for queries or -1 for keys, along which all elements round alike; 0 for
        none. Weights just below their maximum all round up; nearly equal ones all round to the same integer.
    q_shared, kv_shared: whether all queries, or all keys, are the same ones, and so round alike.
    """

    generator: torch.Generator | None
    coherent: int = 0
    q_shared: bool = False
    kv_shared: bool = False

    def signs(self, shape: tuple[int, ...], device: torch.device) -> Tensor | float:
        """±1, or 0 for exact attention."""
        if self.generator is None:
            return 0.0
        return torch.randint(0, 2, shape, generator=self.generator).double().mul_(2).sub_(1).to(device)

    def tokens(self, x: Tensor, step: Tensor, *, shared: bool = False) -> Tensor:
        """Noise for x (B, H, N, D). With ``shared``, all tokens are the same ones, and round alike."""
        batch, heads, n, channels = x.shape
        return step / 2 * self.signs((batch, heads, 1 if shared else n, channels), x.device)

    def weights(self, x: Tensor, step: Tensor) -> Tensor:
        """Noise for P or dS (B, H, N_q, N_kv)."""
        *heads, rows, columns = x.shape
        rows = 1 if self.q_shared or self.coherent == -2 else rows
        columns = 1 if self.kv_shared or self.coherent == -1 else columns
        return step / 2 * self.signs((*heads, rows, columns), x.device)


EXACT = Noise(None)


@dataclass(frozen=True)
class Rounding:
    """How one attention rounds: ``config``, and 16-bit operands to ``dtype``."""

    config: SageConfig
    dtype: torch.dtype

    def to_dtype(self, x: Tensor) -> Tensor:
        """Twice the largest error of rounding x to the dtype."""
        info = torch.finfo(self.dtype)
        return x.abs() * info.eps + max(info.tiny * info.eps, FP32_TINY)

    def limited(self, x: Tensor) -> Tensor:
        """x as an operand in 16 bit, which overflows where the dtype does."""
        return x.masked_fill(x.abs() > torch.finfo(self.dtype).max, torch.inf)

    def tokens(self, x: Tensor, block: int, matmul: str) -> Tensor:
        """The steps in which ``matmul`` takes x (B, H, N, D), one of Q, K, V and dO."""
        if not self.config.is_int8(matmul):
            return self.to_dtype(x)
        largest = x.abs().amax(-1, keepdim=True)
        if self.config.operand_scales == "block":
            largest = _block_max(largest, block, -2)
        return (largest / 127).expand_as(x) + 2 * 127 * FP32_TINY

    def weights(
        self, x: Tensor, contracted: Tensor, axis: int, matmul: str, whole: tuple[int, ...]
    ) -> Tensor:
        """The steps in which ``matmul`` takes P or dS (B, H, N_q, N_kv), which it contracts along ``axis``.

        contracted: the steps (B, H, N, D) of the other operand. One per token goes into x before it rounds.
        whole: the block sizes of both axes: one scale for a tile. One axis 0: it is not shared along that.
        """
        if not self.config.is_int8(matmul):
            return self.to_dtype(x)
        factor = torch.ones((), dtype=x.dtype, device=x.device)
        if self.config.operand_scales == "token":
            factor = contracted[..., :1].mT if axis == -1 else contracted[..., :1]
        largest = (x * factor).abs()
        for dim, block in zip((-2, -1), whole, strict=True):
            if block:
                largest = _block_max(largest, block, dim)
        levels = 255 if self.config.is_unsigned(matmul) else 127
        step = largest / levels + 2 * levels * FP32_TINY
        return torch.where(factor > 0, step / factor.clamp_min(1e-300), 0.0)


def _block_max(x: Tensor, block: int, dim: int) -> Tensor:
    """The maximum of each ``block`` of x along ``dim``, in place of its elements."""
    x = x.movedim(dim, -1)
    n = x.shape[-1]
    blocks = pad(x, (0, -n % block)).unflatten(-1, (-1, block)).amax(-1)
    return blocks.repeat_interleave(block, -1)[..., :n].movedim(-1, dim)


def _block_mean(x: Tensor, block: int) -> Tensor:
    """The mean over each ``block`` of tokens of x (..., N, D), in place of its tokens."""
    return torch.cat([part.mean(-2, keepdim=True).expand_as(part) for part in x.split(block, -2)], -2)


@dataclass(frozen=True)
class Attention:
    """One attention without packed documents: q, grad_out (B, H, N_q, D), k, v (B, H_kv, N_kv, D) float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    scale: float
    rounding: Rounding
    window: Window = FULL

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def visible(self) -> Tensor:
        """(N_q, N_kv), True where a query sees a key."""
        whole = torch.ones(self.q.shape[-2], self.k.shape[-2], dtype=torch.bool, device=self.q.device)
        left, right = self.window
        whole = whole if left < 0 else whole.triu(-left)
        return whole if right < 0 else whole.tril(right)

    def smoothed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Q and K minus what smoothing takes from them, and that."""
        config, (block_q, _) = self.rounding.config, self.tile()
        zeros = torch.zeros_like
        q_mean = _block_mean(self.q, block_q) if config.smooth_q else zeros(self.q)
        k_mean = self.k.mean(-2, keepdim=True) if config.smooths_k else zeros(self.k[..., :1, :])
        return self.q - q_mean, q_mean, self.k - k_mean, k_mean

    def tile(self) -> tuple[int, int]:
        return self.rounding.config.tile(self.q.shape[-1])

    def logit_steps(self) -> Tensor:
        """RMS over draws of the noise in S (B, H, N_q, N_kv): that of INT8 or 16 bit, and of fp32."""
        q, q_mean, k, _ = self.smoothed()
        block_q, block_kv = self.tile()
        total = 0.0
        for matmul in ("s_fwd", "s_bwd"):
            q_step, k_step = (
                self.rounding.tokens(x, b, matmul) / 2 for x, b in ((q, block_q), (k, block_kv))
            )
            k_all, k_step = self.repeat(k), self.repeat(k_step)
            variance = q_step**2 @ (k_all**2).mT + q**2 @ (k_step**2).mT + q_step**2 @ (k_step**2).mT
            total = torch.maximum(torch.as_tensor(total), variance.sqrt())
        size = (q.abs() + q_mean.abs()) @ self.repeat(k.abs()).mT
        return abs(self.scale) * (total + (FP32_SUM + FP32_LOG) * size)

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.group, 1)

    def run(self, noise: Noise) -> Gradients:
        """Out and the gradients, rounded with ``noise``; with EXACT those of exact attention."""
        config, rounding, (block_q, block_kv) = self.rounding.config, self.rounding, self.tile()
        hidden = ~self.visible()
        q, q_mean, k, k_mean = self.smoothed()

        operands = {}
        means = {"v smooth": self.v}  # what a mean in fp32 was subtracted from
        means |= {"q": self.q} if config.smooth_q else {}
        means |= {"k": self.k} if config.smooths_k else {}

        def take(name: str, x: Tensor, block: int, matmul: str, shared: bool) -> tuple[Tensor, Tensor]:
            """x as ``matmul`` takes it, and its steps. The same tensor rounds once in INT8."""
            key = (name, config.is_int8(matmul))
            if key not in operands:
                step = rounding.tokens(x, block, matmul)
                if name in means:
                    step = step + 2 * FP32_SUM * means[name].abs().amax(-2, keepdim=True)
                elif not config.is_int8(matmul):  # it has the dtype already
                    step = torch.zeros_like(step)
                taken = x + noise.tokens(x, step, shared=shared)
                is_free = config.is_int8(matmul) or noise is EXACT
                operands[key] = taken if is_free else rounding.limited(taken), step
            return operands[key]

        def logits(matmul: str) -> Tensor:
            q_taken, _ = take("q", q, block_q, matmul, noise.q_shared)
            k_taken = self.repeat(take("k", k, block_kv, matmul, noise.kv_shared)[0])
            s = q_taken @ k_taken.mT + q_mean @ self.repeat(k).mT
            size = (q.abs() + q_mean.abs()) @ self.repeat(k.abs()).mT
            return (s + noise.weights(s, FP32_SUM * size)) * self.scale

        # S of both passes is the same where they take the same operands.
        s = logits("s_fwd")
        same = config.is_int8("s_fwd") == config.is_int8("s_bwd")
        s_backward = s if same else logits("s_bwd")
        s = s.masked_fill(hidden, -torch.inf)
        has_keys = ~hidden.all(-1, keepdim=True)  # (N_q, 1)
        largest = s.amax(-1, keepdim=True).masked_fill(~has_keys, 0.0)
        p = (s - largest).exp()
        total = p.sum(-1, keepdim=True).masked_fill(~has_keys, 1.0)
        v_mean = self.v.mean(-2, keepdim=True) if config.smooth_v else torch.zeros_like(self.v[..., :1, :])
        v_smooth = self.v - v_mean
        v_taken, v_step = take(
            "v smooth" if config.smooth_v else "v", v_smooth, block_kv, "o", noise.kv_shared
        )
        p_taken = p + noise.weights(p, rounding.weights(p, self.repeat(v_step), -1, "o", (0, block_kv)))
        p_taken = p_taken.masked_fill(hidden, 0.0)
        divisor = p_taken.sum(-1, keepdim=True) if config.compensate_o else total
        out = p_taken @ self.repeat(v_taken) / divisor + self.repeat(v_mean)
        out = out.masked_fill(~has_keys, 0.0)
        rounded = out + noise.tokens(out, rounding.to_dtype(out), shared=noise.q_shared)
        kept = out if config.compensate_o else rounded

        lse = largest + total.log()
        lse = lse + noise.tokens(lse, FP32_LOG * lse.abs())
        p = (s_backward - lse).exp().masked_fill(hidden, 0.0)
        v_dp, g_dp = self.v, self.grad_out
        if config.is_int8("dp"):
            v_dp, _ = take("v", self.v, block_kv, "dp", noise.kv_shared)
            g_dp, _ = take("dO", self.grad_out, block_q, "dp", noise.q_shared)
        dp = g_dp @ self.repeat(v_dp).mT
        dp = dp + noise.weights(dp, FP32_SUM * (self.grad_out.abs() @ self.repeat(self.v.abs()).mT))
        delta = (self.grad_out * kept).sum(-1, keepdim=True)
        delta = delta + noise.tokens(delta, FP32_SUM * (self.grad_out * kept).abs().sum(-1, keepdim=True))
        if config.exact_delta:
            delta = (p * dp).sum(-1, keepdim=True)
        ds = p * (dp - delta)

        whole = (block_q, block_kv) if config.granularity == "block" else None
        g_taken, g_step = take("dO", self.grad_out, block_q, "dv", noise.q_shared)
        k_taken, k_step = take("k", k, block_kv, "dq", noise.kv_shared)
        q_taken, q_step = take("q", q, block_q, "dk", noise.q_shared)
        p_dv = p + noise.weights(p, rounding.weights(p, g_step, -2, "dv", whole or (block_q, 0)))
        ds_dq = ds + noise.weights(
            ds, rounding.weights(ds, self.repeat(k_step), -1, "dq", whole or (0, block_kv))
        )
        ds_dk = ds + noise.weights(ds, rounding.weights(ds, q_step, -2, "dk", whole or (block_q, 0)))
        if noise is not EXACT:
            ds_dq = ds_dq if config.is_int8("dq") else rounding.limited(ds_dq)
            ds_dk = ds_dk if config.is_int8("dk") else rounding.limited(ds_dk)
        p_dv, ds_dq, ds_dk = (x.masked_fill(hidden, 0.0) for x in (p_dv, ds_dq, ds_dk))

        dq = ds_dq @ self.repeat(k_taken)
        if noise is EXACT or config.add_mean_k_term:
            dq = dq + ds.sum(-1, keepdim=True) * self.repeat(k_mean)
        dk = ds_dk.mT @ q_taken + ds.mT @ q_mean
        return Gradients(rounded, dq * self.scale, self._sum(dk * self.scale), self._sum(p_dv.mT @ g_taken))

    def _sum(self, grad: Tensor) -> Tensor:
        return grad.unflatten(1, (-1, self.group)).sum(2)
