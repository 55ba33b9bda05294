"""Presets × packed documents × groups of heads × masks × lengths, crossed, against the reference.

Each case is there for pairs of features whose code meets: a mean of each document and key head, scales of
tiles and several query heads to a key head, windows that end on the edge of a tile, more queries than keys.
Two sequences where there are no documents, but for 256 channels; always two key heads, with two query heads
each. One backward kernel for all gradients has more in hopper/test_on_cpu.py.
"""

from dataclasses import replace

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.config import DEFAULT_CONFIG
from tests.sagebwd.kernels.inputs import token_major, with_means
from tests.sagebwd.kernels.sets import FP16, boundaries_of, emulated_too, over

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PAPER, STRICT = SageConfig.paper(), SageConfig.strictly_causal()
LOW_BIAS, CONSISTENT = SageConfig.low_bias(), SageConfig.consistent()
#: Scales of tiles, and of tokens, with all that may go with them.
TILE_SCALES = replace(PAPER, smooth_k=False, smooth_v=True, unsigned_p=True)
TOKEN_SCALES = SageConfig(operand_scales="token", smooth_v=True, unsigned_p=True)
DP_IN_FP16, PAPER_IN_FP16 = SageConfig(dp_fp16_accumulation=True), replace(PAPER, dp_fp16_accumulation=True)
CAUSAL = {"is_causal": True}
DOCUMENTS = (1, 64, 130, 0, 65, 2)
OTHER_KEYS = (65, 1, 129, 5, 0, 70)

#: Where tiles are of 64 queries and 128 keys, or of 128 and 64. Their first queries and keys are multiples of
#: 64. So with 65 the first key that a query sees ends a tile, or the last query that sees a key begins one;
#: with 1 the last key that a query sees begins a tile; with 62 and 126 the first query of a tile does not see
#: the last key of another, and 127 is the same on the left, where 62 and 126 hide one key of a tile.
EDGES = [{"window_size": window} for window in ((65, 1), (127, 62), (126, 126), (62, -1))]

#: name: (settings, head size, queries, keys, mask); lengths of documents, or of the sequences
CASES = {
    "default": (DEFAULT_CONFIG, 64, 190, 190, CAUSAL),
    "default, packed": (DEFAULT_CONFIG, 72, DOCUMENTS, DOCUMENTS, CAUSAL),
    "default, other keys": (DEFAULT_CONFIG, 64, DOCUMENTS, OTHER_KEYS, {}),
    "default, window 0": (DEFAULT_CONFIG, 64, 200, 200, EDGES[0]),
    "default, window 1": (DEFAULT_CONFIG, 64, 260, 260, EDGES[1]),
    "default, window 2": (DEFAULT_CONFIG, 64, 260, 260, EDGES[2]),
    "default, more queries": (DEFAULT_CONFIG, 64, 200, 70, {"window_size": (75, -1)}),
    "default, more keys": (DEFAULT_CONFIG, 64, 70, 260, {"window_size": (-1, 58)}),
    "default, no mask": (DEFAULT_CONFIG, 64, 70, 150, {}),
    "low_bias, packed, window": (LOW_BIAS, 64, DOCUMENTS, DOCUMENTS, EDGES[0]),
    "consistent, packed": (CONSISTENT, 40, DOCUMENTS, DOCUMENTS, CAUSAL),
    "consistent, window": (CONSISTENT, 64, 200, 200, EDGES[1]),
    "int8_scores": (SageConfig.int8_scores(), 64, 190, 190, CAUSAL),
    "int8_scores, packed, window": (SageConfig.int8_scores(), 64, DOCUMENTS, OTHER_KEYS, EDGES[3]),
    "paper": (PAPER, 64, 190, 190, CAUSAL),
    "paper, scales of rows": (replace(PAPER, granularity="row"), 64, 130, 130, CAUSAL),
    "tile scales, other keys": (TILE_SCALES, 128, DOCUMENTS, OTHER_KEYS, {}),
    "tile scales, window": (TILE_SCALES, 64, 260, 150, EDGES[3]),
    "strictly causal": (STRICT, 64, 130, 130, CAUSAL),
    "strictly causal, packed, window": (STRICT, 72, DOCUMENTS, DOCUMENTS, EDGES[0]),
    "token scales": (TOKEN_SCALES, 128, 70, 190, {}),
    "dP in fp16": (DP_IN_FP16, 64, 190, 190, CAUSAL),
    "dP in fp16, packed, window": (replace(DP_IN_FP16, unsigned_p=True), 72, DOCUMENTS, DOCUMENTS, EDGES[3]),
    "dP in fp16, tile scales": (PAPER_IN_FP16, 128, DOCUMENTS, OTHER_KEYS, {}),
    "dP in fp16, tile scales, 32 channels": (PAPER_IN_FP16, 32, 130, 130, CAUSAL),
    "dP in fp16, 64 keys": (replace(DP_IN_FP16, block_kv=64), 64, 130, 70, {}),
    "dP in fp16, 200 channels": (DP_IN_FP16, 200, 130, 130, EDGES[1]),
    "256 channels": (DEFAULT_CONFIG, 256, 130, 70, CAUSAL),
    "low_bias, 200 channels, packed": (LOW_BIAS, 200, DOCUMENTS, DOCUMENTS, CAUSAL),
    "token scales, 136 channels, window": (TOKEN_SCALES, 136, 130, 190, EDGES[1]),
    "consistent, 256 channels": (CONSISTENT, 256, 130, 130, {}),
}
SMALL = {"block_q": 32, "block_kv": 32}
#: The same for the interpreter, in tiles of 32 × 32.
FEW_CASES = {
    "smooth_q, smooth_v, packed": (
        SageConfig(smooth_q=True, smooth_v=True, **SMALL), 32, (1, 33, 7), (5, 32, 3), CAUSAL,
    ),
    "paper, packed, window": (
        replace(PAPER, smooth_v=True, **SMALL), 32, (34, 7), (3, 7), {"window_size": (30, 30)},
    ),
    "token scales, packed": (replace(TOKEN_SCALES, smooth_q=True, **SMALL), 40, (33, 0, 9), (33, 0, 9), {}),
    "consistent, more queries": (replace(CONSISTENT, **SMALL), 32, 70, 34, {"window_size": (36, -1)}),
    "default, window 0": (SageConfig(**SMALL), 32, 66, 66, {"window_size": (33, 1)}),
    "default, window 1": (SageConfig(**SMALL), 32, 98, 98, {"window_size": (62, 30)}),
}  # fmt: skip


def cases(kernel_set):
    """config, head_dim, n_q, n_kv, mask."""
    named = CASES if kernel_set.is_cuda or kernel_set.is_gpu else FEW_CASES
    sizes = kernel_set.part == "256"
    for name, (config, head_dim, *others) in named.items():
        if kernel_set.runs(config, head_dim) and (not kernel_set.is_gpu or sizes == (head_dim > 128)):
            yield pytest.param(config, head_dim, *others, id=name)


@emulated_too
@over("config, head_dim, n_q, n_kv, mask", cases)
def test_crossed(check, sample, kernel_set, config, head_dim, n_q, n_kv, mask):
    packed = {}
    if isinstance(n_q, tuple):
        rows, columns = boundaries_of(n_q, 3), boundaries_of(n_kv, 5)
        packed = {"cu_seqlens": torch.tensor(rows, dtype=torch.int32), "cu_seqlens_kv": torch.tensor(columns)}
        n_q, n_kv = rows[-1] + 2, columns[-1] + 1
    batch = 2 if kernel_set.is_cuda and head_dim < 256 and not packed else 1
    sizes = {"batch": batch, "heads": 4, "kv_heads": 2, "head_dim": head_dim, "dtype": FP16}
    inputs = with_means(sample(n_q, n_kv, **sizes), 1.0)
    inputs[1] += torch.linspace(-1, 1, n_kv)[:, None].half()  # a mean of K of its own for each document
    inputs = [token_major(x) for x in inputs]  # a head of another batch is then far from the next one
    check(inputs, config=config, **mask, **packed)
