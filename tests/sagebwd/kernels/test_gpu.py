"""What only a GPU shows: results that never vary, long sequences, large tensors, memory; `-m gpu`."""

import functools
import gc
import threading

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sagebwd.config import DEFAULT_CONFIG
from sagebwd.kernels.layout import block_count
from sagebwd.metrics import relative_l2
from tests.inputs import assert_same as assert_same_lists
from tests.inputs import gradients
from tests.sagebwd.kernels import operators
from tests.sagebwd.kernels.inputs import NAMES, assert_bit_equal
from tests.sagebwd.kernels.sets import BF16, causal_and_full, every_head_dim, on_gpu

pytestmark = [
    on_gpu,
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # torch.compile itself
        "ignore:Synchronization debug mode is a prototype feature:UserWarning",
    ),
]

GIB = 2**30


@pytest.fixture(autouse=True)
def give_memory_back():
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def causal(kernel_set):
    return operators.attention(kernel_set.name)


def draw_on_gpu(batch, heads, tokens, head_dim, *, dtype=torch.bfloat16, n=4):
    """Gaussian tensors (batch, heads, tokens, head_dim), stored token by token as projections leave them."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, tokens, heads, head_dim)
    return [
        torch.randn(shape, generator=generator, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(n)
    ]


def most_memory(kernel_set, heads, tokens, head_dim, documents=1):
    """Bytes that a forward and a backward pass may take on top of their inputs, by ``extra_memory``.

    ``heads`` of the whole batch. Packed operands and sums consist of whole blocks of each document.

    Results take 4 times what q does. Ampere takes most, in bytes for each element of q at head size 64:
    K and V 3, K by columns 1, Q and dO 3.14 and 2, sums of dQ 4, results 8, logsumexp 0.06. That is 10.66
    times q, in blocks as torch allocates them; 10.75 are allowed. With documents of 1024 tokens it is 11.13;
    11.44 are allowed.
    """
    tile = DEFAULT_CONFIG.tile(head_dim)
    padded_q, padded_kv = (block_count(tokens, block, documents) * block for block in tile)
    extra = kernel_set.extra_memory * (padded_q + 2 * padded_kv)
    return round((4 * tokens + extra) * heads * head_dim * 2)


# --- The same bits, whatever else runs ---------------------------------------------------------------------


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thousand_times_the_same_bits(causal, head_dim, is_busy):
    """Also while another stream takes a part of the GPU, so that CTAs start in another order."""
    inputs = draw_on_gpu(4, 8, 512, head_dim)
    first = gradients(causal, *inputs)
    differ = torch.zeros(4, dtype=torch.int64, device="cuda")
    matrix = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(1000):
        if is_busy:
            with torch.cuda.stream(other):
                torch.mm(matrix, matrix)
        again = gradients(causal, *inputs)
        differ += torch.stack([(x != y).sum() for x, y in zip(again, first, strict=True)])
    torch.cuda.synchronize()
    assert all(x.isfinite().all() for x in first)
    assert differ.tolist() == [0, 0, 0, 0]


def test_threads_at_once(causal, sample_on_device):
    """Each with a stream and a head size of its own, and so other kernels."""
    inputs = {head_dim: sample_on_device(200, heads=3, head_dim=head_dim) for head_dim in (64, 80, 128)}
    wanted = {head_dim: gradients(causal, *x) for head_dim, x in inputs.items()}
    torch.cuda.synchronize()
    found, failed = {head_dim: [] for head_dim in inputs}, []

    def work(head_dim):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found[head_dim] += [gradients(causal, *inputs[head_dim]) for _ in range(20)]
        except Exception as error:  # it would be lost with the thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(head_dim,)) for head_dim in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failed
    for head_dim, results in found.items():
        assert len(results) == 20
        for result in results:
            assert_same_lists(result, wanted[head_dim])


@pytest.fixture(params=["whole", "packed", "masked"])
def kind(request, kernel_set, device):
    """(attention, a tensor that says who sees whom, another such tensor), of 300 tokens in a batch of one.

    The mask is additive: its values decide.
    """
    if request.param == "packed":
        boundaries, others = (torch.tensor(x, device=device) for x in ([0, 65, 65, 300], [0, 10, 200, 300]))
        return operators.attention(kernel_set.name, cu_seqlens=boundaries), boundaries, others
    mask, other = (torch.where(torch.arange(300, device=device) < n, 0.0, -torch.inf) for n in (300, 41))
    if request.param == "masked":
        return operators.attention(kernel_set.name, attn_mask=mask[None, None, None]), mask, other
    return operators.attention(kernel_set.name), mask, mask


@every_head_dim
def test_cuda_graphs_replay_with_new_inputs(sample_on_device, kind, head_dim):
    attend, seen, others_seen = kind
    inputs, fresh = (
        sample_on_device(300, heads=4, kv_heads=2, head_dim=head_dim, seed=seed) for seed in (0, 1)
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(attend, *inputs)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(attend, *inputs)
    for x, new in zip((*inputs, seen), (*fresh, others_seen), strict=True):
        x.copy_(new)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert_same_lists(captured, gradients(attend, *fresh))


def test_neither_pass_waits_for_the_device(sample_on_device, kind):
    inputs = sample_on_device(300, head_dim=64)
    wanted = gradients(kind[0], *inputs)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gradients(kind[0], *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_lists(found, wanted)


@every_head_dim
def test_another_than_the_current_gpu(causal, sample_on_device, head_dim):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    inputs = sample_on_device(300, heads=2, head_dim=head_dim)
    wanted = gradients(causal, *inputs)
    other = torch.device("cuda", 1)
    found = gradients(causal, *(x.to(other) for x in inputs))
    assert torch.cuda.current_device() == 0
    assert all(x.device == other for x in found)
    assert_same_lists([x.to("cuda:0") for x in found], wanted)


# --- Large tensors -----------------------------------------------------------------------------------------


@pytest.fixture
def make_room(kernel_set):
    """make_room(heads, tokens, head_dim): skip where tensors of 2³¹ elements do not fit."""

    def make_room(heads, tokens, head_dim):
        gc.collect()
        torch.cuda.empty_cache()
        of_inputs = 4 * heads * tokens * head_dim * 2
        needed = of_inputs + most_memory(kernel_set, heads, tokens, head_dim)
        free = torch.cuda.mem_get_info()[0]
        if free < needed:
            pytest.skip(f"{free / GIB:.1f} GiB of GPU memory are free, {needed / GIB:.1f} may be needed")

    return make_room


@pytest.mark.parametrize(
    ("batch", "heads", "tokens"),
    [(1, 4224, 4096), (1, 139_264, 130), (2112, 8, 1024)],
    ids=["long", "wide", "many"],
)
def test_the_last_head_of_a_large_tensor(causal, make_room, batch, heads, tokens):
    """The same bits as alone. In the wide tensor one token lies more than 2²⁴ elements from the next.

    Its blocks are half empty: Ampere takes 81 GiB for it, Hopper 64; for the long one 60 and 50.
    """
    make_room(batch * heads, tokens, 128)
    inputs = draw_on_gpu(batch, heads, tokens, 128)
    assert inputs[0].numel() > 2**31
    found = [x[-1:, -1:].clone() for x in gradients(causal, *inputs)]
    last = [x[-1:, -1:].clone() for x in inputs]
    del inputs
    assert_same_lists(found, gradients(causal, *last))


# --- Long sequences, memory --------------------------------------------------------------------------------


@causal_and_full
@pytest.mark.parametrize("head_dim", [64, 128])
def test_65536_tokens(kernel_set, head_dim, is_causal):
    """Near torch's attention, in the last queries and keys too."""
    inputs = draw_on_gpu(1, 1, 65536, head_dim)
    found = gradients(operators.attention(kernel_set.name, is_causal=is_causal), *inputs)
    exact = gradients(functools.partial(scaled_dot_product_attention, is_causal=is_causal), *inputs)
    for name, x, wanted in zip(NAMES, found, exact, strict=True):
        for part in (slice(None), slice(0, 128), slice(-128, None)):
            assert relative_l2(x[..., part, :], wanted[..., part, :]) < 0.1, (name, part)


def peak_memory(function, tokens):
    """Bytes that a forward and backward pass of 2 heads takes on top of its inputs."""
    inputs = draw_on_gpu(1, 2, tokens, 64)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(function, *inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
def test_memory_grows_with_the_tokens_not_with_their_square(kernel_set, is_packed):
    def peak(tokens):
        cu_seqlens = torch.arange(0, tokens + 1, 1024, device="cuda") if is_packed else None
        return peak_memory(operators.attention(kernel_set.name, cu_seqlens=cu_seqlens), tokens)

    peak(1024)  # allocates what stays: compiled kernels, workspaces
    small, large = peak(8192), peak(65536)
    assert large < 8.5 * small
    # P would take 1024 times what q does.
    assert large < most_memory(kernel_set, 2, 65536, 64, documents=64 if is_packed else 1)


@causal_and_full
@every_head_dim
def test_more_work_tiles_than_ctas(
    attend, assert_same, attend_reference, sample_on_device, is_causal, head_dim
):
    """201 heads of 6 blocks: each CTA takes several work tiles. The same bits as a few heads alone."""
    inputs = sample_on_device(333, batch=3, heads=67, head_dim=head_dim, dtype=BF16)
    found = attend(*inputs, is_causal=is_causal)
    for batch in range(3):
        for first in range(0, 67, 9):
            part = (slice(batch, batch + 1), slice(first, first + 9))
            few = attend(*(x[part] for x in inputs), is_causal=is_causal)
            assert_bit_equal({name: found[name][part] for name in NAMES}, few)
    last = (slice(-1, None), slice(-2, None))
    expected = attend_reference(*(x[last].cpu() for x in inputs), is_causal=is_causal)
    assert_same({name: found[name][last].cpu() for name in NAMES}, expected)


# --- What runs ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler:UserWarning")
def test_the_kernels_run_and_nothing_else_that_attends(causal, kernel_set):
    inputs = draw_on_gpu(1, 2, 300, 64)
    gradients(causal, *inputs)  # compiles them
    with operators.Watch() as called:
        gradients(causal, *inputs)
    assert called.names.count("sagebwd::forward") == 1
    assert called.names.count("sagebwd::backward") == 1
    assert not any("mm" in name or "attention" in name for name in called.names)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gradients(causal, *inputs)
        torch.cuda.synchronize()
    kernels = {event.key.lstrip("_") for event in profile.key_averages()}  # Hopper's have names of their own
    assert kernels >= {"forward_kernel", *kernel_set.backward_kernels}
