"""The Ampere kernels on a CPU, see ``EMULATED`` in sets.py: whichever threads run first, the same bits."""

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.kernels.ampere import shapes
from sagebwd.kernels.cuda import plan
from tests.inputs import gradients
from tests.sagebwd.kernels.operators import attention, forward
from tests.sagebwd.kernels.sets import FP16, boundaries_of, emulated_too, only

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    emulated_too,
    only(lambda kernel_set: kernel_set.is_emulated and kernel_set.name == "ampere"),
]


@pytest.fixture
def runs(kernel_set, draw):
    """runs(tokens or lengths of documents, …) -> functions: [out, dq, dk, dv]; [out, lse, its residual]."""

    def runs(lengths, config, mask, head_dim=64):
        boundaries = None
        if not isinstance(lengths, int):
            boundaries = torch.tensor(boundaries_of(lengths))
            lengths = sum(lengths)
        heads = 2 if config == SageConfig() else 1
        inputs = draw(lengths, batch=1, heads=heads, kv_heads=1, head_dim=head_dim, dtype=FP16)
        mask = {"is_causal": False, **mask}
        both = attention(kernel_set.name, config=config, cu_seqlens=boundaries, **mask)
        q, k, v = (x[:, :1] for x in inputs[:3])

        def alone():
            out, lse, _, residual, *_ = forward(kernel_set.name, q, k, v, boundaries, config=config, **mask)
            return out, lse, residual

        return lambda: gradients(both, *inputs), alone

    return runs


#: The first of threads that run only when no other can, and how many.
LATE = ({"count": 32}, *({"first": first, "count": n} for first, n in ((128, 128), (256, 32), (256, 128))))

CAUSAL, WINDOW = {"is_causal": True}, {"window_size": (70, 3)}
#: Three tiles of 128 keys, or four of 64.
TWELVE_WARPS = {
    "default, packed": (SageConfig(), (1, 64, 65, 0, 127, 2), CAUSAL),
    "consistent, a window": (SageConfig.consistent(), 260, WINDOW),
    "strictly causal": (SageConfig.strictly_causal(), 260, CAUSAL),
    "paper, packed": (SageConfig.paper(), (1, 64, 0, 130, 2), CAUSAL),
    "dP in fp16, packed": (SageConfig(dp_fp16_accumulation=True), (1, 64, 65, 0, 127, 2), CAUSAL),
}


@pytest.mark.parametrize(("config", "lengths", "mask"), TWELVE_WARPS.values(), ids=TWELVE_WARPS.keys())
def test_twelve_warps_give_the_same_bits_as_eight(runs, in_order, monkeypatch, config, lengths, mask):
    """Whichever warps are late."""
    tile = config.tile(64)
    source = shapes.backward_source(tile, 64)
    assert source == ("backward_dq_warps" if tile[1] == 128 else "backward_64_keys_dq_warps")
    run, _ = runs(lengths, config, mask)
    found = [run(), *(in_order(run, **late) for late in LATE)]
    monkeypatch.setattr(shapes, "DQ_WARP_HEAD_DIMS", ())
    plan.plan_of.cache_clear()
    wanted = in_order(run, reverse=True)
    for results in found:
        assert all(map(torch.equal, results, wanted))


@pytest.mark.parametrize("config", [SageConfig.consistent(), SageConfig.paper()], ids=["consistent", "paper"])
def test_the_order_of_warps_changes_nothing_with_128_channels(runs, in_order, config):
    run, _ = runs(200, config, CAUSAL, 128)
    wanted = run()
    for order in ({"reverse": True}, *LATE[:2], {"first": 96, "count": 32}):
        assert all(map(torch.equal, in_order(run, **order), wanted)), order


@pytest.mark.parametrize("settings", [{}, {"block_q": 64, "block_kv": 64}], ids=["default", "64 keys"])
def test_keys_that_no_query_sees_have_no_gradient(kernel_set, draw, in_order, settings):
    """Their warps store zeros at once, where others may still convert V to fp16."""
    inputs = draw(64, 260, batch=1, heads=1, head_dim=64, dtype=FP16)
    attend = attention(kernel_set.name, config=SageConfig(dp_fp16_accumulation=True, **settings))
    gradients(attend, *inputs)  # only kernels that are loaded take an order
    for _ in range(10):
        _, _, dk, dv = in_order(lambda: gradients(attend, *inputs), random=True)
        assert not dk[..., 64:, :].any()
        assert not dv[..., 64:, :].any()


#: At least three tiles of keys, for two that are in memory at a time.
FORWARDS = {
    "default, packed": (SageConfig(), (1, 64, 65, 0, 2, 300), CAUSAL, 64),
    "default, a window": (SageConfig(), 450, {"window_size": (140, 3)}, 64),
    "P in 16 bits": (SageConfig.consistent(), 400, CAUSAL, 128),
    "strictly causal": (SageConfig.strictly_causal(), 330, CAUSAL, 64),
    "paper": (SageConfig.paper(), 260, CAUSAL, 128),
}


@pytest.mark.parametrize(("config", "lengths", "mask", "head_dim"), FORWARDS.values(), ids=FORWARDS.keys())
def test_the_groups_of_the_forward_take_turns(runs, in_order, config, lengths, mask, head_dim):
    """Whichever warps are late, the second group or the one that copies; also all in the reverse order."""
    _, run = runs(lengths, config, mask, head_dim)
    wanted = run()
    for order in ({"reverse": True}, {"count": 32}, {"count": 128}, {"first": 128, "count": 32}, LATE[1]):
        assert all(map(torch.equal, in_order(run, **order), wanted)), order
