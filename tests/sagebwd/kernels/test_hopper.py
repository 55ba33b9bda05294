"""The Hopper kernels with the default settings, for head sizes of 40 to 128: all that the portable ones must
do, on the GPU that they are written for. Other settings are in test_hopper_settings.py; what needs no GPU in
test_hopper_launch.py.

What other files already ask of these kernels, because they use such head sizes and the default settings, is
not repeated here: Gaussian and hard values in test_against_float64.py; in test_gpu.py a thousand runs, also
beside another stream, 2³¹ elements and 65536 tokens.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad, scaled_dot_product_attention

from sagebwd import SageConfig, reference
from sagebwd.config import DEFAULT_CONFIG
from sagebwd.kernels import ops, sage_attention
from sagebwd.kernels.backward import backward as portable_backward
from sagebwd.kernels.forward import forward as portable_forward
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.kernels.hopper import runtime
from sagebwd.metrics import relative_l2
from tests.sagebwd.kernels import test_against_float64 as against_float64
from tests.sagebwd.kernels import test_against_reference as against_reference
from tests.sagebwd.kernels import test_documents as documents
from tests.sagebwd.kernels import test_edge_values as edge_values
from tests.sagebwd.kernels import test_torch as as_operators

NAMES = ("out", "dq", "dk", "dv")
GRADIENTS = NAMES[1:]
INPUTS = ("q", "k", "v", "grad_out")
FP16, BF16 = torch.float16, torch.bfloat16

both_head_dims = pytest.mark.parametrize("head_dim", [64, 128])
both_dtypes = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
causal_and_full = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])

# Fixtures of other files: as close to the reference, or to float64, as is asked there.
assert_same_in_fp16 = against_reference.assert_same
errors, check_errors = against_float64.errors, against_float64.check
alone = documents.alone
compiled, ignore_warnings_of_torch = as_operators.compiled, as_operators.pytestmark


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Tests that use it, which all of the following do by way of other fixtures, run with ``-m gpu``."""
    if reason := runtime.why_unavailable(torch.device("cuda")):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def only_hopper(device, monkeypatch):
    """The portable kernels fail, so that no test passes because they were chosen in silence."""

    def fail(*_, **__):
        raise AssertionError("the portable kernels were chosen")

    monkeypatch.setattr(ops, "forward", fail)
    monkeypatch.setattr(ops, "backward", fail)


@contextmanager
def only_portable():
    """The portable kernels on a GPU that has others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "is_used", lambda q, config: False)
        patch.setattr(ops, "forward", portable_forward)
        patch.setattr(ops, "backward", portable_backward)
        yield


@pytest.fixture
def attend(attend, only_hopper, poisoned_memory):
    """That of conftest.py; hence ``kernels`` and ``attend_reference`` too."""
    return attend


@pytest.fixture
def on_gpu(sample, device):
    """:func:`sample` on the GPU."""
    return lambda *lengths, **options: [x.to(device) for x in sample(*lengths, **options)]


@pytest.fixture
def assert_same(assert_same_in_fp16):
    """The bound of test_against_reference.py; in bf16 that of its test_bf16."""

    def assert_same(found, wanted, names=NAMES):
        if found["out"].dtype == FP16:
            assert_same_in_fp16(found, wanted, names)
            return
        for name in names:
            assert found[name].dtype == wanted[name].dtype
            assert found[name].isfinite().all(), name
            assert relative_l2(found[name], wanted[name]) < 8e-3, name

    return assert_same


@pytest.fixture
def check(kernels, attend_reference, assert_same):
    """Assert that the kernels give on CPU inputs what the reference does; return their result."""

    def check(inputs, names=NAMES, **options):
        found = kernels(*inputs, **options)
        assert_same(found, attend_reference(*inputs, **options), names)
        return found

    return check


def assert_bit_equal(found, wanted):
    for name in NAMES:
        assert found[name].isfinite().all(), name
        assert torch.equal(found[name], wanted[name]), name


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
    """Around blocks of 64 queries, items of 128 and 192, and tiles of 128 keys; two heads to a key head."""
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
    config = ops.encode(DEFAULT_CONFIG)
    _, lse, *_ = torch.ops.sagebwd.forward(q, k, v, *boundaries, is_causal, 0.1, config)
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
    """As in test_against_reference.py. Beside the channels of one layout lies NaN, within the padded size."""
    inputs = on_gpu(150, batch=2, heads=2, head_dim=head_dim, dtype=dtype)
    strided = [against_reference.LAYOUTS[(first + n) % 4](x) for n, x in enumerate(inputs)]
    assert all(x.stride() != y.stride() for x, y in zip(inputs, strided, strict=True))
    found, wanted = (attend(*x, is_causal=True) for x in (strided, inputs))
    assert_same(found, wanted)
    for name, like in zip(NAMES, (strided[0], *strided[:3]), strict=True):
        assert found[name].stride() == torch.empty_like(like).stride(), name


@both_head_dims
def test_a_gradient_that_is_one_number_for_all(attend, assert_same, on_gpu, head_dim):
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


# --- Against float64, and against the portable kernels -----------------------------------------------------


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
def test_portable_kernels_for_the_same_settings(
    kernels, attend_reference, assert_same, sample, head_dim, is_causal, dtype, smooth_v
):
    """They still run on other GPUs, and give the same as the reference and as the Hopper kernels."""
    options = {"is_causal": is_causal, "config": SageConfig(smooth_v=smooth_v)}
    for n_q, n_kv in ((65, 65), (300, 300), (129, 1000), (257, 65)):
        inputs = sample(n_q, n_kv, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype)
        with only_portable():
            portable = kernels(*inputs, **options)
        assert_same(portable, attend_reference(*inputs, **options))
        assert_same(kernels(*inputs, **options), portable)


# --- Packed documents --------------------------------------------------------------------------------------


def boundaries_of(lengths, first=0):
    return list(accumulate(lengths, initial=first))


AROUND_TILES = [1, 63, 64, 65, 0, 127, 128, 129, 300, 2]
#: (tokens of q, cu_seqlens, tokens of k, cu_seqlens_kv)
PACKS = {
    "one": (300, [0, 300], 300, None),
    "around tiles": (879, boundaries_of(AROUND_TILES), 879, None),
    "tokens of no document": (920, boundaries_of(AROUND_TILES, 3), 920, None),
    "empty documents": (128, [0, 0, 0, 65, 65, 128, 128, 128], 128, None),
    "short documents": (310, boundaries_of([n % 6 for n in range(120)], 5), 310, None),
    "other keys": (
        620,
        boundaries_of([65, 1, 128, 300, 63, 2], 10),
        700,
        boundaries_of([129, 64, 300, 63, 2, 127], 7),
    ),
    "keys or queries missing": (
        400,
        boundaries_of([64, 0, 129, 65, 0, 100]),
        330,
        boundaries_of([0, 130, 65, 0, 0, 130]),
    ),
}


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


# --- NaN and Inf -------------------------------------------------------------------------------------------

#: In both blocks of 64 queries that share a tile of 128 keys, in the next tile, and the last token of all.
TOKENS = (0, 40, 69, 130, 139)
poisoned_anywhere = pytest.mark.parametrize("token", TOKENS)
every_input = pytest.mark.parametrize("name", INPUTS)
every_poison = pytest.mark.parametrize("poison", edge_values.POISONS, ids=str)


def poison_one(inputs, name, token, poison):
    """inputs with one number of one of them replaced."""
    inputs[INPUTS.index(name)][..., token, 3] = poison
    return inputs


@every_input
@every_poison
@poisoned_anywhere
@both_head_dims
def test_nan_and_inf_reach_what_they_reach_in_the_reference(
    kernels, attend_reference, sample, name, poison, token, head_dim
):
    inputs = poison_one(sample(140, head_dim=head_dim), name, token, poison)
    found, wanted = (attention(*inputs) for attention in (kernels, attend_reference))
    for x in NAMES:
        assert not found[x].isinf().any(), x
        assert torch.equal(found[x].isnan(), wanted[x].isnan()), x


@every_input
@every_poison
@poisoned_anywhere
@both_head_dims
def test_nan_and_inf_under_the_causal_mask(kernels, attend_reference, sample, name, poison, token, head_dim):
    """All that depends on the poison is NaN, and nothing but what shares a tile with something that does."""
    inputs = poison_one(sample(140, head_dim=head_dim), name, token, poison)
    found, wanted = (attention(*inputs, is_causal=True) for attention in (kernels, attend_reference))
    assert not any(found[x].isinf().any() for x in NAMES)
    for x in ("out", "dq"):  # for dK and dV the hidden half of a tile of keys may be left out
        assert torch.equal(found[x].isnan(), wanted[x].isnan()), x

    out, dq, dk, dv = (found[x][0, 0] for x in NAMES)
    query, seeing, seen = slice(token, token + 1), slice(token, None), slice(token + 1)
    must_be_nan = {
        "q": [out[query], dq[query], dk[seen], dv[seen]],
        "k": [out, dq, dk, dv],  # by way of the mean of K
        "v": [out[seeing], dq[seeing], dk],
        "grad_out": [dq[query], dk[seen], dv[seen]],
    }
    block, tile = slice(token // 64 * 64), slice(token // 128 * 128)
    hidden = slice(-(-(token // 64 * 64 + 64) // 128) * 128, None)  # tiles of keys after the block of queries
    must_be_finite = {
        "q": [out[block], dq[block], dk[hidden], dv[hidden]],
        "k": [],
        "v": [out[tile], dq[tile], dv],
        "grad_out": [out, dq[block], dk[hidden], dv[hidden]],
    }
    assert all(x.isnan().all() for x in must_be_nan[name])
    assert all(x.isfinite().all() for x in must_be_finite[name])


@both_head_dims
def test_another_batch_and_another_group_stay_clean(kernels, sample, head_dim):
    """A poisoned key of batch 1, head 0 shows in the two query heads that share it, and nowhere else."""
    inputs = sample(140, batch=2, heads=4, kv_heads=2, head_dim=head_dim)
    inputs[1][1, 0, 7, 3] = torch.nan
    found = kernels(*inputs)
    for name in NAMES:
        poisoned = torch.zeros_like(found[name], dtype=torch.bool)
        poisoned[1, : 2 if name in ("out", "dq") else 1] = True
        assert torch.equal(found[name].isnan(), poisoned), name
        assert not found[name].isinf().any(), name


# --- Large numbers -----------------------------------------------------------------------------------------


def constant(n, head_dim, value=0.0, dtype=FP16):
    return torch.full((1, 1, n, head_dim), value, dtype=dtype)


@pytest.mark.parametrize("n_kv", [70, 202])
@pytest.mark.parametrize("size", [22, 24, 26, 28, 100, 300, 3000, 10000, 60000])
@both_head_dims
def test_large_logits_choose_the_keys_that_agree(kernels, size, n_kv, head_dim):
    """As in test_edge_values.py. Around size² · √D · log₂e = 2¹³, the four smallest sizes, kernels begin to
    round the product before they subtract the maximum; just below, that costs up to a step of fp16.
    """
    q = constant(40, head_dim, size)
    ones = constant(n_kv, head_dim, 1)
    k, v = (edge_values.alternating(ones, x) for x in (float(size), 6e4))
    found = kernels(q, k, v, 1e-4 * torch.ones_like(q))
    assert (found["out"].double() - 6e4).abs().max() <= (32 if size < 100 else 0)
    assert all(found[name].isfinite().all() for name in GRADIENTS)


@pytest.mark.parametrize("scale", [1e2, 1e3, 1e4, 1e5])
@pytest.mark.parametrize(("n_q", "n_kv"), [(40, 70), (130, 200)])
@both_head_dims
def test_large_logits_of_random_numbers(kernels, attend_reference, sample, scale, n_q, n_kv, head_dim):
    """As in test_edge_values.py: O is one value, dV dO of its queries, the rest noise of the same size."""
    inputs = sample(n_q, n_kv, head_dim=head_dim)
    inputs[3] *= 2**-6  # so that the noise does not overflow
    found, wanted = (attention(*inputs, scale=scale) for attention in (kernels, attend_reference))
    for name in ("out", "dv"):
        assert relative_l2(found[name], wanted[name]) < 1e-3, name
    for name in ("dq", "dk"):
        assert found[name].isfinite().all(), name
        assert found[name].float().norm() < 4 * wanted[name].float().norm(), name


@both_head_dims
def test_the_largest_powers_of_two(kernels, attend_reference, exact, sample, head_dim):
    """As in test_edge_values.py: ± 2¹⁵, every key beside its negative, with ties at the top."""
    q, k, v, grad_out = (x.sign() for x in sample(40, 70, head_dim=head_dim))
    k[..., 1::2, :] = -k[..., ::2, :]
    inputs = 2**15 * q, 2**15 * k, 2**15 * v, 2**-20 * grad_out
    found, wanted = (attention(*inputs) for attention in (kernels, attend_reference))
    assert relative_l2(found["out"], exact(*inputs)["out"]) < 1e-3
    for name in NAMES:
        assert found[name].isfinite().all(), name
        assert relative_l2(found[name], wanted[name]) < (1 / 127 if name in ("dq", "dk") else 1e-3), name


@both_head_dims
def test_finite_gradients_that_overflow_fp16_become_inf(kernels, head_dim):
    """As in torch's attention: loss scaling looks for them."""
    zeros = constant(40, head_dim)
    one_key = kernels(zeros, zeros[:, :, :1], zeros[:, :, :1], torch.full_like(zeros, 6e4))
    assert one_key["dv"].isposinf().all()
    k, v = (edge_values.alternating(zeros, x) for x in (6e4, 10.0))
    assert kernels(zeros, k, v, torch.ones_like(zeros))["dq"].isposinf().all()


@both_head_dims
def test_fp32_sums_that_overflow_are_nan(kernels, head_dim):
    """3e38 in V and dO: O is their mean, but dP, δ and the sum in dV overflow. Inf would be plausible."""
    zeros = constant(40, head_dim, dtype=BF16)
    large = torch.full_like(zeros, 3e38)
    found = kernels(zeros, zeros, large, large)
    assert not found["out"].isinf().any()
    assert found["dq"].isnan().all()
    assert found["dk"].isnan().all()
    one_key = kernels(zeros, zeros[:, :, :1], large[:, :, :1], large)
    assert one_key["dv"].isnan().all()


# --- Small numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [INPUTS, ("grad_out",)], ids=["all", "grad_out"])
@pytest.mark.parametrize("n", [40, 140])
@both_head_dims
def test_subnormal_numbers_of_fp16_count(kernels, attend_reference, sample, names, n, head_dim):
    """2⁻²⁰ times Gaussian, in steps of 2⁻²⁴. fp32 holds them exactly; results may differ by one step."""
    inputs = [
        (2.0**-20 * x.float()).half() if name in names else x
        for name, x in zip(INPUTS, sample(n, head_dim=head_dim), strict=True)
    ]
    found, wanted = (attention(*inputs) for attention in (kernels, attend_reference))
    for name in NAMES if names == INPUTS else GRADIENTS:
        assert (found[name].float() - wanted[name].float()).abs().max() <= 2**-24, name
        assert name in ("dq", "dk") or found[name].any(), name


@pytest.mark.parametrize("exponent", [-80, -60, 60])
@causal_and_full
@both_head_dims
def test_gradients_scale_with_grad_out_bit_for_bit(kernels, sample, exponent, is_causal, head_dim):
    """bf16 reaches as far down as fp32. Nothing is flushed to zero, and no constant hides in a division."""
    *inputs, grad_out = sample(140, head_dim=head_dim, dtype=BF16)
    scaled = kernels(*inputs, 2.0**exponent * grad_out, is_causal=is_causal)
    plain = kernels(*inputs, grad_out, is_causal=is_causal)
    for name in GRADIENTS:
        assert torch.equal(scaled[name], 2.0**exponent * plain[name]), name


@pytest.mark.parametrize(("size", "dtype"), [(1e-4, FP16), (1e-20, BF16)], ids=["1e-4", "1e-20"])
@pytest.mark.parametrize(("n_q", "n_kv"), [(63, 63), (129, 129), (257, 257), (100, 131), (131, 100)])
@causal_and_full
@both_head_dims
def test_the_mask_holds_where_logits_are_near_zero(
    check, sample, size, dtype, n_q, n_kv, is_causal, head_dim
):
    """A hidden logit, −2³⁰ in INT32, times the scales of such numbers is near zero as well."""
    q, k, v, grad_out = sample(n_q, n_kv, head_dim=head_dim, dtype=torch.float32)
    inputs = [x.to(dtype) for x in (size * q, size * k, v, grad_out)]
    found = check(inputs, ("out", "dv"), is_causal=is_causal)
    # The others are subnormal, so that one step of fp16 shows.
    assert all(found[name].isfinite().all() for name in ("dq", "dk"))
    visible = torch.ones(n_q, n_kv, dtype=torch.float64)
    visible = visible.tril() if is_causal else visible
    mean = visible / visible.sum(-1, keepdim=True) @ v.double()
    assert relative_l2(found["out"], mean) < 0.02


@pytest.mark.parametrize("n", [1, 40, 63, 129, 300])
@both_head_dims
def test_zeros(kernels, n, head_dim):
    zeros = constant(n, head_dim)
    found = kernels(zeros, zeros, zeros, zeros, is_causal=True)
    for name in NAMES:
        assert torch.equal(found[name], zeros), name


@pytest.mark.parametrize("n", [70, 129, 301])
@causal_and_full
@both_head_dims
def test_equal_logits_average_the_values(kernels, sample, n, is_causal, head_dim):
    """Q = K = 0: P̃ = 1 has no error in INT8, and V's is at most half a step of its block."""
    _, _, v, grad_out = sample(n, head_dim=head_dim)
    zeros = torch.zeros_like(v)
    found = kernels(zeros, zeros, v, grad_out, is_causal=is_causal)
    visible = torch.ones(n, n, dtype=torch.float64)
    p = visible.tril() if is_causal else visible
    p = p / p.sum(-1, keepdim=True)
    # Where P varies along a column, a dV adds half a step of it for each query.
    loss_of_p = (0.5 / 127 * p.amax(0)[:, None] * grad_out.double().abs().sum(-2)) if is_causal else 0
    for name, x, weights, loss in (("out", v, p, 0), ("dv", grad_out, p.mT, loss_of_p)):
        mean = weights @ x.double()
        rounding = 0.5 * x.double().abs().max() / 127 * weights.sum(-1, keepdim=True)
        assert ((found[name].double() - mean).abs() <= 1.01 * rounding + 2**-10 * mean.abs() + loss).all(), (
            name
        )
    assert not found["dq"].any()
    assert not found["dk"].any()


@both_head_dims
def test_all_tokens_equal(kernels, head_dim):
    """Each number is the largest of its tile, which INT8 holds exactly, and every weight is 1/150."""
    q, k, v, grad_out = (constant(150, head_dim, value) for value in (2.0, -3.0, 5.0, 1.0))
    found = kernels(q, k, v, grad_out)
    ulp = 2.0**-10
    torch.testing.assert_close(found["out"], v, rtol=ulp, atol=0)
    torch.testing.assert_close(found["dv"], grad_out, rtol=ulp, atol=0)
    # dP = 5 D, and so is δ, but for what fp16 rounds away from O: a relative 2⁻¹¹.
    for name, other in (("dq", k), ("dk", q)):
        assert (found[name].abs() <= 5 * 2**-11 * other.abs() * head_dim**0.5).all(), name


# --- The same bits, whatever else runs ---------------------------------------------------------------------


def causal(q, k, v):
    return sage_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.fixture
def gradients(only_hopper):
    """(function, q, k, v, grad_out) -> [out, dq, dk, dv]; memory is as it comes."""

    def gradients(function, q, k, v, grad_out):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]

    return gradients


def assert_equal_lists(found, wanted):
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        assert x.isfinite().all(), name
        assert torch.equal(x, y), name


@both_head_dims
def test_two_hundred_times_the_same_bits(gradients, on_gpu, head_dim):
    """Full, with groups, odd lengths and fp16: what test_gpu.py leaves out."""
    inputs = on_gpu(301, 517, batch=4, heads=8, kv_heads=2, head_dim=head_dim)

    def full(q, k, v):
        return sage_attention(q, k, v, enable_gqa=True)

    first = gradients(full, *inputs)
    differ = torch.zeros(4, dtype=torch.int64, device="cuda")
    for _ in range(200):
        differ += torch.stack([(x != y).sum() for x, y in zip(gradients(full, *inputs), first, strict=True)])
    assert all(x.isfinite().all() for x in first)
    assert differ.tolist() == [0, 0, 0, 0]


@both_head_dims
def test_two_streams_at_once(gradients, on_gpu, head_dim):
    """Packets and results of one must not be those of the other."""
    inputs = [on_gpu(300, heads=6, kv_heads=3, head_dim=head_dim, seed=seed) for seed in (0, 1)]
    wanted = [gradients(causal, *x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(20):
        for results, stream, x in zip(found, streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(gradients(causal, *x))
    torch.cuda.synchronize()
    for results, expected in zip(found, wanted, strict=True):
        for result in results:
            assert_equal_lists(result, expected)


def test_threads_at_once(gradients, on_gpu):
    """Each with a stream and a head size of its own, and so other kernels."""
    inputs = {head_dim: on_gpu(200, heads=3, head_dim=head_dim) for head_dim in (64, 80, 128)}
    wanted = {head_dim: gradients(causal, *x) for head_dim, x in inputs.items()}
    torch.cuda.synchronize()
    found, failed = {head_dim: [] for head_dim in inputs}, []

    def work(head_dim):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found[head_dim] += [gradients(causal, *inputs[head_dim]) for _ in range(20)]
        except Exception as error:  # it would be lost with the thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(head_dim,)) for head_dim in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failed
    for head_dim, results in found.items():
        assert len(results) == 20
        for result in results:
            assert_equal_lists(result, wanted[head_dim])


@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
@both_head_dims
def test_cuda_graphs_replay_with_new_inputs(gradients, on_gpu, device, is_packed, head_dim):
    cu_seqlens = torch.tensor([0, 65, 65, 300], device=device) if is_packed else None

    def attend(q, k, v):
        return sage_attention(q, k, v, is_causal=True, enable_gqa=True, cu_seqlens=cu_seqlens)

    inputs, fresh = (on_gpu(300, heads=4, kv_heads=2, head_dim=head_dim, seed=seed) for seed in (0, 1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(attend, *inputs)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(attend, *inputs)
    for x, new in zip(inputs, fresh, strict=True):
        x.copy_(new)
    if is_packed:
        cu_seqlens.copy_(torch.tensor([0, 10, 200, 300]))
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert_equal_lists(captured, gradients(attend, *fresh))


@ignore_warnings_of_torch
@both_head_dims
def test_compiled_equals_eager(gradients, compiled, on_gpu, head_dim):
    def tokens_first(q, k, v):
        """As a model calls it, with a product that rounds nothing."""
        q, k, v = (x.transpose(1, 2) for x in (2 * q, k, v))
        return causal(q, k, v).transpose(1, 2) * 0.5

    q, k, v, grad_out = (x.transpose(1, 2).contiguous() for x in on_gpu(200, heads=2, head_dim=head_dim))
    inputs = 0.5 * q, k, v, grad_out
    found = gradients(compiled(tokens_first, "inductor"), *inputs)
    assert_equal_lists(found, gradients(tokens_first, *inputs))


@ignore_warnings_of_torch
@pytest.mark.parametrize("lay", [torch.clone, as_operators.token_major, as_operators.every_other])
def test_operators_keep_their_promises(only_hopper, on_gpu, lay):
    """Schemas, aliases, shapes and strides of fake tensors, and autograd under a tracer."""
    q, k, v, grad_out = map(lay, on_gpu(140, heads=2, kv_heads=1, head_dim=64))
    options = (None, None, True, 0.125, ops.encode(DEFAULT_CONFIG))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.sagebwd.forward.default, (*leaves, *options))
    saved = torch.ops.sagebwd.forward(q, k, v, *options)
    torch.library.opcheck(torch.ops.sagebwd.backward.default, (grad_out, q, k, v, *saved, *options))


@ignore_warnings_of_torch
@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
def test_neither_pass_waits_for_the_device(gradients, on_gpu, device, is_packed):
    cu_seqlens = torch.tensor([0, 65, 65, 300], device=device) if is_packed else None

    def attend(q, k, v):
        return sage_attention(q, k, v, cu_seqlens=cu_seqlens)

    inputs = on_gpu(300, head_dim=64)
    wanted = gradients(attend, *inputs)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gradients(attend, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal_lists(found, wanted)


@both_head_dims
def test_the_same_after_memory_was_given_back(gradients, on_gpu, head_dim):
    inputs = on_gpu(300, heads=2, head_dim=head_dim)
    wanted = [x.cpu() for x in gradients(causal, *inputs)]
    inputs = [x.cpu() for x in inputs]
    gc.collect()
    torch.cuda.empty_cache()
    found = gradients(causal, *(x.cuda() for x in inputs))
    assert_equal_lists([x.cpu() for x in found], wanted)


@both_head_dims
def test_another_than_the_current_gpu(gradients, on_gpu, head_dim):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    inputs = on_gpu(300, heads=2, head_dim=head_dim)
    wanted = gradients(causal, *inputs)
    other = torch.device("cuda", 1)
    found = gradients(causal, *(x.to(other) for x in inputs))
    assert torch.cuda.current_device() == 0
    assert all(x.device == other for x in found)
    assert_equal_lists([x.to("cuda:0") for x in found], wanted)


# --- Many items, long sequences, memory --------------------------------------------------------------------


@causal_and_full
@both_head_dims
def test_more_items_than_programs(attend, assert_same, attend_reference, on_gpu, is_causal, head_dim):
    """201 heads of 6 blocks: programs work through several items each. The same bits as a few heads alone."""
    inputs = on_gpu(333, batch=3, heads=67, head_dim=head_dim, dtype=BF16)
    found = attend(*inputs, is_causal=is_causal)
    for batch in range(3):
        for first in range(0, 67, 9):
            part = (slice(batch, batch + 1), slice(first, first + 9))
            few = attend(*(x[part] for x in inputs), is_causal=is_causal)
            assert_bit_equal({name: found[name][part] for name in NAMES}, few)
    last = (slice(-1, None), slice(-2, None))
    expected = attend_reference(*(x[last].cpu() for x in inputs), is_causal=is_causal)
    assert_same({name: found[name][last].cpu() for name in NAMES}, expected)


@causal_and_full
@both_head_dims
def test_groups_of_many_heads(attend, on_gpu, is_causal, head_dim):
    """Each key head meets the queries of 24 heads one after the other; the other key head has no part."""
    inputs = on_gpu(333, heads=48, kv_heads=2, head_dim=head_dim)
    found = attend(*inputs, is_causal=is_causal)
    for n in range(2):
        q, kv = slice(24 * n, 24 * n + 24), slice(n, n + 1)
        half = [x[:, heads] for x, heads in zip(inputs, (q, kv, kv, q), strict=True)]
        part = {name: found[name][:, q if name in ("out", "dq") else kv] for name in NAMES}
        assert_bit_equal(part, attend(*half, is_causal=is_causal))


@both_head_dims
def test_33001_tokens(gradients, on_gpu, head_dim):
    """An odd length in fp16, near torch's attention; in the first and last tokens too."""
    inputs = on_gpu(33001, head_dim=head_dim)
    found = gradients(causal, *inputs)

    def exact(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    for name, x, wanted in zip(NAMES, found, gradients(exact, *inputs), strict=True):
        for part in (slice(None), slice(0, 128), slice(-128, None)):
            assert relative_l2(x[..., part, :], wanted[..., part, :]) < 0.1, (name, part)


@pytest.mark.parametrize(("heads", "head_dim"), [(32, 64), (16, 128)])
def test_memory(gradients, on_gpu, heads, head_dim):
    """On top of inputs and results at most 1.5 times what q, k and v take: packets of one pass at a time."""
    inputs = on_gpu(4096, heads=heads, head_dim=head_dim, dtype=BF16)
    gradients(causal, *inputs)  # what is kept for good: compiled kernels
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = gradients(causal, *inputs)
    torch.cuda.synchronize()
    of_results = sum(x.numel() * x.element_size() for x in results)
    extra = torch.cuda.max_memory_allocated() - before - of_results
    assert extra <= 1.5 * sum(x.numel() * x.element_size() for x in inputs[:3])
