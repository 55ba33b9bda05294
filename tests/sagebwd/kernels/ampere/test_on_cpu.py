"""The Ampere kernels on a CPU: whichever threads run first, the bits are the same.

That they are right is tested as for the other kernel sets: see ``EMULATED`` in sets.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.kernels.ampere import shapes
from tests.sagebwd.kernels.cuda.sources_on_cpu import run_in_order
from tests.sagebwd.kernels.operators import attention, gradients
from tests.sagebwd.kernels.sets import FP16, emulated_too, only

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    emulated_too,
    only(lambda kernel_set: kernel_set.is_emulated and kernel_set.name == "ampere"),
]


@pytest.fixture
def attend(kernel_set, draw):
    """attend(tokens or lengths of documents, config, mask, head_dim) -> function() -> [out, dq, dk, dv]."""

    def attend(lengths, config, mask, head_dim=64):
        packed = {}
        if not isinstance(lengths, int):
            packed["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            lengths = sum(lengths)
        inputs = draw(lengths, batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype=FP16)
        function = attention(kernel_set.name, config=config, **{"is_causal": False, **packed, **mask})
        return lambda: gradients(function, *inputs)

    return attend


@pytest.fixture
def starving():
    """starving(first, count, function): its results if so many threads run only when no other can."""

    def starving(first, count, function):
        run_in_order(first=first, count=count)
        return function()

    yield starving
    run_in_order()


CAUSAL, WINDOW = {"is_causal": True}, {"window_size": (70, 3)}
TWELVE_WARPS = {
    "default, packed": (SageConfig(), (1, 64, 65, 0, 127, 2), CAUSAL),
    "low_bias, a window": (SageConfig.low_bias(), 330, WINDOW),
    "consistent": (SageConfig.consistent(), 330, CAUSAL),
    "strictly causal": (SageConfig.strictly_causal(), 330, CAUSAL),
    "paper, packed": (SageConfig.paper(), (1, 64, 65, 0, 130, 2), CAUSAL),
    "paper, a window": (SageConfig.paper(), 330, WINDOW),
    "paper, scales of rows": (replace(SageConfig.paper(), granularity="row"), 330, CAUSAL),
    "accurate, packed": (SageConfig.accurate(), (1, 64, 65, 0, 130, 2), CAUSAL),
}


@pytest.mark.parametrize(("config", "lengths", "mask"), TWELVE_WARPS.values(), ids=TWELVE_WARPS.keys())
def test_twelve_warps_give_the_same_bits_as_eight(attend, starving, monkeypatch, config, lengths, mask):
    """Whichever warps are late."""
    tile, s_16bit = config.tile(64), not config.is_int8("s_bwd")
    source = shapes.backward_source(tile, 64, s_16bit=s_16bit)
    assert source == ("backward_dq_warps" if tile[1] == 128 else "backward_64_keys_dq_warps")
    run = attend(lengths, config, mask)
    found = [run()]
    for first, count in ((0, 32), (128, 128), (256, 32), (256, 128)):
        found.append(starving(first, count, run))
    monkeypatch.setattr(shapes, "DQ_WARP_HEAD_DIMS", ())
    monkeypatch.setattr(shapes, "DQ_WARP_HEAD_DIMS_OF_64_KEYS", ())
    wanted = run()
    for results in found:
        assert all(map(torch.equal, results, wanted))


FORWARDS = {
    "default, packed": (SageConfig(), (1, 64, 65, 0, 130, 2, 300), CAUSAL, 64),
    "default, a window": (SageConfig(), 700, {"window_size": (140, 3)}, 64),
    "P in 16 bits": (SageConfig.consistent(), 700, CAUSAL, 128),
    "strictly causal": (SageConfig.strictly_causal(), 330, CAUSAL, 64),
    "paper": (SageConfig.paper(), 330, CAUSAL, 128),
}


@pytest.mark.parametrize(("config", "lengths", "mask", "head_dim"), FORWARDS.values(), ids=FORWARDS.keys())
def test_the_groups_of_the_forward_take_turns(attend, starving, config, lengths, mask, head_dim):
    """Whichever warps are late, the second group or the one that copies; also all in the reverse order."""
    run = attend(lengths, config, mask, head_dim)
    wanted = run()
    run_in_order(reverse=True)
    assert all(map(torch.equal, run(), wanted))
    for first, count in ((0, 32), (0, 128), (128, 32), (128, 128)):
        assert torch.equal(starving(first, count, run)[0], wanted[0])
