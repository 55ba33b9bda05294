"""The kernels as PyTorch operators: torch.compile, autograd, checkpoints, autocast, streams, CUDA graphs."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from sagebwd import SageConfig, sage_attention
from sagebwd.config import DEFAULT_CONFIG, encode
from sagebwd.kernels.triton import attention as triton_attention
from tests.cli import ROOT

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # torch.compile, of itself
    # and what these tests ask of torch
    "ignore:Synchronization debug mode is a prototype feature:UserWarning",
    "ignore:There is a performance drop because we have not yet implemented the batching rule:UserWarning",
)

SCALE = 32**-0.5
NAMES = ("out", "dq", "dk", "dv")

#: Documents of 30, 0 and 35 tokens, and 5 tokens of none.
BOUNDARIES = (0, 30, 30, 65)

#: The kernel set under test. Tests of another one set it to theirs.
KERNELS = "triton"

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


@pytest.fixture
def sample(draw, device) -> Callable[..., list[torch.Tensor]]:
    """Return q, k, v and grad_out on the device, of 70 tokens, 2 heads of 32 channels and 1 of keys."""

    def sample(tokens=70, *, kv_heads=1, dtype=torch.float16, seed=0):
        inputs = draw(tokens, head_dim=32, batch=1, kv_heads=kv_heads, dtype=dtype, seed=seed)
        return [x.to(device) for x in inputs]

    return sample


@pytest.fixture
def boundaries(device) -> torch.Tensor:
    return torch.tensor(BOUNDARIES, device=device)


@pytest.fixture
def all_memory_is_nan():
    """Torch fills new tensors with NaN when its algorithms must be deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def compiled():
    """Return torch.compile(function, fullgraph=True), by default without code of its own."""
    torch._dynamo.reset()
    yield lambda function, backend="aot_eager": torch.compile(function, fullgraph=True, backend=backend)
    torch._dynamo.reset()


def causal(q, k, v):
    return sage_attention(q, k, v, is_causal=True, enable_gqa=True, kernels=KERNELS)


def operator(q, k, v):
    """The same as :func:`causal`, past the checks."""
    return forward_op(q, k, v)[0]


def forward_op(q, k, v, cu_seqlens=None, is_causal=True, config=DEFAULT_CONFIG):
    scale = q.shape[-1] ** -0.5
    return torch.ops.sagebwd.forward(q, k, v, cu_seqlens, None, is_causal, scale, encode(config), KERNELS)


def maybe_packed(boundaries, packed):
    cu_seqlens = boundaries if packed else None
    return lambda q, k, v: sage_attention(
        q,
        k,
        v,
        is_causal=True,
        enable_gqa=True,
        cu_seqlens=cu_seqlens,
        config=SageConfig(smooth_q=packed),
        kernels=KERNELS,
    )


def gradients(function, q, k, v, grad_out, *others):
    """[out, dq, dk, dv]."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, *others)
    assert out.requires_grad
    out.backward(grad_out)  # a reentrant checkpoint knows no torch.autograd.grad
    return [out.detach(), *(x.grad for x in leaves)]


def assert_same(found, expected):
    for name, x, wanted in zip(NAMES, found, expected, strict=True):
        assert x.dtype == wanted.dtype, name
        assert torch.equal(x, wanted), name


def token_major(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other(x):
    return x.repeat_interleave(2, -1)[..., ::2]


# The operators' registrations


@pytest.mark.parametrize(
    ("lay", "packed", "config"),
    [
        (torch.clone, False, SageConfig()),
        (torch.clone, True, SageConfig.strictly_causal()),
        (token_major, False, SageConfig.paper()),
        (every_other, True, SageConfig(smooth_q=True)),
        (token_major, True, SageConfig(int8_matmuls=("dq",), compensate_o=True)),
    ],
    ids=["contiguous", "packed", "token_major", "every_other", "compensate_o"],
)
def test_operators_keep_their_promises(sample, boundaries, lay, packed, config):
    """Schemas, aliases, shapes and strides of fake tensors, and autograd under a tracer."""
    q, k, v, grad_out = map(lay, sample(40 if not packed else 70))
    settings = (boundaries if packed else None, None, True, SCALE, encode(config), KERNELS)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.sagebwd.forward.default, (*leaves, *settings))
    saved = torch.ops.sagebwd.forward(q, k, v, *settings)
    torch.library.opcheck(
        torch.ops.sagebwd.backward.default, (grad_out, q, k, v, *k.shape[1:3], *saved, *settings)
    )


def test_the_backward_refuses_to_do_without_k_and_v_where_nothing_was_packed(sample):
    q, k, v, grad_out = sample(40)
    saved = forward_op(q, k, v)
    settings = (None, None, True, SCALE, encode(SageConfig()), KERNELS)
    for k_or_none, v_or_none in ((None, None), (k, None), (None, v)):
        with pytest.raises(ValueError, match="pass k and v"):
            torch.ops.sagebwd.backward(grad_out, q, k_or_none, v_or_none, *k.shape[1:3], *saved, *settings)


@pytest.mark.parametrize("lay", [torch.clone, token_major])
def test_results_lie_in_memory_as_the_inputs_do(sample, lay):
    *inputs, grad_out = map(lay, sample(40))
    q, k, v = (x.requires_grad_() for x in inputs)
    out = causal(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
    assert out.stride() == dq.stride() == q.stride()
    assert dk.stride() == dv.stride() == k.stride()


def test_tokens_of_no_document_get_numbers_too(sample, boundaries, all_memory_is_nan):
    q, k, v, _ = sample()
    out, lse, *_ = forward_op(q, k, v, boundaries)
    assert (out[..., BOUNDARIES[-1] :, :] == 0).all()
    assert (lse[..., BOUNDARIES[-1] :] == -torch.inf).all()
    assert lse[..., : BOUNDARIES[-1]].isfinite().all()


def test_tokens_may_lie_far_apart():
    """So far that offsets in one tile take 64 bits. A wrong one ends the process, hence one of its own."""
    code = """
import torch
from sagebwd import sage_attention
tokens, stride = 130, 2**24 + 2**20
memory = torch.empty(4, tokens * stride, dtype=torch.float16)  # the system gives it when it is touched
far = memory.as_strided((4, 1, 1, tokens, 32), (tokens * stride, 1, 1, stride, 1))
far.copy_(torch.randn(4, 1, 1, tokens, 32))
results = []
for x in (far, far.contiguous()):
    *inputs, grad_out = x
    leaves = [x.requires_grad_() for x in inputs]
    out = sage_attention(*leaves, is_causal=True, kernels="triton")
    results.append((out, *torch.autograd.grad(out, leaves, grad_out)))
assert all(torch.equal(x, y) for x, y in zip(*results))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# torch.compile


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [causal, operator])
def test_compiled_equals_eager(sample, compiled, function, backend):
    inputs = sample()
    assert_same(gradients(compiled(function, backend), *inputs), gradients(causal, *inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_with_views_packed_documents_and_a_config_of_its_own(sample, boundaries, compiled, backend):
    def attend(q, k, v, cu_seqlens):
        config = SageConfig(smooth_q=True, operand_scales="token")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = sage_attention(
            q,
            k,
            v,
            is_causal=True,
            enable_gqa=True,
            scale=0.3,
            cu_seqlens=cu_seqlens,
            config=config,
            kernels=KERNELS,
        )
        return out.transpose(1, 2)

    inputs = [x.transpose(1, 2).contiguous() for x in sample()]
    found = gradients(compiled(attend, backend), *inputs, boundaries)
    assert_same(found, gradients(attend, *inputs, boundaries))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_once_for_all_lengths(sample, device, compiled, backend):
    def attend(q, k, v, cu_seqlens):
        packed = {"cu_seqlens": cu_seqlens, "kernels": KERNELS}
        return sage_attention(q, k, v, is_causal=True, enable_gqa=True, **packed)

    function = compiled(attend, backend)
    for tokens, ends in ((70, (0, 70)), (33, (0, 5, 33)), (90, (0, 40, 40, 90))):
        q, k, v, grad_out = sample(tokens, seed=tokens)
        cu_seqlens = torch.tensor(ends, device=device)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        for x in leaves:
            torch._dynamo.mark_dynamic(x, 2)
        torch._dynamo.mark_dynamic(cu_seqlens, 0)
        with torch._dynamo.config.patch(error_on_recompile=True):
            out = function(*leaves, cu_seqlens)
            found = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
        assert_same(found, gradients(attend, q, k, v, grad_out, cu_seqlens))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_under_no_grad(sample, compiled, backend):
    q, k, v, _ = sample()
    with torch.no_grad():
        assert torch.equal(compiled(causal, backend)(q, k, v), causal(q, k, v))


# Gradients are right or refused, never lost


SAVE_OUTPUTS = [torch.ops.sagebwd.forward.default]


def checkpointed(function, **settings):
    return lambda *inputs: checkpoint(function, *inputs, **settings)


#: Ways to call attention that must all give the gradients of a plain call.
WAYS = {
    "function": causal,
    "operator": operator,
    "checkpoint": checkpointed(causal, use_reentrant=False),
    "reentrant checkpoint": checkpointed(causal, use_reentrant=True),
    "selective checkpoint": checkpointed(
        causal,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(SAVE_OUTPUTS),
    ),
    "checkpointed operator": checkpointed(operator, use_reentrant=False),
    "vmap": lambda *inputs: torch.vmap(causal)(*(x[None] for x in inputs))[0],
}
COMPILED_WAYS = {f"compiled {name}": WAYS[name] for name in ("function", "operator", "checkpoint")}


@pytest.mark.parametrize("way", [*WAYS, *COMPILED_WAYS])
def test_gradients_are_the_same_in_every_way_and_for_every_input(sample, compiled, way):
    inputs = sample(40)
    function = WAYS[way] if way in WAYS else compiled(COMPILED_WAYS[way])
    expected = gradients(causal, *inputs)
    assert_same(gradients(function, *inputs), expected)
    *tensors, grad_out = inputs
    for number, wanted in enumerate(expected[1:]):
        arguments = [x.detach() for x in tensors]
        leaf = arguments[number].requires_grad_()
        out = function(*arguments)
        assert out.requires_grad, NAMES[number + 1]
        out.backward(grad_out)
        assert torch.equal(leaf.grad, wanted), NAMES[number + 1]


def test_a_selective_checkpoint_does_not_attend_again(sample, monkeypatch):
    calls = []
    forward = triton_attention.forward
    monkeypatch.setattr(
        triton_attention, "forward", lambda *x, **settings: calls.append(1) or forward(*x, **settings)
    )
    inputs = sample(40)
    gradients(WAYS["selective checkpoint"], *inputs)
    assert len(calls) == 1
    gradients(WAYS["checkpoint"], *inputs)
    assert len(calls) == 3


def test_vmap_over_more_than_one(sample):
    inputs, others = sample(40), sample(40, seed=1)
    stacked = [torch.stack(pair) for pair in zip(inputs, others, strict=True)]
    found = gradients(torch.vmap(causal), *stacked)
    expected = zip(gradients(causal, *inputs), gradients(causal, *others), strict=True)
    assert_same(found, [torch.stack(pair) for pair in expected])


def test_the_logsumexp_has_no_gradient(sample):
    """It is a number like any other in what follows; only the path through out is differentiated."""
    q, k, v, _ = sample(40)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse, *_ = forward_op(*leaves)
    assert out.requires_grad
    assert not lse.requires_grad
    factor = lse.half()[..., None].expand_as(out)
    found = torch.autograd.grad((out * factor).sum(), leaves)
    assert_same([out.detach(), *found], gradients(causal, q, k, v, factor))


@pytest.mark.parametrize("wanted", ["q", "grad_out"])
@pytest.mark.parametrize("function", [causal, operator])
def test_a_second_derivative_is_refused(sample, function, wanted):
    q, k, v, grad_out = (x.requires_grad_() for x in sample(40))
    (dk,) = torch.autograd.grad(function(q, k, v), k, grad_out, create_graph=True)
    assert dk.requires_grad
    message = "no second derivative; call backward without create_graph=True"
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(dk.sum(), {"q": q, "grad_out": grad_out}[wanted])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("function", [causal, operator])
def test_forward_mode_is_refused(sample, function, requires_grad):
    q, k, v, _ = (x.requires_grad_(requires_grad) for x in sample(40))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        function(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_forward_mode_through_torch_func_is_refused(sample, number):
    *inputs, _ = sample(40)

    def attend(x):
        return causal(*inputs[:number], x, *inputs[number + 1 :])

    with pytest.raises(NotImplementedError, match="no forward-mode derivative; call backward, or use torch"):
        torch.func.jvp(attend, (inputs[number],), (torch.ones_like(inputs[number]),))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_torch_func_is_right_or_refused(sample, transform):
    q, k, v, _ = sample(40)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        transform(lambda q: causal(q, k, v).float().sum())(q)


# Autograd's other habits


def test_no_grad_and_inference_mode(sample):
    q, k, v, _ = sample(40)
    expected = causal(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = causal(*leaves)
        assert not out.requires_grad
        assert out.is_inference() == (mode is torch.inference_mode)
        assert torch.equal(out, expected)
    with torch.inference_mode():
        copies = [x.clone() for x in (q, k, v)]
    assert torch.equal(causal(*copies), expected)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        causal(copies[0], *leaves[1:])


def test_backward_twice(sample):
    q, k, v, grad_out = sample(40)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = causal(*leaves)
    first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    second = torch.autograd.grad(out, leaves, grad_out)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, leaves, grad_out)


def test_gradients_accumulate(sample):
    q, k, v, grad_out = sample(40)
    expected = gradients(causal, q, k, v, grad_out)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for _ in range(2):
        causal(*leaves).backward(grad_out)
    for x, wanted in zip(leaves, expected[1:], strict=True):
        assert torch.equal(x.grad, 2 * wanted)


def test_one_tensor_as_q_k_and_v(sample):
    q, _, _, grad_out = sample(40)
    _, dq, dk, dv = gradients(causal, q, q, q, grad_out)
    leaf = q.requires_grad_()
    (found,) = torch.autograd.grad(causal(leaf, leaf, leaf), leaf, grad_out)
    torch.testing.assert_close(found.float(), dq.float() + dk.float() + dv.float(), rtol=3e-3, atol=1e-3)


def test_a_gradient_without_memory_of_its_own(sample):
    """The gradient of a sum is one number, expanded."""
    q, k, v, _ = sample(40)
    expected = gradients(causal, q, k, v, torch.ones_like(q))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = causal(*leaves)
    assert_same([out.detach(), *torch.autograd.grad(out.sum(), leaves)], expected)


def test_changes_in_place_are_noticed(sample):
    q, k, v, grad_out = sample(40)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    copy = leaves[0].clone()
    out = causal(copy, *leaves[1:])
    copy.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad_out)
    out = causal(*leaves)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad_out)


def test_saved_tensors_may_wait_elsewhere(sample):
    inputs = sample(40)
    expected = gradients(causal, *inputs)
    with torch.autograd.graph.save_on_cpu():
        assert_same(gradients(causal, *inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_autocast_casts_inputs_and_returns_fp32_gradients(sample, device, compiled, dtype, is_compiled):
    *inputs, grad_out = sample(40, dtype=torch.float32)
    rounded = [x.to(dtype) for x in (*inputs, grad_out)]
    function = compiled(causal) if is_compiled else causal
    with torch.autocast(device, dtype=dtype):
        found = gradients(function, *inputs, rounded[-1])
    out, *expected = gradients(causal, *rounded)
    assert_same(found, [out, *(x.float() for x in expected)])


def test_autocast_takes_a_mix_of_dtypes(sample, device):
    q, k, v, grad_out = sample(40)
    expected = gradients(causal, q, k, v, grad_out)
    with torch.autocast(device, dtype=torch.float16):
        found = gradients(causal, q.float(), k, v.float(), grad_out)
    assert [x.dtype for x in found] == [torch.float16, torch.float32, torch.float16, torch.float32]
    assert_same([x.half() for x in found], expected)


@pytest.mark.parametrize("packed", [False, True])
def test_deterministic_algorithms(sample, boundaries, packed, request):
    attend, inputs = maybe_packed(boundaries, packed), sample()
    expected = gradients(attend, *inputs)
    request.getfixturevalue("all_memory_is_nan")
    found = gradients(attend, *inputs)
    assert_same(found, expected)
    assert all(x.isfinite().all() for x in found)


# What only a GPU has


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.parametrize("device", ["cuda"])(test))


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_neither_pass_waits_for_the_device(sample, boundaries, packed):
    attend, inputs = maybe_packed(boundaries, packed), sample()
    expected = gradients(attend, *inputs)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gradients(attend, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(found, expected)


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_cuda_graphs_replay_with_new_inputs(sample, boundaries, packed):
    attend = maybe_packed(boundaries, packed)
    *inputs, grad_out = sample()
    leaves = [x.requires_grad_() for x in inputs]

    def step():
        out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad_out)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    fresh = sample(seed=1)
    with torch.no_grad():
        for x, new in zip((*leaves, grad_out), fresh, strict=True):
            x.copy_(new)
        boundaries.copy_(torch.tensor((0, 10, 64, 70)))
    graph.replay()
    torch.cuda.synchronize()
    assert_same([x.detach() for x in captured], gradients(attend, *fresh))


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_stream_of_its_own(sample, boundaries, packed):
    """The inputs arrive late, on the same stream: a kernel on any other would read what was there before."""
    attend, inputs = maybe_packed(boundaries, packed), sample()
    expected = gradients(attend, *inputs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(x) for x in inputs]
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        for x, value in zip(late, inputs, strict=True):
            x.copy_(value)
        found = gradients(attend, *late)
    stream.synchronize()
    assert_same(found, expected)


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_another_than_the_current_gpu(sample, boundaries, packed):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    inputs = sample()
    expected = gradients(maybe_packed(boundaries, packed), *inputs)
    assert torch.cuda.current_device() == 0
    other = torch.device("cuda", 1)
    found = gradients(maybe_packed(boundaries.to(other), packed), *(x.to(other) for x in inputs))
    assert torch.cuda.current_device() == 0
    assert all(x.device == other for x in found)
    assert_same([x.to("cuda") for x in found], expected)
    with pytest.raises(ValueError, match="q, k, v are on cuda:0, cuda:1, cuda:1; move them to one device"):
        causal(inputs[0], *(x.to(other) for x in inputs[1:3]))
