"""The independent truth is diffusers' own "native" backend: same weights, same inputs, same gradients."""

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import sagebwd
from sagebwd import SageConfig

pytest.importorskip("diffusers", reason="diffusers is not installed; pip install -e '.[dev]' (Python 3.11)")

from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)

from sagebwd.integrations.diffusers import check, find_bypasses, register
from sagebwd.metrics import relative_l2
from tests.sagebwd.integrations import diffusers_families as families

EXACT = 1e-5
FAMILIES = families.FAMILIES


def inputs(heads: tuple[int, int] = (4, 4), tokens: tuple[int, int] = (13, 19)) -> list[Tensor]:
    """q, k, v (B, N, H, D) as diffusers lays them out."""
    torch.manual_seed(0)
    return [torch.randn(2, tokens[i > 0], heads[i > 0], 16, requires_grad=True) for i in range(3)]


def compute(backend: str, q: Tensor, k: Tensor, v: Tensor, **arguments: object) -> list[Tensor]:
    """The output and the three gradients."""
    out = dispatch_attention_fn(q, k, v, backend=AttentionBackendName(backend), **arguments)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))]


def assert_as_native(*tensors: Tensor, **arguments: object) -> list[Tensor]:
    """The output and gradients without INT8 are those of diffusers' own backend; returns them."""
    found = compute("sagebwd_exact", *tensors, **arguments)
    for x, truth in zip(found, compute("native", *tensors, **arguments), strict=True):
        assert relative_l2(x, truth) < EXACT
    return found


# The backend


@pytest.mark.parametrize(
    ("heads", "arguments"),
    [((4, 4), {}), ((4, 2), {"enable_gqa": True}), ((4, 4), {"is_causal": True, "scale": 0.4})],
    ids=["cross", "gqa", "causal"],
)
def test_layout_heads_mask_and_scale_are_diffusers(heads, arguments):
    assert_as_native(*inputs(heads), **arguments)


def hidden_keys(dtype: torch.dtype) -> Tensor:
    """(2, 19): keys in the middle and at the end of the second row are hidden, in bool or additive."""
    visible = torch.ones(2, 19, dtype=torch.bool)
    visible[1, 4:7] = visible[1, 15:] = False
    return visible if dtype == torch.bool else torch.where(visible, 0.0, -10_000.0).to(dtype)


def for_heads(mask: Tensor) -> Tensor:
    return mask[:, None, None].repeat(1, 4, 1, 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("expand", [lambda x: x, lambda x: x[:, None, None].expand(2, 4, 13, 19), for_heads])
def test_masks_of_keys(dtype, expand):
    """diffusers' varlen backends keep the first keys of a row, as many as the mask shows, instead."""
    found = assert_as_native(*inputs(), attn_mask=expand(hidden_keys(dtype)))
    assert not found[2][1, 4:7].any()
    assert not found[3][1, 15:].any()


def test_masks_that_differ_between_heads_are_refused():
    mask = for_heads(hidden_keys(torch.bool))
    mask[0, 2, 0, 3] = False
    with pytest.raises(NotImplementedError, match=r"more than hide keys; .*values other than 0"):
        dispatch_attention_fn(*inputs(), backend="sagebwd", attn_mask=mask)
    with pytest.warns(UserWarning, match="a mask that does more than hide keys"):
        found = compute("sagebwd_or_full", *inputs(), attn_mask=mask)
    truth = compute("native", *inputs(), attn_mask=mask)
    assert all(torch.equal(x, y) for x, y in zip(found, truth, strict=True))


def test_values_may_have_another_width():
    q, k, _ = inputs()
    assert_as_native(q, k, torch.randn(2, 19, 4, 24, requires_grad=True))


@pytest.mark.parametrize("name", ["window", "hidden queries", "last queries"])
def test_masks_of_each_query_that_sagebwd_computes(name):
    """The window of ACE-Step, Chroma's mask that hides queries as well, and causal after earlier keys."""
    n_q = 13 if name == "last queries" else 19
    distance = torch.arange(19) - torch.arange(19 - n_q, 19)[:, None]
    shown = hidden_keys(torch.bool)
    mask = {
        "window": (distance >= -3) & (distance <= 3),
        "hidden queries": (shown[:, None] & shown[:, :, None])[:, None],
        "last queries": distance <= 0,
    }[name]
    seen = mask.any(-1).expand(2, 1, n_q).transpose(1, 2)[..., None] if name == "hidden queries" else 1
    mask = torch.where(mask, 0.0, -10_000.0) if name == "hidden queries" else mask
    q, k, v = inputs(tokens=(n_q, 19))
    results = []
    for backend in ("sagebwd_exact", "native"):
        out = seen * dispatch_attention_fn(q, k, v, backend=backend, attn_mask=mask)
        results.append([out, *torch.autograd.grad(out.sin().sum(), (q, k, v))])
    assert all(relative_l2(x, truth) < EXACT for x, truth in zip(*results, strict=True))
    assert [(row.kernels, row.calls) for row in sagebwd.report().rows] == [("reference", 1)]


def test_every_argument_of_diffusers_own_backends_is_named():
    """diffusers drops what a backend does not name, in silence."""
    registry = _AttentionBackendRegistry._supported_arg_names
    own = [names for backend, names in registry.items() if not backend.value.startswith("sagebwd")]
    assert set().union(*own) <= registry[AttentionBackendName("sagebwd")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout_p": 0.1}, r"does not compute attention dropout \(0.1\); set it to 0"),
        ({"parallel_config": object()}, "does not compute context parallelism"),
        ({"attention_kwargs": {"window_size": (2, 2)}}, "does not compute a window that is not in the mask"),
        ({"attention_kwargs": {"softcap": 30.0}}, "does not compute soft-capping"),
        ({"attention_kwargs": {"return_attn_probs": True}}, "does not compute the weights of the attention"),
        ({"attn_mask": torch.eye(13, 19, dtype=torch.bool)}, "hide keys; call .* may differ between heads"),
    ],
)
def test_what_is_not_computed_is_refused(arguments, message):
    with pytest.raises(NotImplementedError, match=message):
        dispatch_attention_fn(*inputs(), backend="sagebwd", **arguments)


def test_it_compiles_without_a_graph_break(compiled):
    attend = functools.partial(dispatch_attention_fn, backend=AttentionBackendName("sagebwd"))
    assert torch.equal(compiled(attend)(*inputs()), attend(*inputs()))


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_compute_it():
    q, k, v = (x.detach().cuda().bfloat16().requires_grad_() for x in inputs())
    mask = hidden_keys(torch.bool).cuda()
    for arguments in ({}, {"attn_mask": mask}, {"attn_mask": for_heads(mask)}):
        out = dispatch_attention_fn(q, k, v, backend="sagebwd", **arguments)
        truth = dispatch_attention_fn(q.float(), k.float(), v.float(), backend="native", **arguments)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        true_gradients = torch.autograd.grad(truth.sum(), (q, k, v))
        for x, y in zip((out.detach(), *gradients), (truth.detach(), *true_gradients), strict=True):
            assert relative_l2(x.float(), y.float()) < 0.1
    assert "reference" not in {row.kernels for row in sagebwd.report().rows}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flash",), "'flash' is a backend of diffusers"),
        (("SageBwd",), "take one of lower-case letters"),
        (("sagebwd", None), "config is a NoneType"),
        (("sagebwd", SageConfig(), "full"), "fallback is 'full'"),
    ],
)
def test_register_names_the_mistake(arguments, message):
    with pytest.raises(ValueError, match=message):
        register(*arguments)


def test_a_name_takes_new_settings():
    tensors = inputs()
    register("sagebwd_again")
    quantized = compute("sagebwd_again", *tensors)[0]
    register("sagebwd_again", SageConfig(int8_matmuls=()))
    exact = compute("sagebwd_again", *tensors)[0]
    assert torch.equal(quantized, compute("sagebwd", *tensors)[0])
    assert torch.equal(exact, compute("sagebwd_exact", *tensors)[0])


# What would pass it by


def test_a_processor_that_calls_pytorch_itself_is_refused_before_the_first_step():
    model = families.build(FAMILIES["SD 3"])
    message = r"JointAttnProcessor2_0 calls scaled_dot_product_attention itself \(transformer_blocks\.0\.attn"
    for use in (model.set_attention_backend, lambda name: check(model)):
        with pytest.raises(NotImplementedError, match=message) as raised:
            use("SageBwd")  # diffusers takes any case
        assert "torch_flash" in str(raised.value)
        assert "fallback='sdpa'" in str(raised.value)
    with pytest.warns(UserWarning, match="JointAttnProcessor2_0 runs in full precision"):
        model.set_attention_backend("sagebwd_or_full")
    assert sagebwd.report().rows[0].name == "JointAttnProcessor2_0"
    model.set_attention_backend("native")


class ByHand(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return torch.softmax(q @ q.transpose(-2, -1), -1) @ q


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


class FixedBackend:
    def __call__(self, attn: nn.Module, q: Tensor) -> Tensor:
        return dispatch_attention_fn(q, q, q, backend="flex")


class ThroughAMethod:
    def __call__(self, attn: nn.Module, q: Tensor) -> Tensor:
        return self.compute(q)

    def compute(self, q: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, q, q)


class Dispatches:
    def __call__(self, attn: nn.Module, q: Tensor) -> Tensor:
        return dispatch_attention_fn(q, q, q)


class Unknown:
    def __call__(self, attn: nn.Module, q: Tensor) -> Tensor:
        return attn.kernel(q)


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (FixedBackend, "sets its own backend, flex"),
        (ThroughAMethod, "calls scaled_dot_product_attention itself"),
        (Unknown, "computes attention itself"),
        (Dispatches, None),
    ],
)
def test_the_code_of_a_processor_tells(processor, reason):
    layer = nn.Identity()
    layer.processor = processor()
    found = find_bypasses(nn.Sequential(layer, Gate()))
    assert found == ({(processor.__name__, reason): ["0"]} if reason else {})


def test_a_layer_without_a_processor_is_found_too():
    found = find_bypasses(nn.ModuleDict({"a": ByHand(), "b": nn.MultiheadAttention(8, 2), "c": Gate()}))
    assert {name: x for (name, _), x in found.items()} == {"ByHand": ["a"], "MultiheadAttention": ["b"]}


def test_a_processor_without_a_backend_of_its_own_is_named():
    model = families.build(FAMILIES["Wan"])
    processor = Dispatches()
    for block in model.blocks:
        block.attn1.processor = processor
    with pytest.warns(UserWarning, match="Dispatches of WanTransformer3DModel take the backend that any"):
        model.set_attention_backend("sagebwd")
    with warnings.catch_warnings():
        model.set_attention_backend("native")
