"""The sources of the Hopper kernels on a CPU, with stand-ins for the instructions of a GPU.

They must agree with the reference. On a GPU the other files of this folder test more.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from sagebwd import SageConfig, dispatch, reference, sage_attention
from sagebwd.config import DEFAULT_CONFIG, encode
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.kernels.layout import Axis
from sagebwd.metrics import relative_l2
from sagebwd.window import Window
from tests.sagebwd.kernels import operators

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # torch.compile itself
    "ignore:There is a performance drop because we have not yet implemented the batching rule:UserWarning",
)


@pytest.fixture
def attend_on_cpu(emulated):
    """Out, dq, dk and dv of the Hopper kernels, on CPU tensors."""

    def attend_on_cpu(q, k, v, grad_out, *, is_causal, config, boundaries):
        axes = [Axis.of(x.shape[2], block, boundaries) for x, block in ((q, 64), (k, 128))]
        options = {"window": Window.of(is_causal), "scale": q.shape[3] ** -0.5, "config": config}
        saved = hopper.forward(q, k, v, *axes, pack_kv_for_backward=False, **options)
        return saved[0], *hopper.backward(grad_out, q, k, v, *saved, *axes, **options)

    return attend_on_cpu


CASES = {
    "default, packed": (DEFAULT_CONFIG, 64, True, [1, 64, 65, 0, 127, 2]),
    "default": (DEFAULT_CONFIG, 128, False, None),
    "consistent": (SageConfig.consistent(), 64, True, None),
    "consistent, packed": (SageConfig.consistent(), 120, True, [200, 30]),
    "smooth_v, unsigned_p": (SageConfig(smooth_v=True, unsigned_p=True), 64, False, None),
}


@pytest.mark.parametrize(("config", "head_dim", "is_causal", "documents"), CASES.values(), ids=CASES.keys())
def test_they_compute_what_the_reference_does(attend_on_cpu, draw, config, head_dim, is_causal, documents):
    boundaries = None if documents is None else torch.tensor([0, *accumulate(documents)], dtype=torch.int32)
    tokens = 310 if documents is None else sum(documents)
    inputs = draw(tokens, batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    found = attend_on_cpu(*inputs, is_causal=is_causal, config=config, boundaries=boundaries)
    options = {"is_causal": is_causal, "config": config, "cu_seqlens": boundaries, "enable_gqa": True}
    wanted = reference.attention(*inputs, **options)
    for name, x in zip(("out", "dq", "dk", "dv"), found, strict=True):
        assert relative_l2(x, getattr(wanted, name)) < 4e-3, name


@pytest.mark.parametrize("window", [Window(9, 0), Window(-1, 3)])
def test_a_window_is_refused_and_never_taken_for_none(draw, window):
    """Also from those who call the operators past the choice of kernels."""
    q, k, v, _ = draw(40, batch=1, heads=1, head_dim=64, dtype=torch.bfloat16)
    settings = (None, None, *window, 0.125, encode(DEFAULT_CONFIG), "hopper")
    with pytest.raises(NotImplementedError, match="the Hopper kernels have no windows, and got"):
        torch.ops.sagebwd.forward(q, k, v, *settings)


@pytest.mark.parametrize("documents", [None, [200, 110]], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("backend", "config"),
    [
        (None, SageConfig(smooth_v=True)),
        ("aot_eager", DEFAULT_CONFIG),
        ("inductor", SageConfig.consistent()),
    ],
)
def test_packed_kv_replaces_k_and_v_in_the_backward(
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
    assert q.data_ptr() in pointers
    assert not {k.data_ptr(), v.data_ptr()} & pointers


@pytest.mark.parametrize("documents", [None, [20, 0, 20]], ids=["whole", "packed"])
@pytest.mark.parametrize("config", [DEFAULT_CONFIG, SageConfig.consistent()], ids=["default", "consistent"])
def test_operators_keep_their_promises(attend_on_cpu, draw, monkeypatch, config, documents):
    """As in test_torch.py, with packed K and V."""
    boundaries = None if documents is None else torch.tensor([0, *accumulate(documents)])
    monkeypatch.setattr(dispatch, "choose", lambda *arguments, **settings: "hopper")
    q, k, v, grad_out = draw(40, batch=1, heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    settings = (boundaries, None, -1, 0, 0.125, encode(config), "hopper")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.sagebwd.forward.default, (*leaves, *settings, True))
    saved = torch.ops.sagebwd.forward(q, k, v, *settings, True)
    arguments = (grad_out, q, None, None, *k.shape[1:3], *saved, *settings)
    torch.library.opcheck(torch.ops.sagebwd.backward.default, arguments)


@pytest.mark.parametrize("way", operators.WAYS)
def test_gradients_are_the_same_in_every_way(attend_on_cpu, draw, monkeypatch, way):
    """As in test_torch.py: checkpoints, vmap, the bare operator; some save packed K and V, others do not."""
    monkeypatch.setattr(dispatch, "choose", lambda *arguments, **settings: "hopper")
    inputs = draw(40, batch=1, heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    functions = operators.ways("hopper")
    found, wanted = (operators.gradients(functions[name], *inputs) for name in (way, "function"))
    operators.assert_same(found, wanted)
