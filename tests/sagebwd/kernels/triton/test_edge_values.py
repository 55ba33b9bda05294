"""Values at the edges: NaN and Inf, the largest and the smallest numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import MATMULS
from sagebwd.metrics import relative_l2

pytestmark = pytest.mark.usefixtures("poisoned_memory")
gpu = pytest.mark.gpu

NAMES = ("out", "dq", "dk", "dv")
GRADIENTS = NAMES[1:]
INPUTS = ("q", "k", "v", "grad_out")
TILE = {"block_q": 64, "block_kv": 64}  # two by two of them for the 70 tokens of these tests
CONFIGS = {
    "default": SageConfig(**TILE),
    "paper": SageConfig(granularity="block", **TILE),
    "strictly causal": replace(SageConfig.strictly_causal(), **TILE),
    "no INT8": SageConfig(int8_matmuls=(), **TILE),
    "all INT8": SageConfig(int8_matmuls=MATMULS, **TILE),
    "unsigned_p": SageConfig(unsigned_p=True, **TILE),
}
POISONS = (torch.nan, torch.inf, -torch.inf)
TOKENS = (0, 40, 69)


@pytest.fixture(
    params=[
        pytest.param(config, id=name, marks=gpu if name == "unsigned_p" else ())
        for name, config in CONFIGS.items()
    ]
)
def config(request):
    return request.param


# --- NaN and Inf ------------------------------------------------------------------------------------------

EVERY_POISON = list(product(CONFIGS, INPUTS, POISONS, TOKENS))
#: For the interpreter: each setting with each input that it can matter to, and poisons and tokens in turn.
SOME_POISONS = [
    (name, x, POISONS[(n + m) % 3], TOKENS[(n + 2 * m) % 3])
    for n, name in enumerate(CONFIGS)
    for m, x in enumerate(INPUTS)
    if name != "unsigned_p" or x == "v"
]


def poisoned_channels(config):
    """Where a NaN in channel 3 of V (or dO) shows in O (or dV): everywhere, but in channel 3 outside INT8."""
    return slice(None) if config.int8_matmuls else 3


@pytest.mark.parametrize(
    ("setting", "name", "poison", "token"),
    [pytest.param(*case, marks=() if case in SOME_POISONS else gpu) for case in EVERY_POISON],
)
def test_nan_and_inf_reach_every_output_that_depends_on_them(
    kernels, attend_reference, sample, setting, name, poison, token
):
    """Without a mask all that depends on the poison must be NaN, and nothing but what shares a scale."""
    config = CONFIGS[setting]
    inputs = dict(zip(INPUTS, sample(70), strict=True))
    inputs[name][..., token, 3] = poison
    result = kernels(*inputs.values(), config=config)

    out, dq, dk, dv = (result[x][0, 0] for x in NAMES)
    channels = poisoned_channels(config)
    every, query = slice(None), slice(token, token + 1)
    must_be_nan = {
        "q": [out[query], dq[query], dk, dv],
        "k": [out, dq, dk, dv],
        "v": [out[every, channels], dq, dk],
        "grad_out": [dq[query], dk, dv[every, channels]],
    }
    assert all(x.isnan().all() for x in must_be_nan[name])
    if name == "v":
        assert dv.isfinite().all()
    if name == "grad_out":
        assert out.isfinite().all()
    wanted = attend_reference(*inputs.values(), config=config)
    for x in NAMES:
        assert not result[x].isinf().any(), x
        assert torch.equal(result[x].isnan(), wanted[x].isnan()), x


def test_another_batch_and_another_group_stay_clean(kernels, sample):
    """A poisoned key of batch 1, head 0 shows in the two query heads that share it, and nowhere else."""
    inputs = sample(40, batch=2, heads=4, kv_heads=2)
    inputs[1][1, 0, 7, 3] = torch.nan
    result = kernels(*inputs)
    for name in NAMES:
        heads = slice(0, 2) if name in ("out", "dq") else slice(0, 1)
        poisoned = torch.zeros_like(result[name], dtype=torch.bool)
        poisoned[1, heads] = True
        assert torch.equal(result[name].isnan(), poisoned), name
        assert not result[name].isinf().any(), name


@pytest.mark.parametrize("name", ["q", "grad_out"])
@pytest.mark.parametrize("scales", ["block", "token"])
def test_a_poisoned_query_poisons_its_block_or_itself(kernels, sample, scales, name):
    inputs = sample(70)
    inputs[INPUTS.index(name)][..., 40, 3] = torch.nan
    result = kernels(*inputs, config=SageConfig(operand_scales=scales, int8_matmuls=MATMULS, **TILE))
    poisoned = range(40, 41) if scales == "token" else range(64)
    for output in ("out", "dq") if name == "q" else ("dq",):
        nan_tokens = result[output].isnan().all(-1).flatten().nonzero().flatten()
        assert nan_tokens.tolist() == list(poisoned), output
        assert result[output].isnan().sum() == 32 * len(poisoned), output


@pytest.mark.parametrize("poison", [torch.nan, pytest.param(torch.inf, marks=gpu)])
def test_hidden_tiles_are_never_touched(kernels, sample, poison):
    """Under the causal mask a NaN reaches back to the first query that shares a tile with it, no further."""
    inputs = sample(70)
    inputs[2][..., -1, :] = poison
    config = SageConfig(block_q=32, block_kv=64)  # the last key lies in the tiles of keys 64 … 69
    result = kernels(*inputs, is_causal=True, config=config)
    for output in ("out", "dq"):
        assert result[output][..., :64, :].isfinite().all()
        assert result[output][..., 64:, :].isnan().all()


# --- Large numbers ----------------------------------------------------------------------------------------


def alternating(like, value):
    """± value on even and odd tokens."""
    signs = torch.where(torch.arange(like.shape[-2]) % 2 == 0, 1.0, -1.0).to(like)
    return value * signs.unsqueeze(-1).expand_as(like)


@pytest.mark.parametrize(
    "size", [300, 60000, *(pytest.param(size, marks=gpu) for size in (100, 1000, 3000, 10000))]
)
def test_large_logits_choose_the_keys_that_agree(kernels, config, size):
    """Logits of ± size² · √32, from 6e4 to 2e10: the 35 keys whose sign is that of Q share all the weight.

    P̃ = exp(S − max) is 1 or 0, so O is exact. The gradients meet the difference between S and the logsumexp,
    which fp32 rounds to a step of S.
    """
    q = torch.full((1, 1, 40, 32), float(size), dtype=torch.float16)
    k, v = (alternating(torch.ones(1, 1, 70, 32, dtype=torch.float16), x) for x in (float(size), 6e4))
    result = kernels(q, k, v, 1e-4 * torch.ones_like(q), config=config)
    assert torch.equal(result["out"], torch.full_like(q, 6e4))
    assert all(result[name].isfinite().all() for name in GRADIENTS)


@pytest.mark.parametrize("scale", [1e4, *(pytest.param(scale, marks=gpu) for scale in (1e2, 1e3, 1e5))])
def test_large_logits_of_random_numbers(kernels, attend_reference, sample, config, scale):
    """All weight on one key, whose logit is up to 6e6: O is its value, dV its query's dO.

    Queries are keys, of few digits, and each key stands beside its negative: so S is exact in fp32, whatever
    the order of its sums, and the backward's is the forward's. There dP − δ is 0 but for the errors of O and
    of fp32 sums, whose order is free: dQ and dK are noise of about the same size in both.
    """
    _, k, v, grad_out = sample(40, 70)
    k = (8 * k).round() / 8
    k[..., 1::2, :] = -k[..., ::2, :]
    inputs = k[..., 30:, :], k, v, grad_out
    found, wanted = (
        attention(*inputs, config=config, scale=scale) for attention in (kernels, attend_reference)
    )
    for name in ("out", "dv"):
        assert relative_l2(found[name], wanted[name]) < 1e-3, name
    for name in ("dq", "dk"):
        assert found[name].float().norm() < 4 * wanted[name].float().norm(), name


def test_the_largest_powers_of_two(kernels, attend_reference, exact, sample, config):
    """± 2¹⁵ with random signs, exact in INT8 and in fp32 sums: logits up to 6e9, with ties at the top.

    Every key stands beside its negative, so that their mean is 0. The gradients need a small dO to be finite
    in fp16; in them fp32 loses the log of the number of ties, in the reference too. dS has few values, half
    the largest among them, which is 63.5 steps: dQ and dK may be one step of 127 apart.
    """
    q, k, v, grad_out = (x.sign() for x in sample(40, 70))
    k[..., 1::2, :] = -k[..., ::2, :]
    inputs = 2**15 * q, 2**15 * k, 2**15 * v, 2**-20 * grad_out
    found, reference = (attention(*inputs, config=config) for attention in (kernels, attend_reference))
    assert relative_l2(found["out"], exact(*inputs)["out"]) < 1e-3
    for name in NAMES:
        assert found[name].isfinite().all(), name
        assert relative_l2(found[name], reference[name]) < (1 / 127 if name in ("dq", "dk") else 1e-3), name


def test_finite_gradients_that_overflow_fp16_become_inf(kernels, config):
    """As in torch's attention: loss scaling looks for them."""
    zeros = torch.zeros(1, 1, 40, 32, dtype=torch.float16)
    grad_out = torch.full_like(zeros, 6e4)
    one_key = kernels(zeros, zeros[:, :, :1], zeros[:, :, :1], grad_out, config=config)
    assert one_key["dv"].isposinf().all()
    k, v = alternating(zeros, 6e4), alternating(zeros, 10.0)
    assert kernels(zeros, k, v, torch.ones_like(zeros), config=config)["dq"].isposinf().all()


def test_fp32_sums_that_overflow_are_nan(kernels, config):
    """3e38 in V and dO: O is their mean, but dP, δ and the sum in dV overflow. Inf would be plausible."""
    zeros = torch.zeros(1, 1, 40, 32, dtype=torch.bfloat16)
    large = torch.full_like(zeros, 3e38)
    result = kernels(zeros, zeros, large, large, config=config)
    assert not result["out"].isinf().any()
    assert result["dq"].isnan().all()
    assert result["dk"].isnan().all()
    one_key = kernels(zeros, zeros[:, :, :1], large[:, :, :1], large, config=config)
    assert one_key["dv"].isnan().all()


# --- Small numbers ----------------------------------------------------------------------------------------


def test_subnormal_numbers_of_fp16_count(kernels, attend_reference, sample, config):
    """2⁻²⁰ times Gaussian, in steps of 2⁻²⁴. fp32 holds them exactly; results may differ by one step."""
    inputs = [(2.0**-20 * x.float()).half() for x in sample(40)]
    found, wanted = (attention(*inputs, config=config) for attention in (kernels, attend_reference))
    for name in NAMES:
        assert (found[name].float() - wanted[name].float()).abs().max() <= 2**-24, name
    assert found["out"].any()
    assert found["dv"].any()


def test_tiny_grad_out_in_fp16(kernels, attend_reference, sample, config):
    *inputs, grad_out = sample(40)
    grad_out = (2.0**-20 * grad_out.float()).half()
    found, wanted = (attention(*inputs, grad_out, config=config) for attention in (kernels, attend_reference))
    for name in GRADIENTS:
        assert found[name].any(), name
        assert (found[name].float() - wanted[name].float()).abs().max() <= 2**-24, name


@pytest.mark.parametrize("exponent", [-80, pytest.param(-60, marks=gpu), pytest.param(60, marks=gpu)])
def test_gradients_scale_with_grad_out_bit_for_bit(kernels, sample, config, exponent):
    """bf16 reaches as far down as fp32. Nothing is flushed to zero, and no constant hides in a division."""
    *inputs, grad_out = sample(40, dtype=torch.bfloat16)
    scaled = kernels(*inputs, 2.0**exponent * grad_out, config=config)
    plain = kernels(*inputs, grad_out, config=config)
    for name in GRADIENTS:
        assert torch.equal(scaled[name], 2.0**exponent * plain[name]), name
