"""The Hopper kernels with the default settings, for head sizes of 40 to 128: all that the Triton ones must
do. Other settings are in test_settings.py; what needs no GPU in test_launch.py and test_on_cpu.py.

What other files already ask of these kernels, because they use such head sizes and the default settings, is
not repeated here: Gaussian and hard values in the folder above in test_against_float64.py; in test_gpu.py a
thousand runs, also next to another stream, 2³¹ elements and 65536 tokens.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from sagebwd import SageConfig, reference
from sagebwd.config import DEFAULT_CONFIG, encode
from sagebwd.metrics import relative_l2
from tests.sagebwd.kernels import test_torch as as_operators
from tests.sagebwd.kernels.hopper.cases import (
    BF16,
    FP16,
    NAMES,
    PACKS,
    assert_bit_equal,
    both_dtypes,
    both_head_dims,
    boundaries_of,
    causal_and_full,
    only_triton,
)
from tests.sagebwd.kernels.triton import test_against_float64 as against_float64
from tests.sagebwd.kernels.triton import test_against_reference as against_reference
from tests.sagebwd.kernels.triton import test_documents as documents

# --- Against the reference ---------------------------------------------------------------------------------

EQUAL_LENGTHS = [(n, n) for n in (2, 31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 300, 385, 1000)]
OTHER_LENGTHS = [
    (2, 65), (2, 1000), (31, 129), (31, 300), (63, 64), (63, 192), (64, 63), (64, 65), (64, 128), (65, 64),
    (65, 257), (127, 2), (127, 129), (128, 127), (128, 191), (129, 31), (129, 127), (129, 1000), (191, 65),
    (192, 128), (192, 257), (257, 2), (257, 256), (300, 64), (300, 1000), (1000, 31), (1000, 129),
    (1000, 300),
]  # fmt: skip


@pytest.mark.parametrize(("n_q", "n_kv"), EQUAL_LENGTHS + OTHER_LENGTHS)
@causal_and_full
@both_head_dims
def test_lengths(check, sample, n_q, n_kv, is_causal, head_dim):
    """Around blocks of 64 queries, work tiles of 128 and 192, blocks of 128 keys; two heads to a key head."""
    check(sample(n_q, n_kv, heads=2, kv_heads=1, head_dim=head_dim), is_causal=is_causal)


@pytest.mark.parametrize(
    ("n_q", "n_kv"), [(64, 64), (65, 65), (300, 300), (1000, 1000), (130, 400), (400, 130)]
)
@causal_and_full
@both_head_dims
def test_lengths_in_bf16(check, sample, n_q, n_kv, is_causal, head_dim):
    check(sample(n_q, n_kv, heads=2, kv_heads=1, head_dim=head_dim, dtype=BF16), is_causal=is_causal)


@pytest.mark.parametrize("n_kv", [2, 63, 128, 129, 1000])
@both_head_dims
def test_one_query(check, sample, n_kv, head_dim):
    check(sample(1, n_kv, head_dim=head_dim))


@pytest.mark.parametrize(
    ("n_q", "n_kv", "is_causal"),
    [(n, 1, is_causal) for n in (1, 2, 64, 65, 129, 300) for is_causal in (True, False)]
    + [(1, n, True) for n in (2, 64, 128, 129, 300)],
)
@both_head_dims
def test_queries_that_see_one_key(
    kernels, attend_reference, assert_same, sample, n_q, n_kv, is_causal, head_dim
):
    """As test_one_key in test_against_reference.py: of dP − δ = 0 there is left what fp16 and INT8 make."""
    inputs = sample(n_q, n_kv, head_dim=head_dim)
    found, wanted = (attention(*inputs, is_causal=is_causal) for attention in (kernels, attend_reference))
    assert_same(found, wanted, ("out", "dv"))
    assert relative_l2(found["dk"], wanted["dk"]) < 0.1
    if n_kv == 1:
        assert not found["dq"].any()  # the key is its own mean
    else:
        assert relative_l2(found["dq"], wanted["dq"]) < 0.1
        assert not any(found[name][..., 1:, :].any() for name in ("dk", "dv"))


@pytest.mark.parametrize("head_dim", [40, 48, 56, 72, 80, 96, 104, 120])
@pytest.mark.parametrize(
    ("n_q", "n_kv", "is_causal", "dtype"),
    [(129, 200, True, FP16), (200, 129, False, FP16), (257, 257, True, BF16)],
    ids=["causal", "full", "bf16"],
)
def test_head_sizes_between(check, sample, head_dim, n_q, n_kv, is_causal, dtype):
    check(sample(n_q, n_kv, heads=2, head_dim=head_dim, dtype=dtype), is_causal=is_causal)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads"), [(1, 4, 2), (2, 3, 1), (3, 8, 2), (1, 7, 7), (2, 16, 1), (5, 1, 1)]
)
@causal_and_full
@both_head_dims
def test_batches_and_groups_of_heads(check, sample, batch, heads, kv_heads, is_causal, head_dim):
    """With GQA dK and dV of a head are sums over its group."""
    inputs = sample(130, 200, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    check(inputs, is_causal=is_causal)


@pytest.mark.parametrize("scale", [0.0, 0.02, 0.5, None])
@causal_and_full
@both_head_dims
def test_scale(check, sample, scale, is_causal, head_dim):
    found = check(sample(150, head_dim=head_dim), scale=scale, is_causal=is_causal)
    if scale == 0:
        assert not found["dq"].any()
        assert not found["dk"].any()


@causal_and_full
@both_head_dims
def test_without_smoothing(check, sample, is_causal, head_dim):
    inputs = sample(129, 200, heads=2, head_dim=head_dim)
    inputs[1] += 0.5  # so that smoothing would show
    check(inputs, is_causal=is_causal, config=SageConfig(smooth_k=False))


@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
@causal_and_full
@both_head_dims
def test_logsumexp(on_gpu, only_hopper, poisoned_memory, device, is_packed, is_causal, head_dim):
    """To base 2; −inf for queries of no document and of one without keys."""
    q, k, v, _ = on_gpu(200, heads=2, kv_heads=1, head_dim=head_dim)
    boundaries = [
        torch.tensor(x, device=device) if is_packed else None for x in ([0, 70, 199], [5, 160, 160])
    ]
    _, lse, *_ = torch.ops.sagebwd.forward(
        q, k, v, *boundaries, is_causal, 0.1, encode(DEFAULT_CONFIG), "hopper"
    )
    names = ("cu_seqlens", "cu_seqlens_kv")
    packed = {name: x.cpu() for name, x in zip(names, boundaries, strict=True)} if is_packed else {}
    inputs = (x.cpu() for x in (q, k, v))
    wanted = reference.attention(*inputs, is_causal=is_causal, scale=0.1, enable_gqa=True, **packed).lse
    torch.testing.assert_close(lse.cpu(), wanted * 1.4426950408889634, rtol=1e-6, atol=2e-6)


# Layouts


@pytest.mark.parametrize("first", [0, 1, 2, 3])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@both_dtypes
def test_layout_does_not_matter(attend, assert_same, on_gpu, first, head_dim, dtype):
    """As in test_against_reference.py. Beside the channels of one layout lies NaN, within the padded size.

    But the gradients of K and V, which the backward does not see, lie token by token.
    """
    inputs = on_gpu(150, batch=2, heads=2, head_dim=head_dim, dtype=dtype)
    strided = [against_reference.LAYOUTS[(first + n) % 4](x) for n, x in enumerate(inputs)]
    assert all(x.stride() != y.stride() for x, y in zip(inputs, strided, strict=True))
    found, wanted = (attend(*x, is_causal=True) for x in (strided, inputs))
    assert_same(found, wanted)
    of_keys = map(as_operators.token_major, strided[1:3])
    for name, like in zip(NAMES, (strided[0], strided[0], *of_keys), strict=True):
        assert found[name].stride() == torch.empty_like(like).stride(), name


@both_head_dims
def test_a_gradient_that_is_one_value_for_all(attend, assert_same, on_gpu, head_dim):
    """The gradients of ``out.sum()`` and ``out.sum(2)`` have strides of zero."""
    *inputs, grad_out = on_gpu(150, heads=2, head_dim=head_dim)
    for grad in (grad_out[:, :1, :1, :1], grad_out[:, :, :1]):
        expanded = grad.expand_as(grad_out)
        assert 0 in expanded.stride()
        assert_same(*(attend(*inputs, g) for g in (expanded, expanded.contiguous())))


# Anything


@settings(
    deadline=None,
    max_examples=60,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    n_q=st.integers(1, 400),
    n_kv=st.integers(1, 400),
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (5, 5)]),
    head_dim=st.integers(5, 16).map(lambda x: 8 * x),
    is_causal=st.booleans(),
    sigma=st.sampled_from([0.3, 1.0, 3.0]),
    smooth_k=st.booleans(),
    smooth_v=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_anything(
    kernels, attend_reference, exact, sample,
    n_q, n_kv, batch, heads, head_dim, is_causal, sigma, smooth_k, smooth_v, seed,
):  # fmt: skip
    """The bound of test_anything in test_against_reference.py."""
    options = {"heads": heads[0], "kv_heads": heads[1], "sigma": sigma, "seed": seed}
    inputs = sample(n_q, n_kv, batch=batch, head_dim=head_dim, **options)
    wanted = exact(*inputs, is_causal=is_causal)
    config = SageConfig(smooth_k=smooth_k, smooth_v=smooth_v)
    found, expected = (
        attention(*inputs, config=config, is_causal=is_causal) for attention in (kernels, attend_reference)
    )
    for name in NAMES:
        x, y = found[name].double(), expected[name].double()
        bound = 0.5 * (y - wanted[name]).norm() + 2**-10 * y.abs().max() + 1e-5 * y.numel() ** 0.5
        assert (x - y).norm() <= bound, name


# --- Against float64, and against the Triton kernels -----------------------------------------------------


@pytest.mark.parametrize("sigma", [0.1, 1, 3, 5, 8, 10, 30])
@pytest.mark.parametrize(
    ("n", "head_dim", "is_causal"),
    [(1024, 64, True), (1024, 64, False), (777, 80, False), (777, 128, False)],
)
def test_as_close_to_float64_as_the_reference(check_errors, sample, sigma, n, head_dim, is_causal):
    """Full attention, and 64 channels, in what test_against_float64.py leaves out."""
    found = check_errors(sample(n, head_dim=head_dim, sigma=sigma), is_causal=is_causal)
    if sigma <= 1:
        assert max(found) < 0.026


@pytest.mark.parametrize(
    "values",
    [
        against_float64.outlier_channel,
        against_float64.outlier_tokens,
        against_float64.common_mean,
        against_float64.sizes_far_apart,
        against_float64.few_values,
    ],
)
@causal_and_full
def test_values_that_are_hard_to_quantize(check_errors, sample, values, is_causal):
    inputs = values(*sample(1024, head_dim=64, dtype=torch.float32))
    check_errors([x.half() for x in inputs], is_causal=is_causal)


@pytest.mark.parametrize("smooth_v", [False, True], ids=["default", "smooth_v"])
@pytest.mark.parametrize(
    ("head_dim", "is_causal", "dtype"),
    [(64, True, FP16), (64, False, BF16), (128, False, FP16), (128, True, BF16)],
    ids=["64-causal-fp16", "64-full-bf16", "128-full-fp16", "128-causal-bf16"],
)
def test_triton_kernels_for_the_same_settings(
    kernels, attend_reference, assert_same, sample, head_dim, is_causal, dtype, smooth_v
):
    """They still run on other GPUs, and give the same as the reference and as the Hopper kernels."""
    options = {"is_causal": is_causal, "config": SageConfig(smooth_v=smooth_v)}
    for n_q, n_kv in ((65, 65), (300, 300), (129, 1000), (257, 65)):
        inputs = sample(n_q, n_kv, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype)
        with only_triton():
            by_triton = kernels(*inputs, **options)
        assert_same(by_triton, attend_reference(*inputs, **options))
        assert_same(kernels(*inputs, **options), by_triton)


# --- Packed documents --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@causal_and_full
@pytest.mark.parametrize(
    ("dtype", "smooth_v"),
    [(FP16, False), (BF16, False), (FP16, True)],
    ids=["fp16", "bf16", "fp16-smooth_v"],
)
def test_a_pack_is_each_of_its_documents_alone(
    kernels, alone, sample, pack, head_dim, is_causal, dtype, smooth_v
):
    """Bit for bit, and zero for tokens of no document."""
    n_q, rows, n_kv, columns = PACKS[pack]
    inputs = sample(n_q, n_kv, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype)
    packed = {"cu_seqlens": torch.tensor(rows, dtype=torch.int32)}
    if columns is not None:
        packed["cu_seqlens_kv"] = torch.tensor(columns)  # int64
    options = {"is_causal": is_causal, "config": SageConfig(smooth_v=smooth_v)}
    found = kernels(*inputs, **options, **packed)
    assert_bit_equal(found, alone(inputs, rows, columns or rows, **options))


@pytest.mark.parametrize("switches", [{}, {"smooth_k": False}, {"smooth_v": True}], ids=str)
@causal_and_full
@both_head_dims
def test_a_pack_is_what_the_reference_says(check, sample, switches, is_causal, head_dim):
    options = {"is_causal": is_causal, "config": SageConfig(**switches)}
    cu_seqlens = torch.tensor(boundaries_of([65, 129, 0, 300, 64], 3))
    check(sample(570, heads=2, head_dim=head_dim), cu_seqlens=cu_seqlens, **options)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("poisoned", [[1], [0, 2, 4], [0, 1, 3, 4]], ids=str)
@pytest.mark.parametrize("smooth_v", [False, True], ids=["default", "smooth_v"])
@causal_and_full
@both_head_dims
def test_documents_do_not_leak(kernels, sample, poison, poisoned, smooth_v, is_causal, head_dim):
    """All of some documents is poison, and all tokens of none: the others keep their bits."""
    boundaries = boundaries_of([70, 1, 130, 65, 300], 10)
    inputs = sample(600, heads=2, kv_heads=1, head_dim=head_dim)
    options = {"cu_seqlens": torch.tensor(boundaries), "is_causal": is_causal}
    options["config"] = SageConfig(smooth_v=smooth_v)
    clean = kernels(*inputs, **options)
    spans = [slice(*span) for span in pairwise(boundaries)]
    for x in inputs:
        for span in (slice(0, 10), slice(boundaries[-1], None), *(spans[n] for n in poisoned)):
            x[..., span, :] = poison
    found = kernels(*inputs, **options)
    for name in NAMES:
        for n, span in enumerate(spans):
            if n in poisoned:
                assert found[name][..., span, :].isnan().all(), (name, n)
            else:
                assert torch.equal(found[name][..., span, :], clean[name][..., span, :]), (name, n)
        for span in (slice(0, 10), slice(boundaries[-1], None)):
            assert not found[name][..., span, :].any(), name


@pytest.mark.parametrize("smooth_v", [False, True], ids=["default", "smooth_v"])
@pytest.mark.parametrize("boundaries", [[7, 7, 7], [0, 0], [30, 30], [0, 30]])
@both_head_dims
def test_without_keys_everything_is_zero(kernels, sample, boundaries, smooth_v, head_dim):
    found = kernels(
        *sample(30, 20, head_dim=head_dim),
        config=SageConfig(smooth_v=smooth_v),
        cu_seqlens=torch.tensor(boundaries),
        cu_seqlens_kv=torch.full((len(boundaries),), 5),
    )
    assert not any(found[name].any() for name in NAMES)


@pytest.mark.parametrize(
    "boundaries",
    [[-5, 20, 300], [0, 50, 30, 170], [2**40, 3], [-(2**40), 2**40], [160, 10, 0]],
    ids=str,
)
@both_head_dims
def test_boundaries_out_of_order_or_range_read_nothing_out_of_bounds(
    attend, on_gpu, device, boundaries, head_dim
):
    """Around the tensors lies NaN, which would show."""
    surrounded = [pad(x, (0, 0, 128, 128), value=torch.nan) for x in on_gpu(170, head_dim=head_dim)]
    inputs = [x[..., 128:-128, :] for x in surrounded]
    found, wanted = (
        attend(*inputs, cu_seqlens=torch.tensor(x, device=device), is_causal=True)
        for x in (boundaries, documents.mended(boundaries, 170))
    )
    assert_bit_equal(found, wanted)
