"""Kernels against the reference, in out and every gradient: the same arithmetic, tile by tile.

Only three things may differ: the order of fp32 sums, exp2 for exp, and x · (1/s) for x / s. Each is worth
2⁻²³ or so. Now and then that carries a number over the border between two steps of INT8, or two of fp16: of
n numbers about n · 127 · 2⁻²² do, so that hundreds of products hold a few. See ``assert_same``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from sagebwd import SageConfig
from sagebwd.config import MATMULS, P_MATMULS
from sagebwd.metrics import relative_l2

pytestmark = pytest.mark.usefixtures("poisoned_memory")
gpu = pytest.mark.gpu

NAMES = ("out", "dq", "dk", "dv")
#: So small that short sequences, which the interpreter can afford, have several.
SMALL_TILE = {"block_q": 64, "block_kv": 64}


@pytest.fixture
def assert_same(device):
    """Assert that relative L2 is below 1e-3 and no element further off than one step of INT8 for the largest.

    INT8 itself costs 0.02; a wrong scale, tile or mask would cost as much or more. Largest measured: 3e-4 and
    0.12 steps. Most of that is one element of O that fp16 rounds otherwise, which δ carries into a whole row
    of dS.

    A GPU is allowed one number more: its 1/127 is off by up to 2 ulp, so that now and then a number of Q, K,
    V or dO falls to the other side. That one is off by a step where all n are by √(1/12) of one, at random,
    which together cost 0.02: √12 · 0.02 / √n.
    """

    def assert_same(found, wanted, names=NAMES):
        for name in names:
            assert found[name].dtype == wanted[name].dtype
            assert found[name].isfinite().all(), name
            x, y = found[name].float(), wanted[name].float()
            bound, steps = (1e-3, 1) if device == "cpu" else (1e-3 + 0.07 / x.numel() ** 0.5, 2)
            assert relative_l2(x, y) < bound, name
            assert (x - y).abs().max() <= steps * y.abs().max() / 127, name

    return assert_same


@pytest.fixture
def check(kernels, attend_reference, assert_same):
    """Run both on CPU inputs and assert that they are the same; return the result of the kernels."""

    def check(inputs, *, names=NAMES, **settings):
        found = kernels(*inputs, **settings)
        assert_same(found, attend_reference(*inputs, **settings), names)
        return found

    return check


# --- Settings ---------------------------------------------------------------------------------------------

SETTINGS = {
    "default": {},
    "granularity": {"granularity": "block"},
    "smooth_q": {"smooth_q": True},
    "no smoothing": {"smooth_k": False},
    "only smooth_q": {"smooth_q": True, "smooth_k": False},
    "smooth_v": {"smooth_v": True},
    "only smooth_v, token scales": {"smooth_v": True, "smooth_k": False, "operand_scales": "token"},
    "unsigned_p": {"unsigned_p": True},
    "unsigned_p, token scales, granularity": {
        "unsigned_p": True,
        "operand_scales": "token",
        "granularity": "block",
    },
    "compensate_o": {"compensate_o": True, "int8_matmuls": ("s_fwd", "s_bwd", "dv", "dq", "dk")},
    "token scales": {"operand_scales": "token"},
    "token scales, granularity": {"operand_scales": "token", "granularity": "block"},
    "accurate": {"smooth_k": False, "operand_scales": "token", "int8_matmuls": ("dv", "dq", "dk")},
    "all INT8": {"int8_matmuls": MATMULS},
    "all INT8, everything": {
        "int8_matmuls": MATMULS,
        "operand_scales": "token",
        "smooth_q": True,
    },
    "no INT8": {"int8_matmuls": ()},
    "no INT8, everything": {"int8_matmuls": (), "smooth_q": True},
    **{f"only {name}": {"int8_matmuls": (name,)} for name in MATMULS},
}
MORE_SETTINGS = {
    "unsigned_p, granularity": {"unsigned_p": True, "granularity": "block"},
    "unsigned_p, token scales": {"unsigned_p": True, "operand_scales": "token", "smooth_k": False},
    "unsigned_p, smooth_v": {"unsigned_p": True, "smooth_v": True},
    **{
        f"unsigned_p, not {name}": {
            "unsigned_p": True,
            "int8_matmuls": tuple(x for x in MATMULS if x != name),
        }
        for name in P_MATMULS
    },
    **{f"not {name}": {"int8_matmuls": tuple(x for x in MATMULS if x != name)} for name in MATMULS},
    **{
        f"token scales, only {name}": {"operand_scales": "token", "int8_matmuls": (name,)} for name in MATMULS
    },
}


@pytest.mark.parametrize(
    "switches",
    [pytest.param(switches, id=name) for name, switches in SETTINGS.items()]
    + [pytest.param(switches, id=name, marks=gpu) for name, switches in MORE_SETTINGS.items()],
)
@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=gpu)], ids=["causal", "full"])
def test_every_setting(check, sample, switches, is_causal):
    """Four tiles, the last of them short, and two query heads to each key head."""
    inputs = sample(75, heads=2, kv_heads=1)
    check(inputs, config=SageConfig(**{**SMALL_TILE, **switches}), is_causal=is_causal)


def test_the_paper(check, sample):
    """Its scales belong to tiles of 128 x 64, which a CTA must own whole."""
    check(sample(150), config=SageConfig.paper(), is_causal=True)


def test_what_pads_a_tile_has_no_part_in_its_scale(check, sample):
    """A key past the end would have logit 0, here far above all others: logits of −9 or so."""
    q, k, v, grad_out = sample(75, sigma=0.1)
    config = SageConfig(granularity="block", smooth_k=False, **SMALL_TILE)
    check([q - 1.3, k + 1.3, v, grad_out], config=config)


@pytest.mark.parametrize(
    ("block_q", "block_kv"),
    [
        (32, 32),
        (32, 128),
        (128, 64),
        (128, 128),
        *(
            pytest.param(*blocks, marks=gpu)
            for blocks in ((32, 64), (64, 32), (64, 64), (64, 128), (128, 32))
        ),
    ],
)
@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=gpu)], ids=["causal", "full"])
def test_block_sizes(check, sample, block_q, block_kv, is_causal):
    config = SageConfig(block_q=block_q, block_kv=block_kv)
    check(sample(140 if block_q > 32 else 70), config=config, is_causal=is_causal)


# --- Shapes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("n", [70, pytest.param(300, marks=gpu)])
@pytest.mark.parametrize(
    "switches",
    [
        {},
        *(
            pytest.param(switches, marks=gpu)
            for switches in (
                {"operand_scales": "token"},
                {"smooth_q": True, "int8_matmuls": MATMULS},
                {"int8_matmuls": ()},
            )
        ),
    ],
    ids=str,
)
def test_head_sizes(check, sample, head_dim, n, switches):
    check(sample(n, head_dim=head_dim), config=SageConfig(**switches), is_causal=True)


@pytest.mark.parametrize(
    ("n_q", "n_kv", "is_causal"),
    [
        (2, 2, True),
        (1, 70, False),
        (63, 64, True),
        (64, 65, False),
        (65, 63, True),
        (127, 129, False),
        (129, 128, True),
        (33, 150, True),
        (150, 33, True),
        (150, 33, False),
        *(
            pytest.param(n, m, is_causal, marks=gpu)
            for n in (1, 2, 31, 64, 127, 128, 129, 257, 1000)
            for m in (2, 32, 63, 65, 128, 255, 1000)
            for is_causal in (False, True)
            if n > 1 or not is_causal  # the only query would see one key
        ),
    ],
)
def test_lengths(check, sample, n_q, n_kv, is_causal):
    check(sample(n_q, n_kv), is_causal=is_causal)


@pytest.mark.parametrize("n_q", [1, 70])
def test_one_key(kernels, attend_reference, assert_same, sample, n_q):
    """All weight lies on it. dQ is 0 because K is its own mean; dS and dK are what fp16 and INT8 leave of
    dP − δ = 0, too little to compare: one element of O that rounds otherwise is a good part of it.
    """
    inputs = sample(n_q, 1)
    found, wanted = kernels(*inputs), attend_reference(*inputs)
    assert_same(found, wanted, ("out", "dv"))
    assert not found["dq"].any()
    assert relative_l2(found["dk"], wanted["dk"]) < 0.1


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads"),
    [
        (2, 3, 3),
        (1, 4, 2),
        (2, 3, 1),
        *(pytest.param(*heads, marks=gpu) for heads in ((3, 8, 2), (2, 16, 1), (5, 1, 1), (1, 7, 7))),
    ],
)
def test_batches_and_groups_of_heads(check, sample, batch, heads, kv_heads):
    """With all that each head has: blocks, scales, the logsumexp, δ, and the means of Q and K."""
    config = SageConfig(smooth_q=True)
    check(sample(40, batch=batch, heads=heads, kv_heads=kv_heads), config=config, is_causal=True)


@pytest.mark.parametrize("scale", [0.0, 0.02, 0.5])
def test_scale(check, sample, scale):
    found = check(sample(70), scale=scale)
    if scale == 0:
        assert not found["dq"].any()
        assert not found["dk"].any()


@pytest.mark.parametrize(
    "switches", [{}, {"operand_scales": "token", "smooth_q": True}, {"int8_matmuls": ()}], ids=str
)
def test_bf16(kernels, attend_reference, sample, device, switches):
    """A GPU rounds to bf16 as the reference does, and steps of bf16 are 8 times those of fp16. The
    interpreter cuts digits off: up to one step, 2⁻⁷, of every number that it stores or multiplies. Two such
    errors add up, that of P or of O in δ, and that of the result.
    """
    inputs = sample(70, head_dim=64, dtype=torch.bfloat16)
    config = SageConfig(**switches)
    found, wanted = (
        attention(*inputs, config=config, is_causal=True) for attention in (kernels, attend_reference)
    )
    for name in NAMES:
        assert found[name].dtype == torch.bfloat16
        assert relative_l2(found[name], wanted[name]) < (2 * 2**-7 if device == "cpu" else 8e-3), name


# --- Memory -----------------------------------------------------------------------------------------------

LAYOUTS = (
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # (B, N, H, D) in memory
    lambda x: x.mT.contiguous().mT,  # (B, H, D, N)
    lambda x: x.repeat_interleave(2, -1)[..., ::2],
    lambda x: pad(x, (3, 4, 5, 6, 1, 1), value=torch.nan)[:, 1:-1, 5:-6, 3:-4],
)


@pytest.fixture
def assert_equal(assert_same, device):
    """Bit for bit in the interpreter. A GPU may spread another layout otherwise over its threads, and so sum
    δ and the mean of K in another order.
    """

    def assert_equal(found, wanted):
        if device == "cuda":
            assert_same(found, wanted)
        else:
            assert all(torch.equal(found[name], wanted[name]) for name in NAMES)

    return assert_equal


@pytest.mark.parametrize("first", [0, 1, pytest.param(2, marks=gpu), pytest.param(3, marks=gpu)])
def test_layout_does_not_matter(attend, assert_equal, sample, device, first):
    """Each tensor has another layout, and another one in the next round."""
    inputs = [x.to(device) for x in sample(40, batch=2, heads=2)]
    strided = [LAYOUTS[(first + n) % 4](x) for n, x in enumerate(inputs)]
    assert all(x.stride() != y.stride() for x, y in zip(inputs, strided, strict=True))
    config = SageConfig(int8_matmuls=("s_fwd", "dv"), smooth_q=True)  # reads every tensor in 16 bit too
    found, wanted = (attend(*x, config=config, is_causal=True) for x in (strided, inputs))
    assert_equal(found, wanted)
    for name, like in zip(NAMES, (strided[0], *strided[:3]), strict=True):
        assert found[name].stride() == torch.empty_like(like).stride(), name


def test_a_gradient_that_is_one_number_for_all(attend, assert_equal, sample, device):
    """The gradients of ``out.sum()`` and ``out.sum(2)`` have strides of zero."""
    *inputs, grad_out = (x.to(device) for x in sample(40, heads=2))
    for grad in (grad_out[:, :1, :1, :1], grad_out[:, :, :1]):
        expanded = grad.expand_as(grad_out)
        assert 0 in expanded.stride()
        found, wanted = (attend(*inputs, g) for g in (expanded, expanded.contiguous()))
        assert_equal(found, wanted)


def test_two_runs_give_the_same_bits(kernels, sample):
    inputs = sample(70, heads=2, kv_heads=1)
    first, second = (kernels(*inputs, is_causal=True) for _ in range(2))
    for name in NAMES:
        assert torch.equal(first[name], second[name]), name


# --- Anything ---------------------------------------------------------------------------------------------

configs = st.builds(
    SageConfig,
    smooth_k=st.just(True),
    smooth_q=st.booleans(),
    operand_scales=st.sampled_from(["block", "token"]),
    granularity=st.sampled_from(["block", "row"]),
    int8_matmuls=st.sets(st.sampled_from(MATMULS)).map(tuple),
    block_q=st.sampled_from([32, 64]),
    block_kv=st.sampled_from([32, 64]),
)


@settings(
    deadline=None,
    max_examples=8,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink an example takes the interpreter hours
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    n_q=st.integers(1, 50),
    n_kv=st.integers(1, 50),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    head_dim=st.sampled_from([8, 16, 32, 40]),
    is_causal=st.booleans(),
    sigma=st.sampled_from([0.3, 1.0, 3.0]),
    config=configs,
    smooth_k=st.booleans(),
    unsigned_p=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_anything(
    kernels, attend_reference, exact, sample,
    n_q, n_kv, heads, head_dim, is_causal, sigma, config, smooth_k, unsigned_p, seed,
):  # fmt: skip
    """Kernels lie closer to the reference than half of what quantization and fp16 cost it: with few tokens
    there is no telling how many roundings differ. Nor need there be any error, so one element may fall to the
    other side in fp16; and where the exact gradient is 0, as with one key, sums in fp32 leave up to 1e-5.
    """
    if not smooth_k:
        config = replace(config, smooth_k=False)
    if unsigned_p and any(map(config.is_int8, P_MATMULS)):
        config = replace(config, unsigned_p=True)
    inputs = sample(n_q, n_kv, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, sigma=sigma, seed=seed)
    wanted = exact(*inputs, is_causal=is_causal)
    found, reference = (
        attention(*inputs, config=config, is_causal=is_causal) for attention in (kernels, attend_reference)
    )
    for name in NAMES:
        x, y = found[name].double(), reference[name].double()
        bound = 0.5 * (y - wanted[name]).norm() + 2**-10 * y.abs().max() + 1e-5 * y.numel() ** 0.5
        assert (x - y).norm() <= bound, name
