"""Table 2's measurement against whole matrices in float64."""

import math
from dataclasses import replace

import pytest
import torch

import sagebwd.reference
from sagebwd import SageConfig
from sagebwd.metrics import cosine_similarity, relative_l2
from sagebwd.reference import exact_attention
from sagebwd.reference.quantization import quantize
from scripts.paper import intermediates
from scripts.paper.intermediates import ROUNDED, rounded
from tests.inputs import draw
from trainer.probe import Captured


@pytest.mark.parametrize("entries_at_once", [1, 4 * 37**2, 2**26])  # one group of heads, two, all
def test_it_is_that_of_whole_matrices(monkeypatch, entries_at_once):
    monkeypatch.setattr(intermediates, "ENTRIES_AT_ONCE", entries_at_once)
    inputs = q, k, v, grad_out = draw(heads=6, kv_heads=3, sigma=3.0)
    config = SageConfig.paper()
    found = intermediates.measure(Captured(q, k, v, q, {}, grad_out), config)
    sage = sagebwd.reference.attention(*inputs, is_causal=True, enable_gqa=True, config=config)
    exact = exact_attention(*inputs, is_causal=True, matrices=True)
    assert list(found) == ["delta", "p", "p_rounded", "dp", "ds", "ds_rounded", "o", "dq", "dk", "dv"]
    for name in found.keys() - ROUNDED.keys():
        actual, expected = (getattr(x, "out" if name == "o" else name) for x in (sage, exact))
        cosine, error = found[name]
        assert cosine == pytest.approx(cosine_similarity(actual, expected), abs=1e-6), name
        assert error == pytest.approx(relative_l2(actual, expected), rel=1e-3, abs=1e-6), name
    assert found["dp"] == pytest.approx((1, 0), abs=1e-6)  # the product that stays out of INT8
    assert found["dq"][1] > found["o"][1] > 0.01


@pytest.mark.parametrize("config", [SageConfig.paper(), SageConfig(), SageConfig(unsigned_p=True)])
def test_p_and_ds_are_rounded_as_the_products_take_them(config):
    """The gradients made of them are the reference's: dV = Pᵀ dO and dQ = dS K."""
    config = replace(config, int8_matmuls=("dv", "dq"), smooth_k=False, block_q=32, block_kv=16)
    q, k, v, grad_out = draw(heads=2, kv_heads=2, length=75)
    sage = sagebwd.reference.attention(q, k, v, grad_out, is_causal=True, config=config)
    p = rounded(sage.p, "dv", config, q.shape[-1])
    ds = rounded(sage.ds, "dq", config, q.shape[-1])
    assert relative_l2(p, sage.p) > 1e-3
    assert relative_l2(ds, sage.ds) > 1e-3

    def int8(x, size):
        tiles = (quantize(block.float()) for block in x.split(size, -2))
        return torch.cat([values * scale for values, scale in tiles], -2)

    dv, dq = p.mT @ int8(grad_out, 32), ds @ int8(k, 16) / math.sqrt(q.shape[-1])
    assert relative_l2(dv, sage.dv) < 1e-5
    assert relative_l2(dq, sage.dq) < 1e-5
