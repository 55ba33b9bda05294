"""What is worked out once for a signature must hold for every call: addresses, memory, threads, bounds."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from sagebwd import sage_attention
from sagebwd.config import DEFAULT_CONFIG
from sagebwd.interface import AttentionParams
from sagebwd.kernels.cuda import plan
from sagebwd.kernels.cuda.arguments import CTokenTensor
from sagebwd.window import FULL
from tests.inputs import gradients
from tests.sagebwd.kernels.operators import attention
from tests.sagebwd.kernels.sets import emulated_too, only

PARAMS = AttentionParams(FULL, 1.0, DEFAULT_CONFIG)


def words_at(arguments, count):
    """The first 8 bytes of so many arguments, from the array of pointers that a driver gets."""
    pointers = (ctypes.c_void_p * count).from_address(arguments)
    return [ctypes.c_uint64.from_address(x).value for x in pointers]


@pytest.fixture
def recorded():
    """A function of operands with one launch, how often it was called, and what the launches got."""
    record = SimpleNamespace(written=0, launches=[])
    start = lambda *call: record.launches.append(words_at(call[-1], 4))  # noqa: E731
    kernel = SimpleNamespace(name="some_kernel", parameters=None, start=start)

    def write(x, y, params):
        record.written += 1
        scratch, out = x.new_empty((3, 5), dtype=torch.float32), x.new_result()
        x.plan.launch(lambda: kernel, 7, 128, CTokenTensor.of(x), y, scratch, out)
        return [out]

    record.run = lambda *tensors: plan.run(write, PARAMS, tensors)
    return record


def test_a_plan_is_written_once_for_a_signature(recorded):
    x = torch.zeros(2, 3, 5, 8)
    for tensors in ((x, x), (x.clone(), x.clone())):
        (out,) = recorded.run(*tensors)
        assert recorded.launches.pop()[:2] == [t.data_ptr() for t in tensors]
        assert out.stride() == x.stride()
    assert recorded.written == 1
    shifted = torch.zeros(x.numel() + 1)[1:].view_as(x)
    others = ((x[:1], x), (x.mT.contiguous().mT, x), (x, None), (x.half(), x), (shifted, x))
    for i, tensors in enumerate(others):
        recorded.run(*tensors)
        assert recorded.written == 2 + i
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        assert recorded.launches[-1][:2] == addresses


def test_threads_that_run_one_plan_do_not_mix_their_addresses(recorded):
    barrier, seen = threading.Barrier(4), []

    def start(grid, threads, arguments):
        before = words_at(arguments, 1)
        barrier.wait(timeout=10)  # all threads are inside the driver now
        seen.append((before, words_at(arguments, 1)))

    kernel = SimpleNamespace(name="some_kernel", parameters=None, start=start)

    def write(x, params):
        x.plan.launch(lambda: kernel, 1, 32, x)
        return []

    tensors = [torch.zeros(4) for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda x: plan.run(write, PARAMS, (x,)), tensors))
    assert sorted(seen) == sorted(([x.data_ptr()], [x.data_ptr()]) for x in tensors)


def test_many_lengths_take_bounded_memory(recorded):
    plan.plan_of.cache_clear()
    for n in range(1, plan.PLANS + 300):
        x = torch.zeros(1, 1, n, 8)
        recorded.run(x, x)
    assert plan.plan_of.cache_info().currsize == plan.PLANS
    assert plan.backward_of.cache_info().maxsize == plan.PLANS


# --- Attention ---------------------------------------------------------------------------------------------


@emulated_too
@only(lambda kernel_set: kernel_set.is_emulated)
@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
def test_calls_that_share_a_plan_share_nothing_else(kernel_set, draw, is_packed):
    """Other values, other memory and other boundaries, also between a forward and its backward."""
    calls = []
    for seed, boundaries in enumerate(([0, 30, 70], [0, 65, 65])):
        inputs = draw(70, batch=1, heads=2, kv_heads=1, head_dim=64, dtype=torch.float16, seed=seed)
        cu_seqlens = torch.tensor(boundaries) if is_packed else None
        calls.append((attention(kernel_set.name, cu_seqlens=cu_seqlens), inputs))
    wanted = []
    for function, inputs in calls:
        plan.plan_of.cache_clear()
        wanted.append(gradients(function, *inputs))
    leaves = [[x.detach().requires_grad_() for x in inputs[:3]] for _, inputs in calls]
    outs = [function(*own) for (function, _), own in zip(calls, leaves, strict=True)]
    for (_, inputs), own, out, expected in zip(calls, leaves, outs, wanted, strict=True):
        assert all(map(torch.equal, [out, *torch.autograd.grad(out, own, inputs[3])], expected))


def test_what_was_checked_once_is_refused_where_it_is_wrong(draw):
    q, k, v, _ = draw(8, head_dim=16, dtype=torch.float32)
    mixed = (q, k.bfloat16(), v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sage_attention(*mixed)
    with pytest.raises(ValueError, match="cast them to one dtype"):
        sage_attention(*mixed)
    scale = torch.tensor(0.25)
    first = sage_attention(q, k, v, scale=scale)
    scale.fill_(0.5)
    assert torch.equal(sage_attention(q, k, v, scale=scale), sage_attention(q, k, v, scale=0.5))
    assert torch.equal(first, sage_attention(q, k, v, scale=0.25))


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler:UserWarning")
def test_profilers_see_the_operators(draw):
    q, k, v, grad_out = (x.requires_grad_() for x in draw(8, head_dim=16))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sage_attention(q, k, v).backward(grad_out.detach())
    names = {event.key for event in profile.key_averages()}
    assert names >= {"sagebwd::forward", "sagebwd::backward"}
