"""Kernels are compiled side by side, before they are needed: the backward's, and those that are prepared."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from sagebwd import SageConfig, dispatch, preparation, prepare
from sagebwd.config import DEFAULT_CONFIG, PRESETS
from sagebwd.interface import AttentionParams
from sagebwd.kernels import ops
from sagebwd.window import CAUSAL, FULL, Window
from tests.inputs import gradients

BF16 = torch.bfloat16
#: Those of kernels/sets.py need no GPU either, but a window and documents are no settings of a set.
GPUS = {"hopper": dispatch.ARCHITECTURES["9.0"], "ampere": dispatch.ARCHITECTURES["8.9"]}
#: (kernels, preset, head size) of what they run.
KINDS = [
    (kernels, preset, head_dim)
    for (kernels, gpu), (preset, config), head_dim in product(GPUS.items(), PRESETS.items(), (64, 128, 256))
    if not dispatch.obstacles(kernels, dispatch.Call("cuda", gpu, BF16, head_dim, config))
]


def attend(params):
    return lambda q, k, v: ops.attend(q, k, v, params, with_lse=False)[0]


@pytest.mark.parametrize("boundaries", [None, [0, 30, 200]], ids=["whole", "packed"])
@pytest.mark.parametrize("window", [FULL, CAUSAL, Window(70, 5)], ids=["full", "causal", "window"])
@pytest.mark.parametrize(("kernels", "preset", "head_dim"), KINDS)
def test_all_that_a_forward_and_its_backward_need_begins_with_the_forward(
    events, draw, kernels, preset, head_dim, window, boundaries
):
    """And nothing else, whatever the sizes."""
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries)
    params = AttentionParams(window, 0.5, PRESETS[preset], kernels, cu_seqlens)
    q, k, v, grad_out = draw(200, batch=1, heads=4, kv_heads=2, head_dim=head_dim, dtype=BF16)
    out = attend(params)(*(x.requires_grad_() for x in (q, k, v)))
    of_forward, begun = events.of("loaded"), events.of("begun")
    assert of_forward < begun
    torch.autograd.grad(out, (q, k, v), grad_out.expand_as(out))
    assert events.of("loaded") == events.of("begun") == begun


def test_without_gradients_the_backward_is_not_compiled(events, draw):
    params = AttentionParams(FULL, 0.5, DEFAULT_CONFIG, "hopper")
    attend(params)(*draw(9, batch=1, heads=1, head_dim=64, dtype=BF16)[:3])
    assert events.of("loaded") == events.of("begun")
    assert "dk_dv" not in {source for source, *_ in events.of("begun")}


def test_other_sizes_begin_nothing(events, draw):
    params = AttentionParams(FULL, 0.5, DEFAULT_CONFIG, "hopper")
    for n in (9, 200):
        gradients(attend(params), *draw(n, batch=1, heads=2, head_dim=64, dtype=BF16))
        variants = events.of("begun")
    gradients(attend(params), *draw(33, batch=3, heads=1, head_dim=64, dtype=BF16))
    assert events.of("begun") == variants


def test_what_is_prepared_compiles_at_once(events, monkeypatch):
    monkeypatch.setattr(dispatch, "choose", lambda *_: "hopper")
    monkeypatch.setattr("sagebwd.attention._calls", {})
    monkeypatch.setattr(preparation, "explain", lambda *_, **__: SimpleNamespace(kernels="hopper"))
    queries = [torch.zeros(1, 2, 70, d, dtype=BF16) for d in (64, 128)]
    configs = [SageConfig(), SageConfig.consistent(), SageConfig.paper()]
    with torch.no_grad():
        prepare(*queries, is_causal=True, configs=configs)
    first_wait = [what for what, _ in events].index("loaded")
    assert events.of("begun") == events.of("loaded") == {variant for _, variant in events[:first_wait]}
    macros = [dict(found) for source, _, found in events.of("begun") if source == "forward"]
    assert {x["HEAD_DIM"] for x in macros} == {64, 128}
    assert all(x["IS_CAUSAL"] for x in macros)


def test_to_prepare_where_nothing_is_compiled():
    q = torch.zeros(2, 3, 8)
    prepare(q, window_size=(2, 0), configs=[SageConfig(), SageConfig.paper()])
    assert not q.requires_grad
    for refused in ({"configs": ["paper"]}, {"window_size": (1, 2, 3)}):
        with pytest.raises(ValueError, match=r"config is|window_size is"):
            prepare(q, **refused)
