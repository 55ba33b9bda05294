"""The Hopper kernels with other settings than the default: V-smoothing, unsigned P, 16-bit O and dV."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import DEFAULT_CONFIG
from tests.sagebwd.kernels.hopper.cases import (
    BF16,
    FP16,
    GRADIENTS,
    NAMES,
    PACKS,
    assert_bit_equal,
    both_dtypes,
    both_head_dims,
    causal_and_full,
    constant,
    every_input,
    every_poison,
    only_triton,
    poison_one,
    without_int8,
)
from tests.sagebwd.kernels.triton import test_against_reference as against_reference
from tests.sagebwd.kernels.triton import test_edge_values as edge_values

SMOOTH_V = SageConfig(smooth_v=True)


# --- V-smoothing -------------------------------------------------------------------------------------------


def with_means(inputs, size=2.0):
    """The inputs; the values of each batch, key head and channel have a mean of their own, up to ``size``."""
    q, k, v, grad_out = inputs
    means = torch.linspace(-size, size, v[:, :, 0].numel()).view(*v.shape[:2], 1, -1)
    return [q, k, (v.float() + means).to(v.dtype), grad_out]


@pytest.mark.parametrize(
    ("n_q", "n_kv"),
    [
        (2, 2), (63, 63), (64, 128), (65, 129), (128, 127), (129, 31), (31, 300), (192, 192), (193, 257),
        (300, 64), (300, 1000), (1000, 129), (1000, 1000),
    ],
)  # fmt: skip
@causal_and_full
@both_head_dims
def test_lengths_with_smooth_v(check, sample, n_q, n_kv, is_causal, head_dim):
    """Around blocks of 64 queries, work tiles of 128 and 192, blocks of 128 keys; two heads to a key head."""
    inputs = with_means(sample(n_q, n_kv, heads=4, kv_heads=2, head_dim=head_dim))
    check(inputs, is_causal=is_causal, config=SMOOTH_V)


@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(2, 3, 1), (3, 8, 2), (1, 7, 7), (2, 16, 1)])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_groups_and_head_sizes_with_smooth_v(check, sample, batch, heads, kv_heads, head_dim, dtype):
    inputs = sample(130, 200, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    check(with_means(inputs, 1.0), config=SMOOTH_V, is_causal=heads != 8)


@causal_and_full
@both_head_dims
def test_smooth_v_without_smooth_k(check, sample, is_causal, head_dim):
    inputs = with_means(sample(129, 200, heads=2, head_dim=head_dim))
    inputs[1] += 0.5  # so that smoothing would show
    check(inputs, is_causal=is_causal, config=SageConfig(smooth_k=False, smooth_v=True))


@pytest.mark.parametrize("first", [0, 1, 2, 3])
@both_dtypes
def test_layout_does_not_matter_with_smooth_v(attend, assert_same, sample, device, first, dtype):
    inputs = with_means(sample(150, batch=2, heads=2, head_dim=80, dtype=dtype), 1.0)
    inputs = [x.to(device) for x in inputs]
    strided = [against_reference.LAYOUTS[(first + n) % 4](x) for n, x in enumerate(inputs)]
    assert_same(*(attend(*x, is_causal=True, config=SMOOTH_V) for x in (strided, inputs)))


@pytest.mark.parametrize("n_kv", [1, 2, 63, 128, 129, 300, 1000])
@causal_and_full
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
def test_values_that_are_their_mean_come_back_bit_for_bit(kernels, sample, n_kv, is_causal, head_dim):
    """Integers, the same for all tokens: sums and means are exact, and nothing is left to quantize.

    They differ by batch, key head and channel, so that every wrong index shows.
    """
    q, k, v, grad_out = sample(200, n_kv, batch=2, heads=6, kv_heads=3, head_dim=head_dim)
    values = torch.randint(-1000, 1000, (2, 3, 1, head_dim), generator=torch.Generator().manual_seed(1))
    found = kernels(q, k, values.half().expand_as(v), grad_out, is_causal=is_causal, config=SMOOTH_V)
    assert torch.equal(found["out"], values.half().repeat_interleave(2, 1).expand_as(q))


@causal_and_full
@both_head_dims
def test_the_means_of_a_pack_are_those_of_its_documents(kernels, sample, is_causal, head_dim):
    """As before; each document has values of its own, and its neighbours' would show."""
    n_q, rows, n_kv, columns = PACKS["keys or queries missing"]
    q, k, v, grad_out = sample(n_q, n_kv, heads=4, kv_heads=2, head_dim=head_dim)
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-1000, 1000, (len(rows) - 1, 1, 2, 1, head_dim), generator=generator).half()
    wanted = torch.zeros_like(q)
    for n, (row, column) in enumerate(zip(pairwise(rows), pairwise(columns), strict=True)):
        v[..., slice(*column), :] = values[n]
        if column[0] < column[1]:
            wanted[..., slice(*row), :] = values[n].repeat_interleave(2, 1)
    packed = {"cu_seqlens": torch.tensor(rows), "cu_seqlens_kv": torch.tensor(columns)}
    found = kernels(q, k, v, grad_out, is_causal=is_causal, config=SMOOTH_V, **packed)
    assert torch.equal(found["out"], wanted)


@pytest.mark.parametrize("poison", edge_values.POISONS, ids=str)
@pytest.mark.parametrize("token", [0, 69, 139])
@causal_and_full
@both_head_dims
def test_nan_and_inf_in_smoothed_values(
    kernels, attend_reference, sample, poison, token, is_causal, head_dim
):
    """By way of the mean they reach all queries of the heads that share them; no other head, and not dV."""
    inputs = sample(140, batch=2, heads=4, kv_heads=2, head_dim=head_dim)
    inputs[2][1, 0, token, 3] = poison
    options = {"is_causal": is_causal, "config": SMOOTH_V}
    found, wanted = (attention(*inputs, **options) for attention in (kernels, attend_reference))
    for name, heads in (("out", 2), ("dq", 2), ("dk", 1), ("dv", 0)):
        reached = torch.zeros_like(found[name], dtype=torch.bool)
        reached[1, :heads] = True
        assert torch.equal(found[name].isnan(), reached), name
        assert torch.equal(wanted[name].isnan(), reached), name
        assert not found[name].isinf().any(), name


@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, True), (128, False)])
def test_smooth_v_helps_where_values_have_much_in_common(check_errors, sample, head_dim, is_causal):
    """As close to float64 as the reference, and O closer than without."""
    inputs = with_means(sample(777, head_dim=head_dim), 3.0)
    plain, smooth = (
        check_errors(inputs, is_causal=is_causal, config=SageConfig(smooth_v=on)) for on in (False, True)
    )
    assert smooth[0] < 0.8 * plain[0]


# --- Unsigned P, 16-bit O and dV ---------------------------------------------------------------------------

UNSIGNED_P, CONSISTENT = SageConfig(unsigned_p=True), SageConfig.consistent()
P_16BIT = without_int8("o", "dv")
SWITCHED = {
    "unsigned_p": UNSIGNED_P,
    "unsigned_p, smooth_v": SageConfig(unsigned_p=True, smooth_v=True),
    "16-bit O": without_int8("o", unsigned_p=True),
    "16-bit dV": without_int8("dv", smooth_v=True),
    "16-bit O, dV": P_16BIT,
    "compensate_o": without_int8("o", compensate_o=True),
    "consistent": CONSISTENT,
}
one_switch = pytest.mark.parametrize(
    "config",
    [UNSIGNED_P, P_16BIT, CONSISTENT],
    ids=["unsigned_p", "16-bit O, dV", "consistent"],
)


@pytest.mark.parametrize(
    ("n_q", "n_kv"),
    [
        (2, 2), (63, 63), (64, 128), (65, 129), (128, 127), (129, 31), (31, 300), (192, 192), (193, 257),
        (300, 64), (300, 1000), (1000, 129), (1000, 1000),
    ],
)  # fmt: skip
@pytest.mark.parametrize("config", SWITCHED.values(), ids=SWITCHED.keys())
@causal_and_full
@both_head_dims
def test_lengths_with_switches(check, sample, n_q, n_kv, config, is_causal, head_dim):
    inputs = with_means(sample(n_q, n_kv, heads=4, kv_heads=2, head_dim=head_dim))
    check(inputs, is_causal=is_causal, config=config)


@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(2, 3, 1), (3, 8, 2), (1, 7, 7)])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@both_dtypes
@one_switch
def test_groups_and_head_sizes_with_switches(check, sample, batch, heads, kv_heads, head_dim, dtype, config):
    inputs = sample(130, 200, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    check(inputs, config=config, is_causal=heads != 8)


@pytest.mark.parametrize("sigma", [0.1, 3, 10, 30])
@causal_and_full
@both_head_dims
@one_switch
def test_switches_are_as_close_to_float64_as_the_reference(
    check_errors, sample, sigma, is_causal, head_dim, config
):
    check_errors(sample(777, head_dim=head_dim, sigma=sigma), is_causal=is_causal, config=config)


@causal_and_full
@both_head_dims
def test_unsigned_p_takes_o_and_dv_closer_to_float64(check_errors, sample, is_causal, head_dim):
    """By 12 to 18% in the reference; of the errors of dQ and dK on Gaussians little is P's."""
    inputs = sample(1024, head_dim=head_dim)
    signed, unsigned = (
        check_errors(inputs, is_causal=is_causal, config=SageConfig(unsigned_p=on)) for on in (False, True)
    )
    assert all(unsigned[x] < 0.93 * signed[x] for x in (0, 3))


@causal_and_full
@both_head_dims
def test_triton_kernels_with_unsigned_p(kernels, attend_reference, assert_same, sample, is_causal, head_dim):
    """They reach the same integers by another way: P less 128, and 128 times sums of the other operand."""
    options = {"is_causal": is_causal, "config": UNSIGNED_P}
    for n_q, n_kv in ((65, 65), (129, 1000), (257, 65)):
        inputs = sample(n_q, n_kv, heads=4, kv_heads=2, head_dim=head_dim)
        with only_triton():
            by_triton = kernels(*inputs, **options)
        assert_same(by_triton, attend_reference(*inputs, **options))
        assert_same(kernels(*inputs, **options), by_triton)


@pytest.mark.parametrize("pack", ["around tiles", "tokens of no document", "keys or queries missing"])
@causal_and_full
@both_head_dims
@one_switch
def test_a_pack_with_switches_is_each_of_its_documents_alone(
    kernels, alone, sample, pack, head_dim, is_causal, config
):
    n_q, rows, n_kv, columns = PACKS[pack]
    inputs = sample(n_q, n_kv, heads=4, kv_heads=2, head_dim=head_dim)
    packed = {"cu_seqlens": torch.tensor(rows)}
    if columns is not None:
        packed["cu_seqlens_kv"] = torch.tensor(columns)
    options = {"is_causal": is_causal, "config": config}
    assert_bit_equal(kernels(*inputs, **options, **packed), alone(inputs, rows, columns or rows, **options))


@every_input
@every_poison
@pytest.mark.parametrize("token", [70, 130, 200])
@causal_and_full
@both_head_dims
@one_switch
def test_nan_and_inf_with_switches(
    kernels, attend_reference, sample, name, poison, token, is_causal, head_dim, config
):
    """As without: see the tests of NaN and Inf above. Items may be of 192 queries, in 64 at a time."""
    inputs = poison_one(sample(270, head_dim=head_dim), name, token, poison)
    options = {"is_causal": is_causal, "config": config}
    found, wanted = (attention(*inputs, **options) for attention in (kernels, attend_reference))
    assert not any(found[x].isinf().any() for x in NAMES)
    for x in NAMES if not is_causal else ("out", "dq"):
        assert torch.equal(found[x].isnan(), wanted[x].isnan()), x


@pytest.mark.parametrize("n_kv", [70, 202])
@pytest.mark.parametrize("size", [22, 24, 26, 28, 300, 10000])
@both_head_dims
def test_large_logits_with_unsigned_p(kernels, size, n_kv, head_dim):
    """As in test_large_logits_choose_the_keys_that_agree. Where the path changes P̃ may be a little above 1;
    255.5 / 255 would be 0 in 8 bits.
    """
    q = constant(40, head_dim, size)
    ones = constant(n_kv, head_dim, 1)
    k, v = (edge_values.alternating(ones, x) for x in (float(size), 6e4))
    found = kernels(q, k, v, 1e-4 * torch.ones_like(q), config=UNSIGNED_P)
    assert (found["out"].double() - 6e4).abs().max() <= (32 if size < 300 else 0)
    assert all(found[name].isfinite().all() for name in GRADIENTS)


@pytest.mark.parametrize("n", [70, 129, 301])
@both_head_dims
def test_all_tokens_equal_with_unsigned_p(kernels, n, head_dim):
    """P is 255 throughout, V and dO 127: the largest sums that an INT32 product meets, and exact."""
    q, k, v, grad_out = (constant(n, head_dim, value) for value in (2.0, -3.0, 5.0, 1.0))
    found = kernels(q, k, v, grad_out, config=UNSIGNED_P)
    torch.testing.assert_close(found["out"], v, rtol=2.0**-10, atol=0)
    torch.testing.assert_close(found["dv"], grad_out, rtol=2.0**-10, atol=0)


@causal_and_full
@both_head_dims
def test_compensation_mends_gradients_where_values_are_alike(errors, kernels, sample, is_causal, head_dim):
    """dS is then a small difference of dP and δ, which even a 16-bit O spoils, unless it is compensated."""
    q, k, v, grad_out = sample(1000, head_dim=head_dim, dtype=torch.float32)
    inputs = [x.half() for x in (q, k, 0.002 * v + 1, grad_out)]
    plain, p_16bit, consistent = (
        errors(kernels, inputs, config=config, is_causal=is_causal)[1:3]
        for config in (DEFAULT_CONFIG, P_16BIT, CONSISTENT)
    )
    assert min(plain) > 0.3
    assert min(p_16bit) > 0.05
    assert max(consistent) < 0.03
