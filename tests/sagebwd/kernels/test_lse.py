"""Parts of an attention, put together by their logsumexp, have right gradients: autograd's, in float64."""

import functools
from itertools import pairwise

import pytest
import torch
import torch.distributed
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from sagebwd import SageConfig, sage_attention
from sagebwd.config import PRESETS, encode
from sagebwd.interface import AttentionParams
from sagebwd.kernels.lse import log_of_base, natural_lse
from sagebwd.metrics import relative_l2
from sagebwd.window import FULL
from tests.inputs import mask_of
from tests.sagebwd.kernels.inputs import GRADIENTS
from tests.sagebwd.kernels.sets import emulated_too, only, over

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def kernels(kernel_set):
    """(kernel set, device)."""
    return kernel_set.name, kernel_set.device


def inputs(n_q, n_kv=None, *, heads=2, kv_heads=1, head_dim=64, value_dim=None, batch=1, dtype=torch.float16):
    """q, k, v, grad_out and a gradient of lse. K has a mean, which is smoothed, and belongs to dQ."""
    generator = torch.Generator().manual_seed(0)
    q, out = ((batch, heads, n_q, size) for size in (head_dim, value_dim or head_dim))
    k, v = ((batch, kv_heads, n_kv or n_q, size) for size in (head_dim, value_dim or head_dim))
    q, k, v, grad_out, mean, grad_lse = (
        torch.randn(shape, generator=generator) for shape in (q, k, v, out, (*k[:2], 1, head_dim), q[:3])
    )
    return [x.to(dtype) for x in (q, k + mean, v, grad_out)] + [grad_lse]


def exact(q, k, v, sinks, seen):
    """Out and lse of attention to one key more, as gpt-oss's own code has it; seen (…, N_q, N_kv): which keys
    a query sees.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v, s.logsumexp(-1)


def gradients(function, leaves, grad_out, grad_lse, *, dtype=None, device="cpu"):
    """Of ⟨out, grad_out⟩ + ⟨lse, grad_lse⟩ where lse is finite; None: without that term."""
    leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in leaves]
    out, lse = function(*leaves)
    loss = 0.0 if grad_out is None else (out.double() * grad_out.double().to(device)).sum()
    if grad_lse is not None:
        loss = loss + (lse.double().masked_fill(lse.isinf(), 0.0) * grad_lse.double().to(device)).sum()
    loss.backward()  # a reentrant checkpoint does not support torch.autograd.grad
    return [x.grad.double().cpu() for x in leaves]


def merged(attend, cut, is_causal, q, k, v):
    """Attention of the keys before and after ``cut``, put together by their lse."""
    out, lse = attend(q, k[:, :, :cut], v[:, :, :cut], is_causal=is_causal)
    first = cut if is_causal else 0  # the first query that sees the second half
    other, other_lse = attend(q[:, :, first:], k[:, :, cut:], v[:, :, cut:], is_causal=is_causal)
    other, other_lse = pad(other, (0, 0, first, 0)), pad(other_lse, (first, 0), value=-torch.inf)
    whole = torch.logaddexp(lse, other_lse)
    parts = (out, lse), (other, other_lse)
    return sum(x * (its - whole).exp().unsqueeze(-1).to(x.dtype) for x, its in parts), whole


def attend(kernels, **settings):
    """sage_attention by this kernel set, with lse."""
    settings = {"return_lse": True, **settings}
    return functools.partial(sage_attention, enable_gqa=True, kernels=kernels[0], **settings)


every_set = only(lambda kernel_set: not kernel_set.part)


def presets_of(kernel_set):
    """Without a GPU: one that rounds O, and one that saves what it rounded away."""
    is_all = kernel_set.is_gpu or kernel_set.is_reference
    few = PRESETS if is_all else ("default", "consistent")
    return [name for name in few if kernel_set.runs(PRESETS[name], 64)]


@emulated_too
@every_set
@over("preset", presets_of)
def test_two_halves_of_the_keys_are_one_attention(kernels, preset):
    """As in ring attention or split KV. They err as much as one call does, whose error is that of INT8."""
    is_causal = preset != "consistent"
    *leaves, grad_out, grad_lse = inputs(150)
    seen = mask_of(150, 150, -1, 0 if is_causal else -1)
    no_sinks = torch.full((2,), -torch.inf)
    loss = {"grad_out": grad_out, "grad_lse": grad_lse}
    wanted = gradients(lambda *x: exact(*x, no_sinks, seen), leaves, **loss, dtype=torch.float64)
    own = attend(kernels, config=PRESETS[preset])
    one = gradients(functools.partial(own, is_causal=is_causal), leaves, **loss, device=kernels[1])
    two = gradients(functools.partial(merged, own, 70, is_causal), leaves, **loss, device=kernels[1])
    for name, x, y, z in zip(GRADIENTS, one, two, wanted, strict=False):
        assert relative_l2(x, z) < (0.06 if preset == "paper" else 0.025), name
        assert relative_l2(y, z) < 1.15 * relative_l2(x, z), name


def documents(n_q, n_kv, cuts, cuts_kv):
    seen = torch.zeros(n_q, n_kv, dtype=torch.bool)
    for row, column in zip(pairwise(cuts), pairwise(cuts_kv), strict=True):
        seen[slice(*row), slice(*column)] = True
    return seen


CUTS, CUTS_KV = [3, 40, 90, 90, 140], [0, 50, 50, 60, 120]
PADDING = torch.tensor([[True] * 150, [False] * 30 + [True] * 100 + [False] * 20])
#: By name: settings, which keys a query sees, and sizes. In all but the first are queries without keys.
MASKS = {
    "causal": (
        {"is_causal": True, "config": PRESETS["strictly_causal"]}, mask_of(150, 90, -1, 0),
        {"n_kv": 90, "value_dim": 56},
    ),
    "window": ({"window_size": (20, 3)}, mask_of(150, 90, 20, 3), {"n_kv": 90, "value_dim": 24}),
    "packed": (
        {"cu_seqlens": torch.tensor(CUTS), "cu_seqlens_kv": torch.tensor(CUTS_KV)}
        | {"config": PRESETS["consistent"]},
        documents(150, 130, CUTS, CUTS_KV), {"n_kv": 130},
    ),
    "padded": (
        {"is_causal": True, "key_padding_mask": PADDING},
        mask_of(150, 150, -1, 0) & (PADDING[:, None, :] & PADDING[:, :, None])[:, None], {"batch": 2},
    ),
}  # fmt: skip
FEW_MASKS = ("window", "packed")


@emulated_too
@every_set
@over("mask", lambda kernel_set: MASKS if kernel_set.is_gpu or kernel_set.is_reference else FEW_MASKS)
def test_sinks(kernels, mask):
    """A key more with the value zero, in the loss as in lse; what hidden tokens hold reaches nothing.

    Queries without keys have it, too. Values are wider or narrower than queries. Of the second key head the
    sinks take nearly all; what is left has the error of lse, too, which normalizing takes out elsewhere.
    """
    settings, seen, sizes = MASKS[mask]
    *leaves, grad_out, grad_lse = inputs(150, **sizes, heads=4, kv_heads=2, head_dim=40)
    leaves.append(torch.tensor([-1.0, 1.0, 12.0, 13.0]))
    loss = {"grad_out": grad_out, "grad_lse": grad_lse}
    wanted = gradients(lambda *x: exact(*x, seen), leaves, **loss, dtype=torch.float64)
    wanted_out, wanted_lse = exact(*(x.double() for x in leaves), seen)
    seen = seen.expand(leaves[0].shape[0], 1, -1, -1)
    for x, axis in zip(leaves, (-1, -2, -2), strict=False):
        x.masked_fill_(~seen.any(axis).unsqueeze(-1), torch.nan if mask in ("packed", "padded") else 1.0)
    settings = {name: x.to(kernels[1]) if isinstance(x, torch.Tensor) else x for name, x in settings.items()}

    def function(q, k, v, sinks):
        return attend(kernels, sinks=sinks, **settings)(q, k, v)

    leaves[3] = leaves[3].double()  # of any dtype
    out, lse = function(*(x.to(kernels[1]) for x in leaves))
    assert out.dtype == leaves[0].dtype
    assert_close_by_key_head("out", out.cpu(), wanted_out, (0.02, 0.025))
    assert relative_l2(lse.cpu(), wanted_lse) < 0.01
    found = gradients(function, leaves, **loss, device=kernels[1])
    for name, x, y in zip((*GRADIENTS, "dsinks"), found, wanted, strict=True):
        assert_close_by_key_head(name, x, y)


def assert_close_by_key_head(name, x, y, bounds=(0.025, 0.03)):
    """Tensors (H,) or (B, heads, …) of two key heads, and a bound for each."""
    parts = (t.chunk(2, 1 if t.dim() > 1 else 0) for t in (x, y))
    for head, (x, y), bound in zip(range(2), zip(*parts, strict=True), bounds, strict=True):
        assert relative_l2(x, y) < bound, (name, head)


@emulated_too
@every_set
def test_out_alone_has_the_gradients_that_it_has_without_lse(kernels):
    """To the bits."""
    *leaves, grad_out, _ = inputs(150)
    function = attend(kernels, is_causal=True)
    loss = (leaves, grad_out, None)
    wanted = gradients(lambda *x: (function(*x, return_lse=False), None), *loss, device=kernels[1])
    for x, y in zip(gradients(function, *loss, device=kernels[1]), wanted, strict=True):
        assert torch.equal(x, y)


@emulated_too
@every_set
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_gives_nan(kernels, poison):
    *leaves, grad_out, grad_lse = inputs(70)
    grad_lse[..., 69] = poison
    dq, dk, dv = gradients(attend(kernels, is_causal=True), leaves, grad_out, grad_lse, device=kernels[1])
    assert dq[..., 69, :].isnan().all()
    assert dk.isnan().any()
    assert not dk.isinf().any()
    assert dv.isfinite().all()


@emulated_too
@every_set
def test_the_lse_of_a_query_without_keys_is_a_constant(kernels):
    """Whatever its gradient: NaN where parts without keys are put together."""
    *leaves, grad_out, grad_lse = (x.to(kernels[1]) for x in inputs(70, 30))
    leaves = [x.requires_grad_() for x in leaves]
    out, lse = attend(kernels, window_size=(5, 0))(*leaves)
    grad_lse = grad_lse.masked_fill(lse.isinf(), torch.nan)
    assert grad_lse.isnan().any()
    gradients = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
    assert all(x.isfinite().all() for x in gradients)


# --- Parts of torch ----------------------------------------------------------------------------------------

WAYS = {
    "compiled": lambda function: torch.compile(function, fullgraph=True, backend="aot_eager"),
    "compiled by inductor": lambda function: torch.compile(function, fullgraph=True),
    "checkpoint": lambda function: functools.partial(checkpoint, function, use_reentrant=False),
    "reentrant checkpoint": lambda function: functools.partial(checkpoint, function, use_reentrant=True),
}


#: Inductor needs minutes of a C++ compiler.
ON_CPU = [(way, "cpu") for way in WAYS if way != "compiled by inductor"]


@pytest.mark.parametrize(
    ("way", "device"), ON_CPU + [pytest.param(way, "cuda", marks=pytest.mark.gpu) for way in WAYS]
)
@pytest.mark.parametrize("config", ["default", "consistent"])
@pytest.mark.parametrize("with_out", [True, False], ids=["out and lse", "lse alone"])
def test_gradients_are_the_same_in_every_way(way, with_out, config, device):
    *leaves, grad_out, grad_lse = inputs(70, dtype=torch.bfloat16)
    loss = (leaves, grad_out if with_out else None, grad_lse)
    function = attend((None, device), is_causal=True, config=PRESETS[config])
    wanted = gradients(function, *loss, device=device)
    torch._dynamo.reset()
    found = gradients(WAYS[way](function), *loss, device=device)
    torch._dynamo.reset()
    for x, y in zip(found, wanted, strict=True):
        assert relative_l2(x, y) < 4e-3  # a step of bf16


def test_the_operator_keeps_its_promises():
    """With a gradient of lse: its schema, and the shapes of fake tensors."""
    q, k, v, grad_out, grad_lse = inputs(40)
    settings = (None, None, -1, 0, 0.125, encode(SageConfig()), "reference")
    saved = torch.ops.sagebwd.forward(q, k, v, *settings)
    arguments = (grad_out, q, k, v, *k.shape[1:3], *saved, *settings, grad_lse)
    torch.library.opcheck(torch.ops.sagebwd.backward.default, arguments)


def test_the_mean_of_a_head_that_is_padded_further():
    """Triton's formula, which CUDA kernels use too: they pad heads of 32 channels to 64."""
    triton_lse = pytest.importorskip("sagebwd.kernels.triton.lse")
    (q, *_), n = inputs(70, head_dim=32), 2
    params = AttentionParams(FULL, 0.2, SageConfig(), "ampere", torch.tensor([0, 30, 70]))
    mean = pad(torch.randn(1, 1, n, 32), (0, 32)).flatten(2)
    lse = torch.randn(1, 2, 70)
    document = (torch.arange(70) >= 30).long()
    found = triton_lse.shifted(q, lse, mean, document, log_of_base(params), params.scale, n)
    torch.testing.assert_close(found, natural_lse(q, lse, mean, params))
