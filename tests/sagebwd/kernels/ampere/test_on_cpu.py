"""The sources of the Ampere kernels on a CPU, with stand-ins for the instructions of a GPU.

They must agree with the reference. On a GPU the other files of this folder test more.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from sagebwd import SageConfig, reference
from sagebwd.config import DEFAULT_CONFIG, PRESETS
from sagebwd.interface import AttentionParams
from sagebwd.kernels.ampere import attention as ampere
from sagebwd.kernels.ampere import shapes
from sagebwd.kernels.ampere.shapes import SHARED_LIMIT
from sagebwd.kernels.cuda import launch
from sagebwd.kernels.layout import stand_in
from sagebwd.metrics import relative_l2
from sagebwd.window import Window
from tests.sagebwd.kernels import operators
from tests.sagebwd.kernels.cuda import sources_on_cpu
from tests.sagebwd.kernels.inputs import INPUTS, NAMES, VIEWS, change_after, poison_one

#: Headers that stand in for those of the same name in sagebwd/kernels/ampere.
ON_CPU = Path(__file__).parent / "on_cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all sources and stand-ins."""
    if not sources_on_cpu.has_compiler():
        pytest.skip("there is no g++ that knows C++20")
    return sources_on_cpu.gather(tmp_path_factory, ampere.sources_for("sm_80"), ON_CPU)


@pytest.fixture
def attend_on_cpu(folder, monkeypatch, poisoned_memory):
    """Out, dq, dk and dv of the Ampere kernels, on CPU tensors."""

    def load_kernel(sources, source, name, shared_bytes, **defines):
        assert shared_bytes <= SHARED_LIMIT
        return sources_on_cpu.load(folder, source, name, shared_bytes, defines)

    monkeypatch.setattr(launch, "load_kernel", load_kernel)

    def attend_on_cpu(
        q, k, v, grad_out, *, config, is_causal=False, window_size=(-1, -1), boundaries=None, packs=False
    ):
        window = Window.of(is_causal, window_size).narrowed(q.shape[2], k.shape[2])
        params = AttentionParams(window, q.shape[3] ** -0.5, config, "ampere", boundaries)
        saved = ampere.forward(q, k, v, params._replace(pack_for_backward=packs))
        if packs:  # nothing but their shapes and dtypes may be read
            q, k = (stand_in(x, *x.shape[1:3]) for x in (q, k))
        return saved[0], *ampere.backward(grad_out, q, k, v, saved, params)

    return attend_on_cpu


@pytest.fixture
def in_both_orders(folder):
    """in_both_orders(function): its results, which must be the same in whatever order threads run."""

    def set_order(reverse):
        for library in folder.glob("*.so"):
            ctypes.CDLL(str(library)).set_reverse_order(ctypes.c_bool(reverse))

    def in_both_orders(function):
        found = function()
        set_order(True)
        for x, y in zip(found, function(), strict=True):
            assert torch.equal(x.nan_to_num(777.0), y.nan_to_num(777.0))
        return found

    yield in_both_orders
    set_order(False)


@pytest.fixture
def starving(folder):
    """starving(first, count, function): its results if so many threads run only when no other can."""

    def starve(first, count):
        for library in folder.glob("*.so"):
            ctypes.CDLL(str(library)).starve(ctypes.c_uint(first), ctypes.c_uint(count))

    def starving(first, count, function):
        starve(first, count)
        try:
            return function()
        finally:
            starve(0, 0)

    return starving


CASES = {
    "default, packed": (DEFAULT_CONFIG, 64, True, [1, 64, 65, 0, 127, 2]),
    "consistent": (SageConfig.consistent(), 40, True, None),
    "strictly causal": (SageConfig.strictly_causal(), 64, True, None),
    "paper, packed": (SageConfig.paper(), 64, True, [1, 64, 65, 0, 130, 2]),
    "accurate, packed": (SageConfig.accurate(), 64, True, [1, 64, 65, 0, 70, 2]),
    "accurate, 128 queries": (replace(SageConfig.accurate(), block_q=128), 64, True, [130, 3]),
    "default, few channels": (DEFAULT_CONFIG, 24, True, [70, 3]),
    "default, many channels": (DEFAULT_CONFIG, 136, True, [65, 6]),
    "smooth_v, unsigned_p": (SageConfig(smooth_v=True, unsigned_p=True), 128, False, None),
}


@pytest.mark.parametrize(("config", "head_dim", "is_causal", "documents"), CASES.values(), ids=CASES.keys())
def test_they_compute_what_the_reference_does(
    attend_on_cpu, in_both_orders, draw, config, head_dim, is_causal, documents
):
    boundaries = None if documents is None else torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    tokens = 310 if documents is None else sum(documents)
    inputs = draw(tokens, batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    settings = {"is_causal": is_causal, "config": config, "boundaries": boundaries}
    found = in_both_orders(lambda: attend_on_cpu(*inputs, **settings))
    packed_once = attend_on_cpu(*inputs, packs=True, **settings)
    assert all(torch.equal(x, y) for x, y in zip(packed_once, found, strict=True))
    options = {"is_causal": is_causal, "config": config, "cu_seqlens": boundaries, "enable_gqa": True}
    wanted = reference.attention(*inputs, **options)
    for name, x in zip(NAMES, found, strict=True):
        assert relative_l2(x, getattr(wanted, name)) < 4e-3, name


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("config", [DEFAULT_CONFIG, SageConfig.consistent()], ids=["default", "consistent"])
def test_strides_do_not_matter(attend_on_cpu, draw, view, config):
    """V and dO are read where they are, or copied if 8 channels cannot be read at once."""
    q, k, v, grad_out = draw(70, batch=2, heads=2, kv_heads=1, head_dim=40, dtype=torch.bfloat16)
    wanted = attend_on_cpu(q, k, v, grad_out, config=config, is_causal=True)
    found = attend_on_cpu(q, k, view(v), view(grad_out), config=config, is_causal=True)
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize(("n_q", "n_kv"), [(1, 1), (65, 130), (130, 65)])
def test_lengths(attend_on_cpu, draw, n_q, n_kv):
    inputs = draw(n_q, n_kv, batch=1, heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    found = attend_on_cpu(*inputs, is_causal=True, config=DEFAULT_CONFIG)
    wanted = reference.attention(*inputs, is_causal=True, enable_gqa=True)
    for name, x in zip(NAMES, found, strict=True):
        y = getattr(wanted, name)
        assert relative_l2(x, y) < 8e-3 or (x - y).abs().max() < 1e-5, name


@pytest.mark.parametrize("preset", ["default", "strictly_causal", "paper", "accurate"])
@pytest.mark.parametrize("name", INPUTS)
def test_nan_and_inf_come_out_as_nan_where_the_reference_has_them(attend_on_cpu, draw, name, preset):
    """Token 70 is in the second block of queries, and in the tile of keys that all blocks see."""
    inputs = draw(140, batch=1, heads=1, head_dim=64, dtype=torch.bfloat16)
    poison_one(inputs, name, 70, torch.inf)
    config = PRESETS[preset]
    found = attend_on_cpu(*inputs, is_causal=True, config=config)
    wanted = reference.attention(*inputs, is_causal=True, config=config)
    for result, x in zip(NAMES, found, strict=True):
        assert not x.isinf().any()
        assert torch.equal(x.isnan(), getattr(wanted, result).isnan()), result


def test_later_tokens_change_nothing_that_is_strictly_causal(attend_on_cpu, draw):
    """Not even as NaN, within one tile."""
    inputs = draw(100, batch=1, heads=1, head_dim=64, dtype=torch.bfloat16)
    settings = {"is_causal": True, "config": SageConfig.strictly_causal()}
    out, dq, *_ = attend_on_cpu(*inputs, **settings)
    changed = attend_on_cpu(*(change_after(x, 41, "NaN") for x in inputs), **settings)
    assert torch.equal(changed[0][..., :41, :], out[..., :41, :])
    assert torch.equal(changed[1][..., :41, :], dq[..., :41, :])


TWELVE_WARPS = {
    "default, packed": (DEFAULT_CONFIG, [1, 64, 65, 0, 127, 2], {"is_causal": True}),
    "default, full": (DEFAULT_CONFIG, None, {}),
    "low_bias, a window": (SageConfig.low_bias(), None, {"window_size": (70, 3)}),
    "consistent": (SageConfig.consistent(), None, {"is_causal": True}),
    "strictly causal": (SageConfig.strictly_causal(), None, {"is_causal": True}),
    "paper, packed": (SageConfig.paper(), [1, 64, 65, 0, 130, 2], {"is_causal": True}),
    "paper, full": (SageConfig.paper(), None, {}),
    "paper, a window": (SageConfig.paper(), None, {"window_size": (70, 3)}),
    "paper, scales of rows": (replace(SageConfig.paper(), granularity="row"), None, {"is_causal": True}),
    "strictly causal, 128 × 64": (
        replace(SageConfig.strictly_causal(), block_q=128, block_kv=64), None, {"is_causal": True},
    ),
    "accurate, packed": (SageConfig.accurate(), [1, 64, 65, 0, 130, 2], {"is_causal": True}),
}  # fmt: skip


@pytest.mark.parametrize(("config", "documents", "mask"), TWELVE_WARPS.values(), ids=TWELVE_WARPS.keys())
def test_twelve_warps_give_the_same_bits_as_eight(
    attend_on_cpu, starving, draw, monkeypatch, config, documents, mask
):
    """Whichever warps are late."""
    tile, s_16bit = config.tile(64), not config.is_int8("s_bwd")
    source = shapes.backward_source(tile, 64, s_16bit=s_16bit)
    assert source == ("backward_dq_warps" if tile[1] == 128 else "backward_64_keys_dq_warps")
    boundaries = None if documents is None else torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    tokens = 330 if documents is None else sum(documents)
    inputs = draw(tokens, batch=1, heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    settings = {"config": config, "boundaries": boundaries, **mask}
    found = [attend_on_cpu(*inputs, **settings)]
    for first, count in ((0, 32), (128, 128), (256, 32), (256, 128)):
        found.append(starving(first, count, lambda: attend_on_cpu(*inputs, **settings)))
    monkeypatch.setattr(shapes, "DQ_WARP_HEAD_DIMS", ())
    monkeypatch.setattr(shapes, "DQ_WARP_HEAD_DIMS_OF_64_KEYS", ())
    wanted = attend_on_cpu(*inputs, **settings)
    for results in found:
        assert all(map(torch.equal, results, wanted))


FORWARDS = {
    "default": (SageConfig(), 128, None, {}),
    "default, packed": (SageConfig(), 64, [1, 64, 65, 0, 130, 2, 300], {"is_causal": True}),
    "default, a window": (SageConfig(), 64, None, {"window_size": (140, 3)}),
    "P in 16 bits": (SageConfig.consistent(), 128, None, {"is_causal": True}),
    "strictly causal": (SageConfig.strictly_causal(), 64, None, {"is_causal": True}),
    "paper": (SageConfig.paper(), 128, None, {"is_causal": True}),
}  # fmt: skip


@pytest.mark.parametrize(("config", "head_dim", "documents", "mask"), FORWARDS.values(), ids=FORWARDS.keys())
def test_the_groups_of_the_forward_take_turns(
    attend_on_cpu, in_both_orders, starving, draw, config, head_dim, documents, mask
):
    """Whichever warps are late, the second group or the one that copies."""
    boundaries = None if documents is None else torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    tokens = 700 if documents is None else sum(documents)
    inputs = draw(tokens, batch=1, heads=1, kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    settings = {"config": config, "boundaries": boundaries, **mask}
    wanted = in_both_orders(lambda: attend_on_cpu(*inputs, **settings))
    for first, count in ((0, 32), (0, 128), (128, 32), (128, 128)):
        found = starving(first, count, lambda: attend_on_cpu(*inputs, **settings))
        assert torch.equal(found[0], wanted[0])


# --- Windows -----------------------------------------------------------------------------------------------

#: (queries, keys, window): whole tiles to skip on either side, of keys and of queries; no limit on one side;
#: queries that see no key, one with only some of its tile, and keys that no query sees.
WINDOWS = (
    (330, 330, (9, 0)),
    (310, 310, (140, 70)),
    (200, 66, (40, -1)),
    (70, 260, (-1, 40)),
    (65, 65, (0, 1)),
)


@pytest.mark.parametrize(("n_q", "n_kv", "window_size"), WINDOWS)
def test_windows(attend_on_cpu, in_both_orders, draw, n_q, n_kv, window_size):
    inputs = draw(n_q, n_kv, batch=1, heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    settings = {"window_size": window_size, "config": DEFAULT_CONFIG}
    found = in_both_orders(lambda: attend_on_cpu(*inputs, **settings))
    wanted = reference.attention(*inputs, **settings, enable_gqa=True)
    for name, x in zip(NAMES, found, strict=True):
        assert relative_l2(x, getattr(wanted, name)) < 4e-3, name
    if window_size[0] >= 0:
        assert not found[0][:, :, n_kv + window_size[0] :].any()
        assert not found[1][:, :, n_kv + window_size[0] :].any()


WINDOWED_CASES = {
    "low_bias, packed": (SageConfig.low_bias(), [1, 64, 65, 0, 130, 2]),
    "consistent": (SageConfig.consistent(), None),
    "strictly causal": (SageConfig.strictly_causal(), None),
}


@pytest.mark.parametrize(("config", "documents"), WINDOWED_CASES.values(), ids=WINDOWED_CASES.keys())
def test_windows_with_other_settings(attend_on_cpu, draw, config, documents):
    boundaries = None if documents is None else torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    tokens = 150 if documents is None else sum(documents)
    inputs = draw(tokens, batch=1, heads=1, head_dim=64, dtype=torch.bfloat16)
    found = attend_on_cpu(*inputs, window_size=(70, 3), config=config, boundaries=boundaries)
    wanted = reference.attention(*inputs, window_size=(70, 3), config=config, cu_seqlens=boundaries)
    for name, x in zip(NAMES, found, strict=True):
        assert relative_l2(x, getattr(wanted, name)) < 4e-3, name


@pytest.mark.parametrize("config", [DEFAULT_CONFIG, SageConfig.strictly_causal()], ids=["default", "strict"])
@pytest.mark.parametrize("name", INPUTS)
def test_nan_with_a_window_comes_out_where_the_reference_has_it(attend_on_cpu, draw, name, config):
    """Token 70 is in a tile of keys that the last block of queries does not see."""
    inputs = draw(200, batch=1, heads=1, head_dim=64, dtype=torch.bfloat16)
    poison_one(inputs, name, 70, torch.nan)
    found = attend_on_cpu(*inputs, window_size=(20, 5), config=config)
    wanted = reference.attention(*inputs, window_size=(20, 5), config=config)
    for result, x in zip(NAMES, found, strict=True):
        are_nan = getattr(wanted, result).isnan()
        if config == DEFAULT_CONFIG and result in ("dk", "dv"):
            assert not (x.isnan() & ~are_nan).any(), result  # hidden P is 0 here, there exp(-inf - NaN)
        else:
            assert torch.equal(x.isnan(), are_nan), result


def test_without_a_window_the_limits_are_not_read(attend_on_cpu, draw):
    """Also with one that hides nothing, which may be too large for the arithmetic of kernels."""
    inputs = draw(70, batch=1, heads=1, head_dim=64, dtype=torch.bfloat16)
    plain = attend_on_cpu(*inputs, is_causal=True, config=DEFAULT_CONFIG)
    for window_size in ((-1, 0), (2**40, 2**40)):
        found = attend_on_cpu(*inputs, is_causal=True, window_size=window_size, config=DEFAULT_CONFIG)
        assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("boundaries", [None, (0, 70, 70, 150)], ids=["whole", "packed"])
@pytest.mark.parametrize("config", [DEFAULT_CONFIG, SageConfig.paper()], ids=["default", "paper"])
def test_the_mean_of_k_alone_has_the_bits_of_the_forward(attend_on_cpu, draw, config, boundaries):
    q, k, v, _ = draw(150, batch=1, heads=2, kv_heads=1, head_dim=72, dtype=torch.float16)
    boundaries = None if boundaries is None else torch.tensor(boundaries)
    operators.check_mean_of_k("ampere", q, k + 3, v, boundaries, config)
