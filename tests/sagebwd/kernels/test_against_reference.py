"""Kernels against the reference, in out and every gradient: the same arithmetic, tile by tile.

Only three things may differ: the order of fp32 sums, exp2 for exp, and x · (1/s) for x / s. Each is worth
2⁻²³ or so. Now and then that carries an element over the border between two steps of INT8, or two of fp16: of
n elements about n · 127 · 2⁻²² do, so that hundreds of products hold a few. See ``assert_same``.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sagebwd import SageConfig, reference
from sagebwd.config import DEFAULT_CONFIG, MATMULS, P_MATMULS, PRESETS
from tests.sagebwd.kernels import operators
from tests.sagebwd.kernels.inputs import LAYOUTS, NAMES, token_major, with_means
from tests.sagebwd.kernels.sets import (
    BF16,
    FP16,
    causal_first,
    emulated_too,
    every_head_dim,
    full_first,
    kernels_only,
    named,
    needs,
    over,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# --- Settings ----------------------------------------------------------------------------------------------

TOKENS, BLOCKS = {"operand_scales": "token"}, {"granularity": "block"}
UNSIGNED = {"unsigned_p": True}
ONLY = {name: {"int8_matmuls": (name,)} for name in MATMULS}
ALL_BUT = {name: {"int8_matmuls": tuple(x for x in MATMULS if x != name)} for name in MATMULS}
SETTINGS = {
    "granularity": BLOCKS, "only smooth_q": {"smooth_q": True, "smooth_k": False}, "unsigned_p": UNSIGNED,
    "only smooth_v, token scales": {"smooth_v": True, "smooth_k": False} | TOKENS,
    "unsigned_p, token scales, granularity": UNSIGNED | TOKENS | BLOCKS,
    "compensate_o": {"compensate_o": True, "int8_matmuls": ("s_fwd", "s_bwd", "dv", "dq", "dk")},
    "S and O in 16 bit": {"smooth_k": False, "int8_matmuls": ("dv", "dq", "dk")} | TOKENS,
    "all INT8, everything": {"int8_matmuls": MATMULS, "smooth_q": True} | TOKENS,
    "no INT8, everything": {"int8_matmuls": (), "smooth_q": True},
    **{f"only {name}": ONLY[name] for name in ("s_fwd", "dp", "dq")},
}  # fmt: skip
#: For GPUs.
MORE_SETTINGS = {
    "default": {}, "smooth_q": {"smooth_q": True}, "no smoothing": {"smooth_k": False},
    "smooth_v": {"smooth_v": True}, "token scales": TOKENS, "token scales, granularity": TOKENS | BLOCKS,
    "all INT8": {"int8_matmuls": MATMULS}, "no INT8": {"int8_matmuls": ()},
    **{f"only {name}": ONLY[name] for name in ("o", "s_bwd", "dv", "dk")},
    "unsigned_p, granularity": UNSIGNED | BLOCKS,
    "unsigned_p, token scales": UNSIGNED | TOKENS | {"smooth_k": False},
    "unsigned_p, smooth_v": UNSIGNED | {"smooth_v": True},
    **{f"unsigned_p, not {name}": UNSIGNED | ALL_BUT[name] for name in P_MATMULS},
    **{f"not {name}": settings for name, settings in ALL_BUT.items()},
    **{f"token scales, only {name}": TOKENS | settings for name, settings in ONLY.items()},
}  # fmt: skip


def settings_of(kernel_set):
    switches = {**SETTINGS, **MORE_SETTINGS} if kernel_set.is_gpu else SETTINGS
    configs = {name: kernel_set.config(**values) for name, values in switches.items()}
    return named(kernel_set.those_it_runs(configs))


@over("config", settings_of)
@causal_first
@every_head_dim
def test_every_setting(check, sample, kernel_set, config, is_causal, head_dim):
    """Four tiles, the last of them not full, and two query heads to each key head."""
    inputs = sample(kernel_set.tokens + 5, heads=2, kv_heads=1, head_dim=head_dim)
    check(inputs, config=config, is_causal=is_causal)


@needs(granularity="block", block_q=64, block_kv=64)
def test_what_pads_a_tile_has_no_part_in_its_scale(check, sample, kernel_set):
    """A key past the end would have logit 0, here far above all others: logits of −9 or so.

    One channel makes them. If all channels of K had a mean, dQ would be a small difference of large numbers,
    and one element of dS that a GPU rounds to the other side would be .004 of it.
    """
    q, k, v, grad_out = sample(75)
    far = (9 * q.shape[3] ** 0.5) ** 0.5
    q[..., 0], k[..., 0] = -far, far
    tile = kernel_set.small_tile or {"block_q": 64, "block_kv": 64}
    check([q, k, v, grad_out], config=SageConfig(**tile, granularity="block", smooth_k=False))


FEW_TILES = ((32, 128), (128, 64))
MORE_TILES = ((32, 32), (32, 64), (64, 32), (64, 64), (64, 128), (128, 32), (128, 128))


def tiles_of(kernel_set):
    tiles = (*FEW_TILES, *MORE_TILES) if kernel_set.is_gpu else FEW_TILES
    return [tile for tile in tiles if kernel_set.runs(SageConfig(block_q=tile[0], block_kv=tile[1]))]


@over("block_q, block_kv", tiles_of)
@causal_first
def test_block_sizes(check, sample, block_q, block_kv, is_causal):
    config = SageConfig(block_q=block_q, block_kv=block_kv)
    check(sample(140 if block_q > 32 else 70), config=config, is_causal=is_causal)


# --- Lengths -----------------------------------------------------------------------------------------------


@over("n_q, n_kv, is_causal", lambda kernel_set: kernel_set.lengths)
@every_head_dim
def test_lengths(check, sample, kernel_set, n_q, n_kv, is_causal, head_dim):
    heads, kv_heads = kernel_set.heads
    check(sample(n_q, n_kv, heads=heads, kv_heads=kv_heads, head_dim=head_dim), is_causal=is_causal)


# --- Heads -------------------------------------------------------------------------------------------------

#: Runs of the head sizes, the first of them in the interpreter.
HEAD_SIZE_SETTINGS = {
    "default": {}, "token scales": TOKENS, "no INT8": {"int8_matmuls": ()},
    "smooth_q, all INT8": {"smooth_q": True, "int8_matmuls": MATMULS},
}  # fmt: skip


def head_size_settings(kernel_set):
    configs = {name: SageConfig(**switches) for name, switches in HEAD_SIZE_SETTINGS.items()}
    return named(kernel_set.those_it_runs(configs if kernel_set.is_gpu else {"default": DEFAULT_CONFIG}))


@over("head_dim", lambda kernel_set: kernel_set.all_head_dims)
@over("n", lambda kernel_set: [70, 300] if kernel_set.is_gpu else [70])
@over("config", head_size_settings)
def test_head_sizes(check, sample, head_dim, n, config):
    check(sample(n, head_dim=head_dim), config=config, is_causal=True)


FEW_HEADS = ((1, 4, 2), (2, 3, 1))
MORE_HEADS = ((2, 3, 3), (3, 8, 2), (2, 16, 1), (5, 1, 1), (1, 7, 7))


@over("batch, heads, kv_heads", lambda kernel_set: FEW_HEADS + (MORE_HEADS if kernel_set.is_gpu else ()))
@causal_first
@every_head_dim
def test_batches_and_groups_of_heads(check, sample, kernel_set, batch, heads, kv_heads, is_causal, head_dim):
    """With all that each head has: blocks, scales, the logsumexp, δ, and the means of K and, if they can be
    subtracted, of Q. dK and dV of a head are sums over its group.
    """
    smooth_q = SageConfig(smooth_q=True)
    config = smooth_q if kernel_set.runs(smooth_q) else DEFAULT_CONFIG
    inputs = sample(*kernel_set.short, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    check(inputs, config=config, is_causal=is_causal)


# --- Scale, dtype, logsumexp -------------------------------------------------------------------------------


@over("scale", lambda kernel_set: [0.0, 0.02, 0.5, *([None] if kernel_set.is_gpu else [])])
@full_first
@every_head_dim
def test_scale(check, sample, kernel_set, scale, is_causal, head_dim):
    found = check(sample(kernel_set.tokens, head_dim=head_dim), scale=scale, is_causal=is_causal)
    if scale == 0:
        assert not found["dq"].any()
        assert not found["dk"].any()


BF16_SETTINGS = {
    "default": SageConfig(),
    "token scales, smooth_q": SageConfig(operand_scales="token", smooth_q=True),
    "no INT8": SageConfig(int8_matmuls=()),
}


@over("config", lambda kernel_set: named(kernel_set.those_it_runs(BF16_SETTINGS)))
@every_head_dim
def test_bf16(check, sample, kernel_set, config, head_dim):
    inputs = sample(300 if kernel_set.is_gpu else 70, heads=2, kv_heads=1, head_dim=head_dim, dtype=BF16)
    check(inputs, config=config, is_causal=True)


@kernels_only
@over("config", lambda kernel_set: named(kernel_set.those_it_runs({"consistent": SageConfig.consistent()})))
def test_logsumexp_of_rounded_p(sample_on_device, kernel_set, config):
    """A compensated O is divided by the sum of the P that it multiplies: in BF16 that is another sum."""
    q, k, v, _ = sample_on_device(100, heads=2, kv_heads=1, dtype=BF16)
    _, lse, *_ = operators.forward(kernel_set.name, q, k, v, is_causal=True, config=config)
    inputs = (x.cpu() for x in (q, k, v))
    wanted = reference.attention(*inputs, enable_gqa=True, is_causal=True, config=config)
    torch.testing.assert_close(lse.cpu(), wanted.lse * 1.4426950408889634, rtol=0, atol=2e-4)


# --- Layouts -----------------------------------------------------------------------------------------------


@pytest.fixture
def assert_equal(assert_same, kernel_set):
    """Bit for bit in the interpreter. A GPU may distribute another layout otherwise over its threads, and so
    sum δ and the mean of K in another order.
    """

    def assert_equal(found, wanted):
        if kernel_set.is_gpu:
            assert_same(found, wanted)
        else:
            assert all(torch.equal(found[name], wanted[name]) for name in NAMES)

    return assert_equal


def layout_cases(kernel_set):
    """First layout, config, head size and dtype."""
    reads_16_bit_too = SageConfig(int8_matmuls=("s_fwd", "dv"), smooth_q=True)  # every tensor in both forms
    configs = {"default": DEFAULT_CONFIG, "smooth_v": SageConfig(smooth_v=True)}
    if kernel_set.runs(reads_16_bit_too):
        configs = {"S and dV in INT8": reads_16_bit_too, **configs}
    if kernel_set.is_emulated:
        presets = kernel_set.those_it_runs(
            {name: PRESETS[name] for name in ("default", "consistent", "int8_scores")}
        )
        return named(
            {f"{i}-{name}": (i, config, 40, FP16) for i, (name, config) in enumerate(presets.items())}
        )
    if not kernel_set.is_gpu:
        return named(
            {f"{first}-S and dV in INT8-fp16": (first, reads_16_bit_too, 32, FP16) for first in (0, 1)}
        )
    return [
        pytest.param(first, config, head_dim, dtype, id=f"{first}-{name}-{head_dim}-{dtype}")
        for first in range(4)
        for name, config in configs.items()
        for head_dim in (*kernel_set.head_dims, 80)
        for dtype in (FP16, BF16)
    ]


@emulated_too
@over("first, config, head_dim, dtype", layout_cases)
def test_layout_does_not_matter(
    attend, assert_equal, sample_on_device, kernel_set, first, config, head_dim, dtype
):
    """Each tensor has another layout, and another one in the next round. NaN lies around one, within the
    padded head size.

    The gradient of K lies token by token if its packed form is saved, not K itself.
    """
    n = 150 if kernel_set.is_gpu else 40
    inputs = sample_on_device(n, batch=2, heads=2, head_dim=head_dim, dtype=dtype)
    if config.smooth_v:
        inputs = [x.to(inputs[0].device) for x in with_means([x.cpu() for x in inputs], 1.0)]
    strided = [LAYOUTS[(first + n) % 4](x) for n, x in enumerate(inputs)]
    assert all(x.stride() != y.stride() for x, y in zip(inputs, strided, strict=True))
    found, wanted = (attend(*x, config=config, is_causal=True) for x in (strided, inputs))
    assert_equal(found, wanted)
    q, k, v = strided[:3]
    saves_k = not kernel_set.is_cuda or (kernel_set.name == "hopper" and not config.is_int8("dq"))
    for name, like in zip(NAMES, (q, q, k if saves_k else token_major(k), v), strict=True):
        assert found[name].stride() == torch.empty_like(like).stride(), name


@every_head_dim
def test_a_gradient_that_is_one_value_for_all(attend, assert_equal, sample_on_device, kernel_set, head_dim):
    """The gradients of ``out.sum()`` and ``out.sum(2)`` have strides of zero."""
    *inputs, grad_out = sample_on_device(150 if kernel_set.is_gpu else 40, heads=2, head_dim=head_dim)
    for grad in (grad_out[:, :1, :1, :1], grad_out[:, :, :1]):
        expanded = grad.expand_as(grad_out)
        assert 0 in expanded.stride()
        found, wanted = (attend(*inputs, g) for g in (expanded, expanded.contiguous()))
        assert_equal(found, wanted)


# --- Anything ----------------------------------------------------------------------------------------------


def test_anything(kernels, attend_reference, sample, kernel_set):
    """Kernels lie closer to the reference than half of what quantization and fp16 cost it: with few tokens
    there is no telling how many roundings differ. Nor need there be any error, so one element may fall to the
    other side in fp16; and where the exact gradient is 0, as with one key, sums in fp32 leave up to 1e-5.
    In dK that is for 64 queries: rests of more add up, with either sign.
    """

    phases = (Phase.explicit, Phase.reuse, Phase.generate)  # to shrink takes the interpreter hours
    slow = {"phases": phases, "suppress_health_check": [HealthCheck.too_slow]}

    @settings(deadline=None, max_examples=kernel_set.examples, **slow)
    @given(
        n_q=kernel_set.any_lengths,
        n_kv=kernel_set.any_lengths,
        batch=st.integers(1, 3) if kernel_set.is_gpu else st.just(1),
        heads=st.sampled_from([(1, 1), (2, 1), (2, 2), *([(4, 2), (5, 5)] if kernel_set.is_gpu else [])]),
        head_dim=kernel_set.any_head_dims,
        is_causal=st.booleans(),
        sigma=st.sampled_from([0.3, 1.0, 3.0]),
        config=kernel_set.any_config,
        seed=st.integers(0, 2**31),
    )
    def check_one(n_q, n_kv, batch, heads, head_dim, is_causal, sigma, config, seed):
        options = {"heads": heads[0], "kv_heads": heads[1], "sigma": sigma, "seed": seed}
        inputs = sample(n_q, n_kv, batch=batch, head_dim=head_dim, **options)
        wanted = vars(reference.exact_attention(*inputs, is_causal=is_causal))
        found, expected = (
            x(*inputs, config=config, is_causal=is_causal) for x in (kernels, attend_reference)
        )
        for name in NAMES:
            x, y = found[name].double(), expected[name].double()
            rests = max(1, n_q * heads[0] // heads[1] / 64) if name == "dk" else 1
            rest = 1e-5 * (rests * y.numel()) ** 0.5
            bound = 0.5 * (y - wanted[name]).norm() + 2**-10 * y.abs().max() + rest
            assert (x - y).norm() <= bound, name

    check_one()
