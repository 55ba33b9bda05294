"""Values at the edges: NaN and Inf, the largest and the smallest."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import MATMULS, PRESETS
from sagebwd.metrics import relative_l2
from tests.sagebwd.kernels.inputs import (
    GRADIENTS,
    INPUTS,
    NAMES,
    POISONS,
    alternating,
    constant,
    outlier_value,
    poison_one,
    rows_far_apart,
    tiny_grad_out,
)
from tests.sagebwd.kernels.sets import (
    BF16,
    FP16,
    causal_and_full,
    emulated_too,
    every_head_dim,
    full_first,
    named,
    needs,
    on_gpu,
    over,
    reference_too,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def configs_of(kernel_set):
    """Settings by name, in tiles of which ``kernel_set.tokens`` are several."""
    config = kernel_set.config
    if kernel_set.is_emulated:
        configs = {name: PRESETS[name] for name in ("default", "paper", "strictly_causal", "int8_scores")}
        return kernel_set.those_it_runs(configs | {"dP in fp16": SageConfig(dp_fp16_accumulation=True)})
    configs = {
        "default": config(), "paper": config(granularity="block"), "no INT8": config(int8_matmuls=()),
        "strictly causal": replace(SageConfig.strictly_causal(), **kernel_set.small_tile),
        "all INT8": config(int8_matmuls=MATMULS), "unsigned_p": config(unsigned_p=True),
        "dP in fp16": config(dp_fp16_accumulation=True),
    }  # fmt: skip
    return kernel_set.those_it_runs(configs)


def every_kind_of_config(kernel_set):
    """The interpreter affords a scale for each block, one for each token, and none."""
    configs, kinds = configs_of(kernel_set), ("default", "strictly causal", "no INT8")
    is_all = kernel_set.is_gpu or kernel_set.is_reference
    return named({name: configs[name] for name in (configs if is_all else kinds)})


every_config = over("config", every_kind_of_config)


# --- NaN and Inf -------------------------------------------------------------------------------------------


def poisons(kernel_set):
    """config, name of the poisoned input, poison, token. Each setting with each input that it can matter to;
    in the interpreter with poisons and tokens in turn.
    """
    configs, tokens = configs_of(kernel_set), kernel_set.poisoned_tokens
    if kernel_set.is_gpu:
        cases = product(configs, INPUTS, POISONS, tokens)
    else:
        cases = (
            (setting, name, POISONS[(n + m) % 3], tokens[(n + 2 * m) % 3])
            for n, setting in enumerate(configs)
            for m, name in enumerate(INPUTS)
            if setting != "unsigned_p" or name == "v"
        )
    for setting, name, poison, token in cases:
        names = (setting, name, str(poison), str(token))
        yield pytest.param(configs[setting], name, poison, token, id="-".join(names))


def poisoned_channels(config, name):
    """Where a NaN in channel 3 of V (or dO) shows in O (or dV): everywhere, but in channel 3 outside INT8."""
    return slice(None) if {"v": "o", "grad_out": "dv"}.get(name) in config.int8_matmuls else 3


@emulated_too
@reference_too
@over("config, name, poison, token", poisons)
@every_head_dim
def test_nan_and_inf_reach_every_output_that_depends_on_them(
    kernels, attend_reference, sample, kernel_set, config, name, poison, token, head_dim
):
    """Without a mask all that depends on the poison must be NaN, and nothing but what shares a scale."""
    inputs = poison_one(sample(kernel_set.tokens, head_dim=head_dim), name, token, poison)
    result = kernels(*inputs, config=config)

    out, dq, dk, dv = (result[x][0, 0] for x in NAMES)
    channels = poisoned_channels(config, name)
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
    wanted = attend_reference(*inputs, config=config)
    for x in NAMES:
        assert not result[x].isinf().any(), x
        assert torch.equal(result[x].isnan(), wanted[x].isnan()), x


def one_sequence_and_group(kernel_set):
    """name, poison, token, is_causal."""
    if kernel_set.is_gpu:
        return list(product(("k", "v"), POISONS, (0, 69, 139), (False, True)))
    return [("k", torch.nan, 7, False)] + ([] if kernel_set.is_emulated else [("v", torch.inf, 39, True)])


@emulated_too
@over("name, poison, token, is_causal", one_sequence_and_group)
@every_head_dim
def test_another_batch_and_another_group_stay_clean(
    kernels, sample, kernel_set, name, poison, token, is_causal, head_dim
):
    """A poisoned key of batch 1, head 0 shows in the heads that share it, and nowhere else.

    So does a value by way of the mean that is subtracted, but for dV.
    """
    n = 140 if kernel_set.is_gpu else 40
    inputs = sample(n, batch=2, heads=4, kv_heads=2, head_dim=head_dim)
    inputs[INPUTS.index(name)][1, 0, token, 3] = poison
    config = SageConfig(smooth_v=name == "v")
    result = kernels(*inputs, config=config, is_causal=is_causal)
    for output, heads in (("out", 2), ("dq", 2), ("dk", 1), ("dv", 0 if name == "v" else 1)):
        poisoned = torch.zeros_like(result[output], dtype=torch.bool)
        poisoned[1, :heads] = True
        assert torch.equal(result[output].isnan(), poisoned), output
        assert not result[output].isinf().any(), output


@needs(operand_scales="token", int8_matmuls=MATMULS)
@pytest.mark.parametrize("name", ["q", "grad_out"])
@pytest.mark.parametrize("scales", ["block", "token"])
def test_a_poisoned_query_poisons_its_block_or_itself(kernels, sample, kernel_set, scales, name):
    inputs = poison_one(sample(70), name, 40, torch.nan)
    result = kernels(*inputs, config=kernel_set.config(operand_scales=scales, int8_matmuls=MATMULS))
    poisoned = range(40, 41) if scales == "token" else range(64)
    for output in ("out", "dq") if name == "q" else ("dq",):
        nan_tokens = result[output].isnan().all(-1).flatten().nonzero().flatten()
        assert nan_tokens.tolist() == list(poisoned), output
        assert result[output].isnan().sum() == inputs[0].shape[-1] * len(poisoned), output


@needs(block_q=32, block_kv=64)
@over("poison", lambda kernel_set: [torch.nan, torch.inf] if kernel_set.is_gpu else [torch.nan])
def test_hidden_tiles_are_never_touched(kernels, sample, poison):
    """Under the causal mask a NaN reaches back to the first query that shares a tile with it, no further."""
    inputs = sample(70)
    inputs[2][..., -1, :] = poison
    config = SageConfig(block_q=32, block_kv=64)  # the last key lies in the tiles of keys 64 … 69
    result = kernels(*inputs, is_causal=True, config=config)
    for output in ("out", "dq"):
        assert result[output][..., :64, :].isfinite().all()
        assert result[output][..., 64:, :].isnan().all()


# --- Large values ------------------------------------------------------------------------------------------


@every_config
@over("size", lambda kernel_set: kernel_set.large_values)
@over("n_kv", lambda kernel_set: [70, 202] if kernel_set.is_gpu else [70])
@every_head_dim
def test_large_logits_choose_the_keys_that_agree(kernels, kernel_set, config, size, n_kv, head_dim):
    """Logits of ± size² · √D, from 4e3 to 4e10: the keys whose sign is that of Q share all the weight.

    P̃ = exp(S − max) is 1 or 0, so O is exact. The gradients meet the difference between S and the logsumexp,
    which fp32 rounds to a step of S. With unsigned P a P̃ a little above 1 must not become 256, which is 0 in
    8 bits. dP in fp16 differs from δ by 2⁻¹¹ of itself, which the largest K takes beyond fp16: dQ may be Inf.
    """
    q = constant(40, head_dim, size)
    ones = constant(n_kv, head_dim, 1)
    k, v = (alternating(ones, x) for x in (float(size), 6e4))
    result = kernels(q, k, v, 1e-4 * torch.ones_like(q), config=config)
    step = 32  # of fp16 at 6e4
    assert (result["out"].double() - 6e4).abs().max() <= (0 if size >= kernel_set.exact_from else step)
    assert not any(result[name].isnan().any() for name in GRADIENTS)
    overflows = config.dp_fp16_accumulation and size == 60000
    assert all(result[name].isfinite().all() for name in (GRADIENTS[1:] if overflows else GRADIENTS))


@every_config
@every_head_dim
def test_finite_gradients_that_overflow_fp16_become_inf(kernels, config, head_dim):
    """As in torch's attention: loss scaling looks for them."""
    zeros = constant(40, head_dim)
    grad_out = torch.full_like(zeros, 6e4)
    one_key = kernels(zeros, zeros[:, :, :1], zeros[:, :, :1], grad_out, config=config)
    assert one_key["dv"].isposinf().all()
    k, v = alternating(zeros, 6e4), alternating(zeros, 10.0)
    assert kernels(zeros, k, v, torch.ones_like(zeros), config=config)["dq"].isposinf().all()


@every_config
@every_head_dim
def test_fp32_sums_that_overflow_are_nan(kernels, config, head_dim):
    """3e38 in V and dO: O is their mean, but dP, δ and the sum in dV overflow. Inf would be plausible."""
    zeros = constant(40, head_dim, dtype=BF16)
    large = torch.full_like(zeros, 3e38)
    result = kernels(zeros, zeros, large, large, config=config)
    assert not result["out"].isinf().any()
    assert result["dq"].isnan().all()
    assert result["dk"].isnan().all()
    one_key = kernels(zeros, zeros[:, :, :1], large[:, :, :1], large, config=config)
    assert one_key["dv"].isnan().all()


# --- Small values ------------------------------------------------------------------------------------------


@every_config
@over("n", lambda kernel_set: [40, 140] if kernel_set.is_gpu else [40])
@every_head_dim
def test_subnormal_values_of_fp16_count(kernels, attend_reference, sample, config, n, head_dim):
    """2⁻²⁰ times Gaussian, in steps of 2⁻²⁴. fp32 holds them exactly; results may differ by one step."""
    inputs = [(2.0**-20 * x.float()).half() for x in sample(n, head_dim=head_dim)]
    found, wanted = (attention(*inputs, config=config) for attention in (kernels, attend_reference))
    for name in NAMES:
        assert (found[name].float() - wanted[name].float()).abs().max() <= 2**-24, name
    assert found["out"].any()
    assert found["dv"].any()


@every_config
@over("exponent", lambda kernel_set: [-80, -60, 60] if kernel_set.is_gpu else [-80])
@full_first
@every_head_dim
def test_gradients_scale_with_grad_out_bit_for_bit(
    kernels, sample, kernel_set, config, exponent, is_causal, head_dim
):
    """bf16 reaches as far down as fp32. Nothing is flushed to zero, and no constant hides in a division."""
    n = 140 if kernel_set.is_gpu else 40
    *inputs, grad_out = sample(n, head_dim=head_dim, dtype=BF16)
    options = {"config": config, "is_causal": is_causal}
    scaled = kernels(*inputs, 2.0**exponent * grad_out, **options)
    plain = kernels(*inputs, grad_out, **options)
    for name in GRADIENTS:
        assert torch.equal(scaled[name], 2.0**exponent * plain[name]), name


# --- dP in fp16, where V and dO differ most in size ---------------------------------------------------------


@emulated_too
@needs(dp_fp16_accumulation=True)
@pytest.mark.parametrize("values", [tiny_grad_out, rows_far_apart, outlier_value])
@every_head_dim
def test_sizes_far_apart_in_bf16(check, attend_reference, sample, values, head_dim):
    """The kernels convert V and dO; queries with the smaller dO are compared on their own."""
    inputs = [x.bfloat16() for x in values(*sample(201, head_dim=head_dim, dtype=torch.float32))]
    options = {"config": SageConfig(dp_fp16_accumulation=True), "is_causal": True}
    found = check(inputs, **options)
    wanted = attend_reference(*inputs, saved_out=found["out"], **options)
    assert relative_l2(found["dq"][..., ::2, :], wanted["dq"][..., ::2, :]) < 8e-3


@emulated_too
@needs(dp_fp16_accumulation=True)
def test_a_grad_out_without_a_scale_counts_as_zero(check, sample):
    """Its scale in INT8 would be subnormal. That of V is so large that dP would be normal."""
    q, k, v, grad_out = sample(130, head_dim=128, dtype=torch.float32)
    inputs = [x.bfloat16() for x in (q, k, 2.0**110 * v, 2.0**-122 * grad_out)]
    check(inputs, config=SageConfig(dp_fp16_accumulation=True), is_causal=True)


@on_gpu
@pytest.mark.parametrize(("size", "dtype"), [(1e-4, FP16), (1e-20, BF16)], ids=["1e-4", "1e-20"])
@pytest.mark.parametrize(("n_q", "n_kv"), [(129, 129), (100, 131), (131, 100)])
@causal_and_full
@every_head_dim
def test_the_mask_holds_where_logits_are_near_zero(
    check, sample, size, dtype, n_q, n_kv, is_causal, head_dim
):
    """A hidden logit, −2³⁰ in INT32, times the scales of such values is near zero as well."""
    q, k, v, grad_out = sample(n_q, n_kv, head_dim=head_dim, dtype=torch.float32)
    inputs = [x.to(dtype) for x in (size * q, size * k, v, grad_out)]
    found = check(inputs, names=("out", "dv"), is_causal=is_causal)
    # The others are subnormal, so that one step of fp16 shows.
    assert all(found[name].isfinite().all() for name in ("dq", "dk"))
    visible = torch.ones(n_q, n_kv, dtype=torch.float64)
    visible = visible.tril() if is_causal else visible
    mean = visible / visible.sum(-1, keepdim=True) @ v.double()
    assert relative_l2(found["out"], mean) < 0.02
