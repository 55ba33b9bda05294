"""Packed documents: kernels give each document the bits that it gets alone, and nothing to anyone else."""

from itertools import product

import pytest
import torch
from torch.nn.functional import pad

from sagebwd import SageConfig
from sagebwd.config import MATMULS
from tests.sagebwd.kernels.inputs import NAMES, assert_bit_equal, boundary_arguments, clamped
from tests.sagebwd.kernels.sets import BF16, FP16, emulated_too, every_head_dim, kernels_only, named, over

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CONFIGS = {
    "default": SageConfig(), "paper": SageConfig(granularity="block", block_q=64, block_kv=64),
    "strictly causal": SageConfig.strictly_causal(), "smooth_v": SageConfig(smooth_v=True),
    "smooth_q": SageConfig(smooth_q=True, block_q=32, block_kv=64), "unsigned_p": SageConfig(unsigned_p=True),
    "no INT8": SageConfig(int8_matmuls=()),
    "compensate_o": SageConfig(int8_matmuls=("dq",), compensate_o=True),
    "all INT8": SageConfig(int8_matmuls=MATMULS, block_q=64, block_kv=32),
}  # fmt: skip
MASKS = {"causal": {"is_causal": True}, "full": {}, "window": {"window_size": (11, 2)}}
#: For the interpreter.
FEW_CASES = [
    ("smooth_q", "two", "causal"),
    ("smooth_v", "several", "causal"),
    ("smooth_v", "keys or queries missing", "window"),
    *(("default", pack, "causal") for pack in ("tokens of no document", "empty documents", "other keys")),
]


def packs_and_configs(kernel_set):
    """pack, config, head_dim, mask, dtype."""
    if not kernel_set.is_gpu:
        for name, pack, mask in FEW_CASES:
            yield pytest.param(pack, CONFIGS[name], 32, mask, FP16, id=f"{pack}-{name}-{mask}")
        return
    head_dim, *_ = kernel_set.head_dims
    few = [(head_dim, "causal", FP16), (head_dim, "full", BF16), (head_dim, "window", FP16)]
    more = [*product(kernel_set.head_dims, ("causal", "full"), [FP16]), *few[1:]]
    all_of_them = list(product((*kernel_set.head_dims, 80), MASKS, (FP16, BF16)))
    cases = {
        **dict.fromkeys(CONFIGS, few),
        **dict.fromkeys(kernel_set.variants, few),
        **dict.fromkeys(kernel_set.main_variants, more),
        **dict.fromkeys(("default", "smooth_v"), all_of_them),
    }
    configs = {**kernel_set.those_it_runs(CONFIGS), **kernel_set.variants}
    for pack, (name, config) in product(kernel_set.packs, configs.items()):
        for head_dim, mask, dtype in cases[name]:
            names = f"{pack}-{name}-{head_dim}-{mask}-{'fp16' if dtype is FP16 else 'bf16'}"
            yield pytest.param(pack, config, head_dim, mask, dtype, id=names)


@over("pack, config, head_dim, mask, dtype", packs_and_configs)
def test_a_pack_is_each_of_its_documents_alone(
    kernels, alone, sample, kernel_set, config, pack, head_dim, mask, dtype
):
    """Bit for bit, and zero for tokens of no document."""
    n_q, rows, n_kv, columns = kernel_set.packs[pack]
    heads, kv_heads = kernel_set.pack_heads.get(pack, kernel_set.pack_heads["others"])
    inputs = sample(n_q, n_kv, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    settings = {**MASKS[mask], "config": config, "scale": 0.3}
    packed = kernels(*inputs, **boundary_arguments(rows, columns), **settings)
    assert_bit_equal(packed, alone(inputs, rows, columns or rows, **settings))


@pytest.mark.parametrize("boundaries", [[7, 7, 7], [0, 0], [30, 30], [0, 30]])
@over("smooth_v", lambda kernel_set: [False, True] if kernel_set.is_gpu else [False])
@every_head_dim
def test_without_keys_everything_is_zero(kernels, sample, boundaries, smooth_v, head_dim):
    result = kernels(
        *sample(30, 20, head_dim=head_dim),
        config=SageConfig(smooth_v=smooth_v),
        cu_seqlens=torch.tensor(boundaries),
        cu_seqlens_kv=torch.full((len(boundaries),), 5),
    )
    assert not any(result[name].any() for name in NAMES)


# --- Leaks -------------------------------------------------------------------------------------------------


#: Of the last two a kernel reads K where it is, and with it the beginning of the next document.
POISONED = {
    "default": SageConfig(),
    "int8_scores": SageConfig.int8_scores(),
    "int8_scores, not smoothed": SageConfig.int8_scores(smooth_k=False),
}


@emulated_too
@over("config", lambda kernel_set: named(kernel_set.those_it_runs(POISONED)))
@over("poison", lambda kernel_set: [torch.nan, torch.inf] if kernel_set.is_gpu else [torch.nan])
@every_head_dim
def test_nothing_comes_from_outside_a_document(kernels, sample, config, poison, head_dim):
    inputs = sample(100, heads=2, kv_heads=1, head_dim=head_dim)
    settings = {"cu_seqlens": torch.tensor([10, 45, 90]), "config": config}
    clean = kernels(*inputs, **settings)
    for x in inputs:
        x[..., :10, :] = x[..., 45:, :] = poison
    poisoned = kernels(*inputs, **settings)
    for name in NAMES:
        assert torch.equal(poisoned[name][..., :45, :], clean[name][..., :45, :]), name
        assert poisoned[name][..., 45:90, :].isnan().all(), name
        assert not poisoned[name][..., 90:, :].any(), name


# --- Invalid boundaries ------------------------------------------------------------------------------------
# Reading their values would wait for the GPU, so they are clamped to the sequence and to the boundary before.


def invalid_boundaries(kernel_set):
    n = kernel_set.tokens
    few = [[-5, 20, 300], [0, 50, 30, n]]
    return few + ([[2**40, 3], [-(2**40), 2**40], [n - 10, 10, 0]] if kernel_set.is_gpu else [])


@emulated_too
@kernels_only
@over("boundaries", invalid_boundaries)
@every_head_dim
def test_boundaries_out_of_order_or_range_read_nothing_out_of_bounds(
    kernels, sample, kernel_set, device, boundaries, head_dim
):
    """Around the tensors lies NaN, which would show."""
    n = kernel_set.tokens
    surrounded = [pad(x, (0, 0, 128, 128), value=torch.nan).to(device) for x in sample(n, head_dim=head_dim)]
    inputs = [x[..., 128:-128, :] for x in surrounded]
    found, wanted = (
        kernels(*inputs, cu_seqlens=torch.tensor(x), is_causal=True)
        for x in (boundaries, clamped(boundaries, n))
    )
    assert_bit_equal(found, wanted)
