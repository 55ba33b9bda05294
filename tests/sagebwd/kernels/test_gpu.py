"""What only a GPU shows: results that never vary, long sequences, large tensors, memory; `-m gpu`."""

import gc

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from sagebwd import sage_attention
from sagebwd.metrics import relative_l2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

NAMES = ("out", "dq", "dk", "dv")
GIB = 2**30


@pytest.fixture(autouse=True)
def give_memory_back():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def draw(batch, heads, tokens, head_dim, *, dtype=torch.bfloat16, n=4):
    """Gaussian tensors (batch, heads, tokens, head_dim), stored token by token as projections leave them."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, tokens, heads, head_dim)
    return [
        torch.randn(shape, generator=generator, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(n)
    ]


def attend(q, k, v, grad_out, implementation=sage_attention, **settings):
    """[out, dq, dk, dv]."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = implementation(*leaves, **settings)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def assert_same(found, expected):
    for name, x, wanted in zip(NAMES, found, expected, strict=True):
        assert x.isfinite().all(), name
        assert torch.equal(x, wanted), name


# One result


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thousand_times_the_same_bits(head_dim, is_busy):
    """Also while another stream takes a part of the GPU, so that programs start in another order."""
    inputs = draw(4, 8, 512, head_dim)
    first = attend(*inputs, is_causal=True)
    differ = torch.zeros(4, dtype=torch.int64, device="cuda")
    matrix = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(1000):
        if is_busy:
            with torch.cuda.stream(other):
                torch.mm(matrix, matrix)
        again = attend(*inputs, is_causal=True)
        differ += torch.stack([(x != y).sum() for x, y in zip(again, first, strict=True)])
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for x in first)
    assert differ.tolist() == [0, 0, 0, 0]


# Large tensors


@pytest.fixture
def room():
    """Skip where tensors of 2³¹ elements do not fit."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * GIB:
        pytest.skip("less than 60 GiB of GPU memory are free")


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize(("heads", "tokens"), [(4224, 4096), (139_264, 130)], ids=["long", "wide"])
def test_the_last_of_many_heads(heads, tokens):
    """The same bits as alone. In the wide tensor one token lies more than 2²⁴ elements from the next."""
    inputs = draw(1, heads, tokens, 128)
    assert inputs[0].numel() > 2**31
    found = [x[:, -1:].clone() for x in attend(*inputs, is_causal=True)]
    last = [x[:, -1:].clone() for x in inputs]
    del inputs
    assert_same(found, attend(*last, is_causal=True))


@pytest.mark.usefixtures("room")
def test_the_last_of_many_sequences():
    """Heads before tokens in memory."""
    inputs = [x.transpose(1, 2) for x in draw(2112, 1024, 8, 128)]
    assert inputs[0].is_contiguous()
    assert inputs[0].numel() > 2**31
    found = [x[-1:].clone() for x in attend(*inputs, is_causal=True)]
    last = [x[-1:].clone() for x in inputs]
    del inputs
    assert_same(found, attend(*last, is_causal=True))


# Long sequences


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_65536_tokens(head_dim, is_causal):
    """Near torch's attention, in the last queries and keys too."""
    inputs = draw(1, 1, 65536, head_dim)
    found = attend(*inputs, is_causal=is_causal)
    exact = attend(*inputs, implementation=scaled_dot_product_attention, is_causal=is_causal)
    for name, x, wanted in zip(NAMES, found, exact, strict=True):
        for part in (slice(None), slice(0, 128), slice(-128, None)):
            assert relative_l2(x[..., part, :], wanted[..., part, :]) < 0.1, (name, part)


def peak_memory(tokens, **settings):
    """Bytes that a forward and backward pass of 2 heads takes on top of its inputs."""
    inputs = draw(1, 2, tokens, 64)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(*inputs, **settings)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("packed", [False, True])
def test_memory_grows_with_the_tokens_not_with_their_square(packed):
    def peak(tokens):
        cu_seqlens = torch.arange(0, tokens + 1, 1024, device="cuda") if packed else None
        return peak_memory(tokens, is_causal=True, cu_seqlens=cu_seqlens)

    peak(1024)  # what is kept for good: compiled kernels, workspaces
    small, large = peak(8192), peak(65536)
    assert large < 8.5 * small
    # Out and three gradients take 4 times what q does, INT8 copies about 3 times; P would take 1024 times.
    of_q = 65536 * 2 * 64 * 2
    assert large < 10 * of_q


# What runs


class Operators(TorchDispatchMode):
    """The names of all operators that were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler:UserWarning")
def test_the_public_function_runs_the_kernels():
    inputs = draw(1, 2, 300, 64)
    attend(*inputs, is_causal=True)  # compiles them
    with Operators() as called:
        attend(*inputs, is_causal=True)
    assert called.names.count("sagebwd::forward") == 1
    assert called.names.count("sagebwd::backward") == 1
    assert not any("mm" in name or "attention" in name for name in called.names)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attend(*inputs, is_causal=True)
        torch.cuda.synchronize()
    kernels = {event.key.lstrip("_") for event in profile.key_averages()}  # Hopper's have names of their own
    assert kernels >= {"forward_kernel", "dk_dv_kernel", "dq_kernel"}
