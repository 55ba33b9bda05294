"""The kernels as PyTorch operators: torch.compile, autograd, checkpoints, autocast, streams, CUDA graphs."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from sagebwd import SageConfig, interface, sage_attention
from sagebwd.config import encode
from sagebwd.interface import AttentionParams, ForwardResult
from sagebwd.kernels import ops
from sagebwd.kernels.lse import natural_lse, smoothed_lse
from sagebwd.metrics import relative_l2
from sagebwd.window import CAUSAL
from tests.inputs import assert_same, gradients
from tests.sagebwd.kernels import operators
from tests.sagebwd.kernels.inputs import NAMES, every_other, token_major
from tests.sagebwd.kernels.sets import emulated_too, named, on_gpu, one_of_each_kind, over, reference_first

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # torch.compile itself
    # and what these tests ask of torch
    "ignore:Synchronization debug mode is a prototype feature:UserWarning",
    "ignore:There is a performance drop because we have not yet implemented the batching rule:UserWarning",
)

#: Documents of 30, 0 and 35 tokens, and 5 tokens of none.
BOUNDARIES = (0, 30, 30, 65)


def backends(kernel_set):
    return ["aot_eager", "inductor"] if kernel_set.is_gpu else ["aot_eager"]


every_backend = over("backend", backends)
whole_and_packed = pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])


@pytest.fixture
def sample(draw, device, kernel_set):
    """Return q, k, v and grad_out on the device, of 70 tokens, 2 heads of queries and 1 of keys."""

    def sample(tokens=70, *, kv_heads=1, dtype=torch.float16, seed=0):
        head_dim = kernel_set.head_dims[0]
        inputs = draw(tokens, head_dim=head_dim, batch=1, kv_heads=kv_heads, dtype=dtype, seed=seed)
        return [x.to(device) for x in inputs]

    return sample


@pytest.fixture
def boundaries(device):
    return torch.tensor(BOUNDARIES, device=device)


@pytest.fixture
def ways(kernel_set):
    return operators.ways(kernel_set.name)


@pytest.fixture
def causal(ways):
    return ways["function"]


public_and_operator = pytest.mark.parametrize("way", ["function", "operator"])


# The operators' registrations


def registrations(kernel_set):
    """lay, packed, config, packs: the layout, whether there are documents, whether K and V are packed."""
    smooth_q = SageConfig(smooth_q=True, int8_matmuls=("dq",), compensate_o=True)
    compensating = SageConfig.consistent() if kernel_set.is_cuda else smooth_q
    cases = {
        "contiguous": (torch.clone, False, SageConfig()),
        "packed, token-major": (token_major, True, compensating),
        "every_other": (every_other, False, SageConfig.strictly_causal()),
        "one channel": (one_channel, False, SageConfig()),
    }
    few = {"triton-cpu": ["packed, token-major"], "hopper-cpu": ["every_other", "packed, token-major"]}
    few["ampere-cpu"] = ["one channel", "packed, token-major"]
    cases = {name: cases[name] for name in few.get(str(kernel_set), cases)}
    if kernel_set.name == "ampere":  # which pads heads of 32 channels to 64
        cases["half of the channels"] = (half_of_the_channels, True, SageConfig())
    packs = [False] if not kernel_set.is_cuda else [True] if kernel_set.is_emulated else [False, True]
    return named({f"{name}-{x}": (*case, x) for name, case in cases.items() for x in packs})


def one_channel(x):
    """Expanded to all channels."""
    return x[..., :1].expand_as(x)


def half_of_the_channels(x):
    return x[..., : x.shape[-1] // 2].contiguous()


@emulated_too
@pytest.mark.usefixtures("poisoned_memory")  # or blocks that hold no document differ from call to call
@over("lay, packed, config, packs", registrations)
def test_operators_keep_their_promises(sample, boundaries, kernel_set, lay, packed, config, packs):
    """Schemas, aliases, shapes and strides of fake tensors, and autograd under a tracer."""
    q, k, v, grad_out = map(lay, sample(70 if packed else 140 if kernel_set.is_gpu else 40, kv_heads=2))
    scale = q.shape[-1] ** -0.5
    window = (-1, 0) if packed else (9, 3)
    settings = (boundaries if packed else None, None, *window, scale, encode(config), kernel_set.name)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.sagebwd.forward.default, (*leaves, *settings, packs))
    saved = torch.ops.sagebwd.forward(q, k, v, *settings, packs)
    inputs = q, k, v
    if packs:
        inputs = AttentionParams.unflatten(*settings, True).needed_by_backward(*inputs)
    arguments = (grad_out, *inputs, *k.shape[1:3], *saved, *settings)
    torch.library.opcheck(torch.ops.sagebwd.backward.default, arguments)


@reference_first
def test_the_backward_refuses_to_do_without_q_k_and_v_where_nothing_was_packed(sample, kernel_set):
    q, k, v, grad_out = sample(40)
    saved = operators.forward(kernel_set.name, q, k, v)
    settings = (None, None, -1, 0, 0.1, encode(SageConfig()), kernel_set.name)
    for inputs in ((q, None, None), (q, k, None), (q, None, v), (None, k, v)):
        with pytest.raises(ValueError, match="pass q, k and v"):
            torch.ops.sagebwd.backward(grad_out, *inputs, *k.shape[1:3], *saved, *settings)


@emulated_too
@whole_and_packed
def test_the_backward_subtracts_the_mean_that_it_gets(sample, boundaries, kernel_set, packed):
    """Any is right where rows of dS sum to zero: a ring gives all parts of the keys that of one."""
    q, k, v, grad_out = sample()
    k = k + 3
    cu_seqlens = boundaries if packed else None
    params = AttentionParams(CAUSAL, q.shape[3] ** -0.5, SageConfig(), kernel_set.name, cu_seqlens)
    saved = ForwardResult(*torch.ops.sagebwd.forward(q, k, v, *params.flatten()))
    assert saved.k_mean.any()
    assert torch.equal(ops.token_mean(k, params), saved.k_mean)
    k_mean = saved.k_mean + 0.5
    lse = smoothed_lse(q, natural_lse(q, saved.lse, saved.k_mean, params), k_mean, params)
    other = saved._replace(k_mean=k_mean, lse=lse)
    expected, found = (
        torch.ops.sagebwd.backward(grad_out, q, k, v, *k.shape[1:3], *x, *params.flatten())
        for x in (saved, other)
    )
    for x, y in zip(found, expected, strict=True):
        assert 1e-4 < relative_l2(x, y) < 0.03


# torch.compile


@reference_first
@every_backend
def test_compiled_once_for_all_lengths(sample, device, compiled, kernel_set, backend):
    """With packed documents and a config of its own."""
    kernels, config = kernel_set.name, kernel_set.another_config

    def attend(q, k, v, cu_seqlens):
        packed = {"cu_seqlens": cu_seqlens, "kernels": kernels, "config": config, "scale": 0.3}
        return sage_attention(q, k, v, is_causal=True, enable_gqa=True, **packed)

    function = compiled(attend, backend)
    factor = 4 if kernel_set.is_cuda else 1  # a single block of packed keys would be compiled apart
    for tokens, ends in ((70, (0, 70)), (33, (0, 5, 33)), (90, (0, 40, 40, 90))):
        q, k, v, grad_out = sample(factor * tokens, seed=tokens)
        cu_seqlens = factor * torch.tensor(ends, device=device)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        for x in leaves:
            torch._dynamo.mark_dynamic(x, 2)
        torch._dynamo.mark_dynamic(cu_seqlens, 0)
        with torch._dynamo.config.patch(error_on_recompile=True):
            out = function(*leaves, cu_seqlens)
            found = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
        assert_same(found, gradients(attend, q, k, v, grad_out, cu_seqlens))


# Gradients are right or refused, never lost


@one_of_each_kind
@emulated_too
@pytest.mark.parametrize("way", [*operators.ways("reference"), "compiled function", "compiled checkpoint"])
def test_gradients_are_the_same_in_every_way_and_for_every_input(sample, compiled, causal, ways, way):
    inputs = sample(40)
    function = ways[way] if way in ways else compiled(ways[way.removeprefix("compiled ")])
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


@one_of_each_kind
@emulated_too
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("seen", ["forward", "backward", "saved"])
def test_the_operators_may_be_seen_in_one_direction_alone(sample, kernel_set, seen, return_lse):
    """What one direction saved in one tensor for its own kernels, the other takes as the operator's."""
    *qkv, grad_out = sample(40)
    leaves = [x.requires_grad_() for x in qkv]
    function = operators.attention(kernel_set.name, return_lse=return_lse)

    def run(forward, backward):
        with forward:
            results = function(*leaves)
        results = results if return_lse else (results,)
        grads = [grad_out, torch.ones_like(results[-1])][: len(results)]
        with backward:
            return [results[0], *torch.autograd.grad(results, leaves, grads)]

    watched = torch.autograd.profiler.profile()
    if seen == "saved":
        watched = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
    contexts = (nullcontext(), watched) if seen == "backward" else (watched, nullcontext())
    assert_same(run(*contexts), run(nullcontext(), nullcontext()))


def into_a_buffer(x):
    """A contiguous copy, aligned as its elements must be and no more."""
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return buffer[1:].view(x.shape).copy_(x)


@one_of_each_kind
@emulated_too
@pytest.mark.parametrize("pack", [lambda x: x.contiguous(), into_a_buffer], ids=["contiguous", "buffer"])
def test_hooks_may_lay_out_anew_what_is_saved(sample, causal, pack):
    """As ``save_on_cpu(pin_memory=True)`` does, and whoever moves all of it in one buffer."""
    inputs = [*map(token_major, sample(40))]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = gradients(causal, *inputs)
    assert_same(found, gradients(causal, *inputs))


@one_of_each_kind
@emulated_too
@pytest.mark.parametrize("is_watched", [False, True])
def test_memory_is_freed_with_the_output(sample, causal, is_watched):
    """Not at the next garbage collection: nothing that is saved refers to the output."""
    *qkv, _ = sample(40)
    with torch.autograd.profiler.profile() if is_watched else nullcontext():
        out = causal(*(x.requires_grad_() for x in qkv))
    alive = weakref.ref(out)
    gc.disable()
    try:
        del out
        assert alive() is None
    finally:
        gc.enable()


@emulated_too
def test_a_selective_checkpoint_does_not_attend_again(sample, kernel_set, ways, monkeypatch):
    calls = []
    module = interface.kernel_set(kernel_set.name)
    forward = module.forward

    def counted(*x, **settings):
        calls.append(1)
        return forward(*x, **settings)

    vars(counted).update(vars(forward))  # what kernels are compiled ahead by
    monkeypatch.setattr(module, "forward", counted)
    inputs = sample(40)
    gradients(ways["selective checkpoint"], *inputs)
    assert len(calls) == 1
    gradients(ways["checkpoint"], *inputs)
    assert len(calls) == 3


@reference_first
def test_vmap_over_more_than_one(sample, causal):
    inputs, others = sample(40), sample(40, seed=1)
    stacked = [torch.stack(pair) for pair in zip(inputs, others, strict=True)]
    found = gradients(torch.vmap(causal), *stacked)
    expected = zip(gradients(causal, *inputs), gradients(causal, *others), strict=True)
    assert_same(found, [torch.stack(pair) for pair in expected])


@one_of_each_kind
@emulated_too
@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_gradients_in_batches(sample, kernel_set, of):
    *inputs, grad_out = sample()
    leaves = [x.requires_grad_() for x in inputs]
    out, lse = operators.attention(kernel_set.name, return_lse=True)(*leaves)
    results = {"out": [out], "lse": [lse], "both": [out, lse]}[of]
    grad_of = {out: grad_out, lse: grad_out[..., 0].float()}
    grads = [torch.stack([grad_of[x], grad_of[x].flip(2)]) for x in results]
    found = torch.autograd.grad(results, leaves, grads, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(results, leaves, x, retain_graph=True) for x in zip(*grads, strict=True)]
    (dq, *found), (wanted_dq, *wanted) = found, [torch.stack(x) for x in zip(*wanted, strict=True)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    # To dq of lse a kernel adds the mean's term, for a batch PyTorch does: at most the next fp16 number.
    near = {"rtol": 0, "atol": 0} if of == "out" else {"rtol": 2**-10, "atol": 2**-24}
    torch.testing.assert_close(dq, wanted_dq, **near)


@one_of_each_kind
@emulated_too
def test_a_minus_that_torch_has_put_off(sample, kernel_set):
    function = operators.attention(kernel_set.name, return_lse=True)
    q, k, v, _ = sample()
    minus = torch.view_as_complex(torch.stack([q, q], -1)).conj().imag
    assert minus.is_neg()
    (out, lse), (wanted, wanted_lse) = function(minus, k, v), function(-q, k, v)
    assert torch.equal(out, wanted)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-6)  # perhaps of other kernels


@reference_first
def test_a_tracer_before_dispatch_sees_both_operators(sample, causal):
    *inputs, grad_out = sample()
    leaves = [x.requires_grad_() for x in inputs]
    graph = make_fx(lambda *x: torch.autograd.grad(causal(*x), x, grad_out), pre_dispatch=True)(*leaves)
    names = {str(x.target) for x in graph.graph.nodes}
    assert names >= {"sagebwd.forward.default", "sagebwd.backward.default"}


@reference_first
@pytest.mark.parametrize("wanted", ["q", "grad_out"])
@public_and_operator
def test_a_second_derivative_is_refused(sample, ways, way, wanted):
    q, k, v, grad_out = (x.requires_grad_() for x in sample(40))
    (dk,) = torch.autograd.grad(ways[way](q, k, v), k, grad_out, create_graph=True)
    assert dk.requires_grad
    message = "no second derivative; call backward without create_graph=True"
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(dk.sum(), {"q": q, "grad_out": grad_out}[wanted])


@reference_first
@pytest.mark.parametrize("requires_grad", [False, True])
@public_and_operator
def test_forward_mode_is_refused(sample, ways, way, requires_grad):
    q, k, v, _ = (x.requires_grad_(requires_grad) for x in sample(40))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        ways[way](forward_ad.make_dual(q, torch.ones_like(q)), k, v)


OF_TORCH_FUNC = {
    "jvp": (lambda f, q: torch.func.jvp(f, (q,), (torch.ones_like(q),)), "no forward-mode derivative; call"),
    "grad": (lambda f, q: torch.func.grad(f)(q), r"functorch transforms .* call backward or torch.autograd"),
    "hessian": (lambda f, q: torch.func.hessian(f)(q), "functorch transforms"),
}


@reference_first
@pytest.mark.parametrize("name", OF_TORCH_FUNC)
def test_torch_func_is_refused(sample, causal, name):
    transform, words = OF_TORCH_FUNC[name]
    q, k, v, _ = sample(40)
    with pytest.raises(NotImplementedError, match=words):
        transform(lambda q: causal(q, k, v).float().sum(), q)


@emulated_too
def test_a_tensor_that_a_transform_left_wrapped(sample, causal):
    *inputs, grad_out = sample(40)
    wanted = gradients(causal, *inputs, grad_out)
    leaves, kept = [x.requires_grad_() for x in inputs], []
    torch.func.grad(lambda q: kept.append(q) or q.sum())(leaves[0])
    assert torch._C._functorch.is_dead_tensor_wrapper(kept[0])
    out = causal(kept[0], *leaves[1:])
    assert_same([out, *torch.autograd.grad(out, leaves, grad_out)], wanted)


# Autograd's other habits


@reference_first
def test_no_grad_and_inference_mode(sample, causal, kernel_set):
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
    if kernel_set.is_cuda:  # they save Q as they packed it
        assert torch.equal(causal(copies[0], *leaves[1:]), expected)
        return
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        causal(copies[0], *leaves[1:])


@reference_first
def test_backward_twice(sample, causal):
    q, k, v, grad_out = sample(40)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = causal(*leaves)
    first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    second = torch.autograd.grad(out, leaves, grad_out)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, leaves, grad_out)


@reference_first
def test_changes_in_place_are_noticed_or_change_nothing(sample, causal, kernel_set):
    q, k, v, grad_out = sample(40)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    copy = leaves[0].clone()
    out = causal(copy, *leaves[1:])
    copy.mul_(2)
    if kernel_set.is_cuda:  # they have saved Q as they packed it
        wanted = torch.autograd.grad(causal(*leaves), leaves, grad_out)
        found = torch.autograd.grad(out, leaves, grad_out)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward(grad_out)
    out = causal(*leaves)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad_out)


@reference_first
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_autocast_casts_inputs_and_returns_fp32_gradients(
    sample, device, compiled, causal, dtype, is_compiled
):
    *inputs, grad_out = sample(40, dtype=torch.float32)
    rounded = [x.to(dtype) for x in (*inputs, grad_out)]
    function = compiled(causal) if is_compiled else causal
    with torch.autocast(device, dtype=dtype):
        found = gradients(function, *inputs, rounded[-1])
    out, *expected = gradients(causal, *rounded)
    assert_same(found, [out, *(x.float() for x in expected)])


# What only a GPU has


@on_gpu
def test_a_stream_of_its_own(sample, boundaries, kernel_set):
    """The inputs arrive late, on the same stream: a kernel on any other would read what was there before."""
    attend = operators.attention(kernel_set.name, cu_seqlens=boundaries, config=kernel_set.another_config)
    inputs = sample()
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
