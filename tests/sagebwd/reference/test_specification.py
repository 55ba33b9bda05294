"""The semantics of the quantization, derived a second time in float64 NumPy, one tile pair and row at a time.

Closeness to exact attention would not notice a scale along the wrong axis or a product quantized twice. Here
every integer must be the same, so the two agree to fp32 rounding although both are far from exact attention.
"""

import numpy as np
import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import MATMULS, PAPER_INT8_MATMULS
from sagebwd.reference import attention
from sagebwd.reference.quantization import quantize, round_to

BLOCK = 16
HEAD_DIM = 6


class Independent:
    """SageBwd for one head: q (n_q, d), k, v (n_kv, d), grad_out (n_q, d) float64 arrays."""

    def __init__(self, q, k, v, grad_out, is_causal, config):
        self.q, self.k, self.v, self.grad_out = q, k, v, grad_out
        self.is_causal, self.config = is_causal, config
        self.scale = 1 / np.sqrt(q.shape[1])
        quantizes_k = not {"s_fwd", "s_bwd", "dq"}.isdisjoint(config.int8_matmuls)
        self.smooth_k = k - k.mean(0) if config.smooth_k and quantizes_k else k
        self.mean_v = v.mean(0) if config.smooth_v else np.zeros(v.shape[1])
        self.out, self.lse = np.zeros_like(q), np.zeros(len(q))
        for i in range(len(q)):
            self.out[i], self.lse[i] = self.forward_row(i)

    @staticmethod
    def dequantized(x, axis=None, largest=127):
        """round(x / s)·s, s = max|x| / largest over ``axis``. Asserts that no rounding is a close call."""
        s = np.abs(x).max(axis=axis, keepdims=True) / largest
        quotient = x / np.where(s == 0, 1, s)
        ties = np.abs(np.abs(quotient - np.floor(quotient)) - 0.5)
        assert ties.min() > 2e-5, "an unlucky seed: fp32 may round the other way"
        return np.rint(quotient) * s

    def maybe(self, matmul, x, axis=None, largest=127):
        return self.dequantized(x, axis, largest) if matmul in self.config.int8_matmuls else x

    def tokens(self, matmul, x):
        """A block of Q, K, V or dO as ``matmul`` takes it, dequantized."""
        return self.maybe(matmul, x, 1 if self.config.operand_scales == "token" else None)

    def over_tokens(self, matmul, weights, x, axis):
        """weights @ x, where weights (m, tokens) has INT8 scales over ``axis`` and x (tokens, d) its own."""
        largest = 255 if self.config.unsigned_p and matmul in ("o", "dv") else 127
        if self.config.operand_scales == "block" or matmul not in self.config.int8_matmuls:
            return self.maybe(matmul, weights, axis, largest) @ self.tokens(matmul, x)
        steps = np.abs(x).max(1) / 127
        integers = np.rint(self.dequantized(x, 1) / steps[:, None])
        return self.dequantized(weights * steps, axis, largest) @ integers

    def block_of(self, x, token):
        start = token // BLOCK * BLOCK
        return x[start : start + BLOCK], token - start

    def logits(self, matmul, i, keys):
        """Row i of S against the keys of one block."""
        q_block, row = self.block_of(self.q, i)
        mean_q = q_block.mean(0) if self.config.smooth_q else np.zeros(q_block.shape[1])
        k_block = self.smooth_k[keys]
        s = self.tokens(matmul, k_block) @ self.tokens(matmul, q_block - mean_q)[row]
        s = (s + k_block @ mean_q) * self.scale
        return np.where(self.is_causal & (np.arange(len(self.k))[keys] > i), -np.inf, s)

    def key_blocks(self):
        return [slice(start, start + BLOCK) for start in range(0, len(self.k), BLOCK)]

    def forward_row(self, i):
        m, l, o = -np.inf, 0.0, np.zeros(self.q.shape[1])
        for keys in self.key_blocks():
            s = self.logits("s_fwd", i, keys)
            if np.isneginf(s).all():
                continue
            m_new = max(m, s.max())
            p = np.exp(s - m_new)
            l = np.exp(m - m_new) * l + p.sum()
            o = np.exp(m - m_new) * o + self.over_tokens("o", p[None], self.v[keys] - self.mean_v, None)[0]
            m = m_new
        return o / l + self.mean_v, m + np.log(l)

    def backward(self):
        dq, dk, dv = np.zeros_like(self.q), np.zeros_like(self.k), np.zeros_like(self.v)
        axis = 1 if self.config.granularity == "row" else None
        delta = (self.grad_out * self.out).sum(1)
        for queries, keys in self.tile_pairs():
            p = self.p(queries, keys)
            ds = p * (self.dp(queries, keys) - delta[queries, None])
            q_block = self.q[queries]
            mean_q = q_block.mean(0) if self.config.smooth_q else np.zeros(q_block.shape[1])
            dv[keys] += self.over_tokens("dv", p.T, self.grad_out[queries], axis)
            dq[queries] += self.over_tokens("dq", ds, self.smooth_k[keys], axis)
            dk[keys] += self.over_tokens("dk", ds.T, q_block - mean_q, axis)
            dk[keys] += np.outer(ds.sum(0), mean_q)
        return dq * self.scale, dk * self.scale, dv

    def tile_pairs(self):
        query_blocks = [slice(start, start + BLOCK) for start in range(0, len(self.q), BLOCK)]
        return [
            (queries, keys)
            for queries in query_blocks
            for keys in self.key_blocks()
            if not self.is_causal or keys.start < min(queries.stop, len(self.q))
        ]

    def p(self, queries, keys):
        rows = range(len(self.q))[queries]
        return np.stack([np.exp(self.logits("s_bwd", i, keys) - self.lse[i]) for i in rows])

    def dp(self, queries, keys):
        return self.tokens("dp", self.grad_out[queries]) @ self.tokens("dp", self.v[keys]).T


SWITCHES = [
    {},
    {"granularity": "block"},
    {"smooth_k": False},
    {"smooth_v": True},
    {"smooth_q": True},
    {"unsigned_p": True},
    {"unsigned_p": True, "granularity": "block", "smooth_v": True},
    *({"unsigned_p": True, "int8_matmuls": tuple(m for m in MATMULS if m != name)} for name in ("o", "dv")),
    {"int8_matmuls": MATMULS},
    *({"int8_matmuls": (name,)} for name in MATMULS),
    *({"int8_matmuls": tuple(m for m in PAPER_INT8_MATMULS if m != name)} for name in PAPER_INT8_MATMULS),
]
CASES = [{**switches, "operand_scales": scales} for scales in ("block", "token") for switches in SWITCHES]


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_with_an_independent_derivation(settings, is_causal):
    config = SageConfig(block_q=BLOCK, block_kv=BLOCK, **settings)
    generator = np.random.default_rng(8)  # no rounding is a close call in any of the cases
    shapes = ((20, HEAD_DIM), (23, HEAD_DIM), (23, HEAD_DIM), (20, HEAD_DIM))
    q, k, v, grad_out = (generator.standard_normal(shape).astype(np.float32) for shape in shapes)
    k += generator.standard_normal(HEAD_DIM).astype(np.float32)  # a mean for the smoothing to take
    independent = Independent(*(x.astype(np.float64) for x in (q, k, v, grad_out)), is_causal, config)
    wanted = {"out": independent.out, "lse": independent.lse}
    wanted.update(zip(("dq", "dk", "dv"), independent.backward(), strict=True))

    tensors = [torch.from_numpy(x)[None, None] for x in (q, k, v, grad_out)]
    result = attention(*tensors, is_causal=is_causal, config=config)
    for name, value in wanted.items():
        found = getattr(result, name)[0, 0].double().numpy()
        np.testing.assert_allclose(found, value, rtol=0, atol=3e-6 * np.abs(value).max(), err_msg=name)


def test_ties_round_to_even():
    """Of which there are none above."""
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantize(x).values.tolist() == [[127, 0, 2, 2, 0, -2]]
    x = torch.tensor([[255.0, 0.5, 1.5, 127.5, 128.5, 254.5]])
    assert quantize(x, unsigned=True).values.tolist() == [[255, 0, 2, 128, 128, 254]]


@pytest.mark.parametrize("x", [torch.inf, -torch.inf, torch.nan, 1e5])
def test_what_is_infinite_outside_int8_becomes_nan(x):
    """1e5 overflows fp16. As Inf it could end as a plausible value, such as exp(−Inf)."""
    assert round_to(torch.tensor([[x]]), torch.float16).values.isnan().all()
