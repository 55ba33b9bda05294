"""Sliding windows in kernels, against the reference; and what a window must not change."""

from itertools import product

import pytest
import torch

from sagebwd import SageConfig, sage_attention
from sagebwd.config import MATMULS, PRESETS
from tests.inputs import assert_same
from tests.sagebwd.kernels.sets import needs, over, reference_first

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SMALL_TILES = {"block_q": 32, "block_kv": 32}
CONFIGS = {
    **PRESETS,
    "smooth_q, smooth_v": SageConfig(smooth_q=True, smooth_v=True, **SMALL_TILES),
    "unsigned_p, token scales": SageConfig(unsigned_p=True, operand_scales="token", block_q=128, block_kv=64),
    "all INT8": SageConfig(int8_matmuls=MATMULS, granularity="block", **SMALL_TILES),
    "no INT8": SageConfig(int8_matmuls=(), compensate_o=True),
}
#: (queries, keys, window): windows narrower than a tile, wider than one, and without a limit on one side;
#: queries that see no key.
FEW_SHAPES = (
    (150, 150, (70, 3)), (150, 150, (9, 0)), (140, 70, (20, 30)), (70, 140, (-1, 40)), (131, 66, (40, -1)),
    (65, 65, (0, 1)),
)  # fmt: skip
MORE_SHAPES = (
    (1, 300, (0, 2)),
    *(
        (n_q, n_kv, window)
        for n_q, n_kv in ((64, 64), (257, 257), (1000, 1000), (1000, 300), (300, 1000))
        for window in ((1, 0), (0, 2), (63, 64), (127, 0), (128, 128), (-1, 65), (200, -1), (256, 31))
    ),
)


def shapes_and_configs(kernel_set):
    """n_q, n_kv, window_size, config, head_dim."""
    few = [(*FEW_SHAPES[n % len(FEW_SHAPES)], name, 32) for n, name in enumerate(CONFIGS)]
    few.append((*FEW_SHAPES[2], "default", 32))
    more = [(*shape, name, 64) for shape, name in product(FEW_SHAPES, CONFIGS)]
    more += [(*shape, "default", head_dim) for shape, head_dim in product(MORE_SHAPES, (64, 128, 256))]
    return [
        pytest.param(*case, CONFIGS[name], head_dim, id=f"{name}-{'-'.join(map(str, case))}-{head_dim}")
        for *case, name, head_dim in (few + more if kernel_set.is_gpu else few)
        if kernel_set.runs(CONFIGS[name], head_dim)
    ]


@over("n_q, n_kv, window_size, config, head_dim", shapes_and_configs)
def test_windows(check, sample, n_q, n_kv, window_size, config, head_dim):
    inputs = sample(n_q, n_kv, heads=2, kv_heads=1, head_dim=head_dim)
    found = check(inputs, window_size=window_size, config=config)
    left, _ = window_size
    without_keys = slice(n_q if left < 0 else n_kv + left, None)
    for name in ("out", "dq"):
        assert not found[name][:, :, without_keys].any()


@needs(operand_scales="token")
@over("changes", lambda kernel_set: [["NaN"]] + ([["other values"]] if kernel_set.is_gpu else []))
def test_strictly_causal_tokens_outside_a_window_leave_no_trace(kernels, sample, changes):
    """In out and dq of a token: it sees keys i − 12 … i."""
    inputs = sample(150)
    settings = {"window_size": (12, 0), "config": SageConfig.strictly_causal()}
    before = kernels(*inputs, **settings)
    for change in changes:
        changed = [x.clone() for x in inputs]
        for x in changed:
            for outside in (slice(0, 70 - 12), slice(91, None)):
                x[:, :, outside] = torch.nan if change == "NaN" else x[:, :, outside].flip(-1)
        after = kernels(*changed, **settings)
        for name in ("out", "dq"):
            x, y = (result[name][:, :, 70:91] for result in (before, after))
            assert x.isfinite().all()
            assert torch.equal(x, y), name


# --- PyTorch -----------------------------------------------------------------------------------------------


@reference_first
@over("backend", lambda kernel_set: ["aot_eager", *(["inductor"] if kernel_set.is_gpu else [])])
def test_compiled_equals_eager(sample_on_device, compiled, kernel_set, backend):
    """With a window that is traced as a number, and that has to be narrowed."""

    def attend(q, k, v, window_size):
        return sage_attention(q, k, v, window_size=window_size, return_lse=True, kernels=kernel_set.name)

    inputs = sample_on_device(40)
    function = compiled(attend, backend)
    for window_size in ((5, 2), (9, 0), (60, 60), (2**31 - 1, 0)):
        results = []
        for call in (function, attend):
            leaves = [x.detach().requires_grad_() for x in inputs[:3]]
            out, lse = call(*leaves, window_size)
            results.append(([out.detach(), *torch.autograd.grad(out, leaves, inputs[3])], lse))
        (found, lse), (wanted, wanted_lse) = results
        assert_same(found, wanted)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-6)
