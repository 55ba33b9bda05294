"""The sources of the Hopper kernels on a CPU, with stand-ins for the instructions of a GPU.

They must agree with the reference. On a GPU the other files of this folder test more.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product

import pytest
import torch

from sagebwd import SageConfig, dispatch, reference, sage_attention
from sagebwd.config import DEFAULT_CONFIG, encode
from sagebwd.interface import AttentionParams
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.metrics import relative_l2
from sagebwd.window import Window
from tests.sagebwd.kernels import operators
from tests.sagebwd.kernels.inputs import INPUTS, NAMES, assert_nan_where, change_after, poison_one
from tests.sagebwd.kernels.sets import without_int8

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # torch.compile itself
    "ignore:There is a performance drop because we have not yet implemented the batching rule:UserWarning",
)


@pytest.fixture
def attend_on_cpu(emulated):
    """Out, dq, dk and dv of the Hopper kernels, on CPU tensors."""

    def attend_on_cpu(q, k, v, grad_out, *, config, is_causal=False, window_size=(-1, -1), boundaries=None):
        window = Window.of(is_causal, window_size).narrowed(q.shape[2], k.shape[2])
        params = AttentionParams(window, q.shape[3] ** -0.5, config, "hopper", boundaries)
        saved = hopper.forward(q, k, v, params)
        return saved[0], *hopper.backward(grad_out, q, k, v, saved, params)

    return attend_on_cpu


STRICT = SageConfig.strictly_causal()
#: Token scales with all that may go with them.
TOKEN_SCALES = SageConfig(operand_scales="token", smooth_v=True, unsigned_p=True)
PAPER, ACCURATE = SageConfig.paper(), SageConfig.accurate()
S_IN_16_BIT = replace(ACCURATE, unsigned_p=True)
#: Scales of tiles with all that may go with them.
TILE_SCALES = replace(PAPER, smooth_k=False, smooth_v=True, unsigned_p=True)
CASES = {
    "default, packed": (DEFAULT_CONFIG, 64, True, [1, 64, 65, 0, 127, 2]),
    "default": (DEFAULT_CONFIG, 128, False, None),
    "consistent": (SageConfig.consistent(), 64, True, None),
    "consistent, packed": (SageConfig.consistent(), 120, True, [200, 30]),
    "smooth_v, unsigned_p": (SageConfig(smooth_v=True, unsigned_p=True), 64, False, None),
    "strictly causal": (STRICT, 64, True, None),
    "strictly causal, packed": (STRICT, 72, True, [1, 64, 65, 0, 127, 2]),
    "strictly causal, many channels": (STRICT, 128, True, [1, 64, 65, 0, 130, 2]),
    "token scales": (TOKEN_SCALES, 128, False, None),
    "token scales, fewer channels": (TOKEN_SCALES, 40, False, [200, 30]),
    "paper": (PAPER, 64, True, None),
    "paper, packed": (PAPER, 72, True, [1, 64, 65, 0, 130, 2]),
    "tile scales": (TILE_SCALES, 128, False, None),
    "accurate": (ACCURATE, 64, True, None),
    "accurate, packed": (ACCURATE, 72, True, [1, 64, 65, 0, 130, 2]),
    "accurate, many channels": (S_IN_16_BIT, 128, False, None),
    "accurate, many channels, packed": (S_IN_16_BIT, 128, True, [200, 110]),
    "tile scales, fewer channels, packed": (TILE_SCALES, 40, False, [200, 30]),
    "256 channels": (DEFAULT_CONFIG, 256, True, None),
    "low_bias, 200 channels, packed": (SageConfig.low_bias(), 200, True, [1, 64, 65, 0, 127, 2]),
    "consistent, 256 channels, packed": (SageConfig.consistent(), 256, False, [200, 30]),
    "strictly causal, 136 channels": (STRICT, 136, True, None),
    "token scales, 256 channels, packed": (TOKEN_SCALES, 256, True, [1, 64, 65, 0, 130, 2]),
}


@pytest.mark.parametrize(("config", "head_dim", "is_causal", "documents"), CASES.values(), ids=CASES.keys())
def test_they_compute_what_the_reference_does(attend_on_cpu, draw, config, head_dim, is_causal, documents):
    boundaries = None if documents is None else torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    tokens = 230 if documents is None else sum(documents)
    inputs = draw(tokens, batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    found = attend_on_cpu(*inputs, is_causal=is_causal, config=config, boundaries=boundaries)
    options = {"is_causal": is_causal, "config": config, "cu_seqlens": boundaries, "enable_gqa": True}
    wanted = reference.attention(*inputs, **options)
    for name, x in zip(NAMES, found, strict=True):
        assert relative_l2(x, getattr(wanted, name)) < 4e-3, name


def every_other(x):
    """x in memory that holds something else between its channels."""
    return torch.stack([x, x + 1], dim=-1)[..., 0]


def token_major(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


LAID_OUT = {
    "default": DEFAULT_CONFIG,
    "int8_scores": SageConfig.int8_scores(),
    "consistent": SageConfig.consistent(),
    "paper": PAPER,
    "accurate": ACCURATE,
}


@pytest.mark.parametrize("lay", [token_major, every_other])
@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        pytest.param(config, head_dim, id=f"{name}-{head_dim}")
        for name, config in LAID_OUT.items()
        for head_dim in (40, 128, *([200] if name in ("default", "consistent") else []))
    ],
)
def test_layout_changes_nothing(attend_on_cpu, draw, config, lay, head_dim):
    """Of several heads of several sequences, of which kernels read V, dO and Q where they are."""
    inputs = draw(100, batch=2, heads=4, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16)
    found, wanted = (
        attend_on_cpu(*map(f, inputs), is_causal=True, config=config) for f in (lay, torch.clone)
    )
    for name, x, y, like in zip(NAMES, found, wanted, (inputs[0], *inputs[:3]), strict=True):
        assert torch.equal(x, y), name
        assert x.stride() == torch.empty_like(lay(like)).stride(), name


@pytest.mark.parametrize("config", [STRICT, PAPER, ACCURATE], ids=["strictly causal", "paper", "accurate"])
@pytest.mark.parametrize(("n_q", "n_kv"), [(1, 1), (65, 130), (130, 65), (129, 200)])
def test_lengths(attend_on_cpu, draw, n_q, n_kv, config):
    inputs = draw(n_q, n_kv, batch=1, heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    found = attend_on_cpu(*inputs, is_causal=True, config=config)
    wanted = reference.attention(*inputs, is_causal=True, config=config, enable_gqa=True)
    for name, x in zip(NAMES, found, strict=True):
        y = getattr(wanted, name)
        assert relative_l2(x, y) < 8e-3 or (x - y).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    ("config", "head_dim", "is_causal"),
    [
        (DEFAULT_CONFIG, 64, True), (STRICT, 64, True), (TOKEN_SCALES, 128, False), (PAPER, 64, True),
        (ACCURATE, 128, True), (DEFAULT_CONFIG, 256, True),
    ],
    ids=["default", "strictly causal", "token scales", "paper", "accurate", "256 channels"],
)  # fmt: skip
def test_the_order_in_which_threads_run_changes_nothing(
    attend_on_cpu, in_all_orders, draw, config, head_dim, is_causal
):
    """Each warpgroup late: whoever waits too little for it, or gives it back too early, shows."""
    inputs = draw(260, batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    in_all_orders(lambda: attend_on_cpu(*inputs, is_causal=is_causal, config=config))


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [(DEFAULT_CONFIG, 64), (STRICT, 64), (PAPER, 64), (ACCURATE, 64), (ACCURATE, 128), (DEFAULT_CONFIG, 256)],
    ids=["default", "strictly causal", "paper", "accurate", "accurate, many channels", "256 channels"],
)
@pytest.mark.parametrize("name", INPUTS)
def test_nan_and_inf_come_out_as_nan_where_the_reference_has_them(
    attend_on_cpu, draw, name, config, head_dim
):
    """Token 70 is in the second block of queries, and in the tile of keys that all blocks see."""
    inputs = draw(140, batch=1, heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    poison_one(inputs, name, 70, torch.inf)
    found = attend_on_cpu(*inputs, is_causal=True, config=config)
    wanted = reference.attention(*inputs, is_causal=True, config=config)
    assert_nan_where(zip(NAMES, found, strict=True), wanted)


@pytest.mark.parametrize(
    ("window_size", "cut", "later", "head_dim"),
    [
        *product([(-1, -1)], (41, 150), ("huge", "NaN"), (64,)),
        *product([(70, 0)], (150,), ("huge", "NaN"), (64, 256)),
        *product([(-1, -1)], (41, 150), ("NaN",), (128, 256)),
    ],
)
def test_later_tokens_change_nothing_that_is_strictly_causal(
    attend_on_cpu, draw, window_size, cut, later, head_dim
):
    """Not a bit, within one tile and beyond."""
    inputs = draw(200, batch=1, heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    settings = {"is_causal": True, "window_size": window_size, "config": STRICT}
    out, dq, *_ = attend_on_cpu(*inputs, **settings)
    changed = attend_on_cpu(*(change_after(x, cut, later) for x in inputs), **settings)
    assert torch.equal(changed[0][..., :cut, :], out[..., :cut, :])
    assert torch.equal(changed[1][..., :cut, :], dq[..., :cut, :])


# --- Windows -----------------------------------------------------------------------------------------------

WINDOWED_CONFIGS = {
    "INT8 dQ": DEFAULT_CONFIG,
    "16-bit dQ": without_int8("dq"),
    "token scales": STRICT,
    "tile scales": TILE_SCALES,
    "16-bit S": S_IN_16_BIT,
}
#: (queries, keys, window, settings, head size): whole tiles to skip on either side, of keys or queries; no
#: limit on one side; queries that see no key, one with only some of its tile, and keys that no query sees.
WINDOWS = (
    (330, 330, (9, 0), "INT8 dQ", 64),
    (310, 310, (140, 70), "INT8 dQ", 128),
    (310, 310, (140, 70), "16-bit dQ", 64),
    (200, 66, (40, -1), "16-bit dQ", 128),
    (70, 260, (-1, 40), "INT8 dQ", 64),
    (65, 65, (0, 1), "INT8 dQ", 64),
    (330, 330, (9, 0), "token scales", 64),
    (310, 310, (140, 70), "token scales", 128),
    (200, 66, (40, -1), "token scales", 64),
    (70, 260, (-1, 40), "token scales", 128),
    (65, 65, (0, 1), "token scales", 64),
    (330, 330, (9, 0), "tile scales", 64),
    (310, 310, (140, 70), "tile scales", 128),
    (200, 66, (40, -1), "tile scales", 64),
    (70, 260, (-1, 40), "tile scales", 128),
    (65, 65, (0, 1), "tile scales", 64),
    (330, 330, (9, 0), "16-bit S", 64),
    (310, 310, (140, 70), "16-bit S", 128),
    (200, 66, (40, -1), "16-bit S", 64),
    (70, 260, (-1, 40), "16-bit S", 128),
    (310, 310, (140, 70), "INT8 dQ", 256),
    (330, 330, (9, 0), "token scales", 256),
    (200, 66, (40, -1), "INT8 dQ", 136),
    (70, 260, (-1, 40), "INT8 dQ", 256),
)


@pytest.mark.parametrize(("n_q", "n_kv", "window_size", "settings", "head_dim"), WINDOWS)
def test_windows(attend_on_cpu, draw, n_q, n_kv, window_size, settings, head_dim):
    config = WINDOWED_CONFIGS[settings]
    inputs = draw(n_q, n_kv, batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    settings = {"window_size": window_size, "config": config}
    found = attend_on_cpu(*inputs, **settings)
    wanted = reference.attention(*inputs, **settings, enable_gqa=True)
    for name, x in zip(NAMES, found, strict=True):
        assert relative_l2(x, getattr(wanted, name)) < 4e-3, name
    if window_size[0] >= 0:
        assert not found[0][:, :, n_kv + window_size[0] :].any()
        assert not found[1][:, :, n_kv + window_size[0] :].any()


WINDOWED_CASES = {
    "low_bias, packed": (SageConfig.low_bias(), [1, 64, 65, 0, 130, 2]),
    "consistent": (SageConfig.consistent(), None),
    "consistent, 16-bit dQ, packed": (without_int8("o", "dv", "dq", compensate_o=True), [130, 65]),
    "strictly causal, packed": (STRICT, [1, 64, 65, 0, 130, 2]),
    "paper, packed": (PAPER, [1, 64, 65, 0, 130, 2]),
    "accurate, packed": (ACCURATE, [1, 64, 65, 0, 130, 2]),
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


def test_a_document_in_which_a_window_hides_nothing_is_computed_as_without(attend_on_cpu, draw):
    """Bit for bit. What a window cuts is rounded otherwise, which shows in a few of so many values."""
    boundaries = torch.arange(0, 49, 3, dtype=torch.int32)
    inputs = draw(48, batch=1, heads=4, head_dim=64, dtype=torch.float16)
    found, wanted = (
        attend_on_cpu(*inputs, config=DEFAULT_CONFIG, window_size=window, boundaries=boundaries)
        for window in ((11, 2), (-1, -1))
    )
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("config", WINDOWED_CONFIGS.values(), ids=WINDOWED_CONFIGS.keys())
@pytest.mark.parametrize("name", INPUTS)
def test_nan_with_a_window_comes_out_where_the_reference_has_it(attend_on_cpu, draw, name, config):
    """Token 70 is in a tile of keys that the last block of queries does not see."""
    inputs = draw(200, batch=1, heads=1, head_dim=64, dtype=torch.bfloat16)
    poison_one(inputs, name, 70, torch.nan)
    found = attend_on_cpu(*inputs, window_size=(20, 5), config=config)
    wanted = reference.attention(*inputs, window_size=(20, 5), config=config)
    for result, x in zip(NAMES, found, strict=True):
        are_nan = getattr(wanted, result).isnan()
        if config != STRICT and result in ("dk", "dv"):
            assert not (x.isnan() & ~are_nan).any(), result  # hidden P is 0 here, there exp(-inf - NaN)
        else:
            assert torch.equal(x.isnan(), are_nan), result


@pytest.mark.parametrize("documents", [None, [200, 110]], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("backend", "config"),
    [
        (None, SageConfig(smooth_v=True)),
        ("aot_eager", DEFAULT_CONFIG),
        ("inductor", SageConfig.consistent()),
        (None, SageConfig.int8_scores()),
        ("aot_eager", PAPER),
        (None, ACCURATE),
    ],
)
def test_what_is_packed_replaces_q_k_and_v_in_the_backward(
    attend_on_cpu, draw, monkeypatch, tmp_path, backend, config, documents
):
    """Through autograd, also as compiled; the gradients are the same."""
    boundaries = None if documents is None else torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    q, k, v, grad_out = (
        x.transpose(1, 2).contiguous().transpose(1, 2)
        for x in draw(310, batch=1, heads=2, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    )
    options = {"is_causal": True, "config": config}
    wanted = attend_on_cpu(q, k, v, grad_out, boundaries=boundaries, **options)
    monkeypatch.setattr(dispatch, "choose", lambda *arguments, **settings: "hopper")
    saved = []

    def attend(*inputs):
        return sage_attention(*inputs, cu_seqlens=boundaries, **options)

    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # the user's may know older operators
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = (torch.compile(attend, backend=backend, fullgraph=True) if backend else attend)(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
    for name, x, expected in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        assert x.stride() == expected.stride(), name
        assert torch.equal(x, expected), name
    pointers = {x.data_ptr() for x in saved if x is not None}
    assert (q.data_ptr() in pointers) == (not config.is_int8("dk"))
    assert k.data_ptr() not in pointers
    assert (v.data_ptr() in pointers) == (documents is None)  # packed only with documents


@pytest.mark.parametrize("documents", [None, [20, 0, 20]], ids=["whole", "packed"])
@pytest.mark.parametrize(
    "config", [DEFAULT_CONFIG, SageConfig.consistent(), PAPER], ids=["default", "consistent", "paper"]
)
def test_operators_keep_their_promises(attend_on_cpu, draw, monkeypatch, config, documents):
    """As in test_torch.py, with Q and K packed, and V, too, if there are documents."""
    boundaries = None if documents is None else torch.tensor([0, *accumulate(documents)])
    monkeypatch.setattr(dispatch, "choose", lambda *arguments, **settings: "hopper")
    q, k, v, grad_out = draw(40, batch=1, heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    settings = (boundaries, None, -1, 0, 0.125, encode(config), "hopper")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.sagebwd.forward.default, (*leaves, *settings, True))
    saved = torch.ops.sagebwd.forward(q, k, v, *settings, True)
    arguments = (grad_out, None, None, None if documents else v, *k.shape[1:3], *saved, *settings)
    torch.library.opcheck(torch.ops.sagebwd.backward.default, arguments)


@pytest.mark.parametrize("way", operators.WAYS)
def test_gradients_are_the_same_in_every_way(attend_on_cpu, draw, monkeypatch, way):
    """As in test_torch.py: checkpoints, vmap, the bare operator; some save packed K and V, others do not."""
    monkeypatch.setattr(dispatch, "choose", lambda *arguments, **settings: "hopper")
    inputs = draw(40, batch=1, heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    functions = operators.ways("hopper")
    found, wanted = (operators.gradients(functions[name], *inputs) for name in (way, "function"))
    operators.assert_same(found, wanted)


@pytest.mark.parametrize("boundaries", [None, (0, 70, 70, 150)], ids=["whole", "packed"])
@pytest.mark.parametrize("config", [DEFAULT_CONFIG, SageConfig.paper()], ids=["default", "paper"])
def test_the_mean_of_k_alone_has_the_bits_of_the_forward(attend_on_cpu, draw, config, boundaries):
    q, k, v, _ = draw(150, batch=1, heads=2, kv_heads=1, head_dim=72, dtype=torch.float16)
    boundaries = None if boundaries is None else torch.tensor(boundaries)
    operators.check_mean_of_k("hopper", q, k + 3, v, boundaries, config)
