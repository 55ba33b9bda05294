"""What tests of the Hopper kernels share: cases by name, settings, packs of documents, poisons."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch

from sagebwd import SageConfig, dispatch
from sagebwd.config import PAPER_INT8_MATMULS
from tests.sagebwd.kernels.triton import test_edge_values as edge_values

NAMES = ("out", "dq", "dk", "dv")
GRADIENTS = NAMES[1:]
INPUTS = ("q", "k", "v", "grad_out")
FP16, BF16 = torch.float16, torch.bfloat16

both_head_dims = pytest.mark.parametrize("head_dim", [64, 128])
both_dtypes = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
causal_and_full = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])

every_input = pytest.mark.parametrize("name", INPUTS)
every_poison = pytest.mark.parametrize("poison", edge_values.POISONS, ids=str)


def poison_one(inputs, name, token, poison):
    """inputs with one value of one of them replaced."""
    inputs[INPUTS.index(name)][..., token, 3] = poison
    return inputs


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


def without_int8(*products, **settings):
    """The default with these products in 16 bits, and `settings`."""
    names = tuple(name for name in PAPER_INT8_MATMULS if name not in products)
    return SageConfig(int8_matmuls=names, **settings)


@contextmanager
def only_triton():
    """The Triton kernels on a GPU that has others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "choose", lambda q, scale, config, kernels=None: kernels or "triton")
        yield


def constant(n, head_dim, value=0.0, dtype=FP16):
    return torch.full((1, 1, n, head_dim), value, dtype=dtype)


def assert_bit_equal(found, wanted):
    for name in NAMES:
        assert found[name].isfinite().all(), name
        assert torch.equal(found[name], wanted[name]), name
