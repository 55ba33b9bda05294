"""The Hopper kernels as PyTorch's operators: the same bits, whatever else runs; sizes and memory."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sagebwd import sage_attention
from sagebwd.config import DEFAULT_CONFIG, encode
from sagebwd.metrics import relative_l2
from tests.sagebwd.kernels import test_torch as as_operators
from tests.sagebwd.kernels.hopper.cases import (
    BF16,
    NAMES,
    assert_bit_equal,
    both_head_dims,
    causal_and_full,
)

ignore_warnings_of_torch = as_operators.pytestmark
causal = as_operators.causal

# --- The same bits, whatever else runs ---------------------------------------------------------------------


def assert_equal_lists(found, wanted):
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        assert x.isfinite().all(), name
        assert torch.equal(x, y), name


@both_head_dims
def test_two_hundred_times_the_same_bits(gradients, on_gpu, head_dim):
    """Full, with groups, odd lengths and fp16: what test_gpu.py leaves out."""
    inputs = on_gpu(301, 517, batch=4, heads=8, kv_heads=2, head_dim=head_dim)

    def full(q, k, v):
        return sage_attention(q, k, v, enable_gqa=True)

    first = gradients(full, *inputs)
    differ = torch.zeros(4, dtype=torch.int64, device="cuda")
    for _ in range(200):
        differ += torch.stack([(x != y).sum() for x, y in zip(gradients(full, *inputs), first, strict=True)])
    assert all(x.isfinite().all() for x in first)
    assert differ.tolist() == [0, 0, 0, 0]


@both_head_dims
def test_two_streams_at_once(gradients, on_gpu, head_dim):
    """Packed operands and results of one must not be those of the other."""
    inputs = [on_gpu(300, heads=6, kv_heads=3, head_dim=head_dim, seed=seed) for seed in (0, 1)]
    wanted = [gradients(causal, *x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(20):
        for results, stream, x in zip(found, streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(gradients(causal, *x))
    torch.cuda.synchronize()
    for results, expected in zip(found, wanted, strict=True):
        for result in results:
            assert_equal_lists(result, expected)


def test_threads_at_once(gradients, on_gpu):
    """Each with a stream and a head size of its own, and so other kernels."""
    inputs = {head_dim: on_gpu(200, heads=3, head_dim=head_dim) for head_dim in (64, 80, 128)}
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
            assert_equal_lists(result, wanted[head_dim])


@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
@both_head_dims
def test_cuda_graphs_replay_with_new_inputs(gradients, on_gpu, device, is_packed, head_dim):
    cu_seqlens = torch.tensor([0, 65, 65, 300], device=device) if is_packed else None

    def attend(q, k, v):
        return sage_attention(q, k, v, is_causal=True, enable_gqa=True, cu_seqlens=cu_seqlens)

    inputs, fresh = (on_gpu(300, heads=4, kv_heads=2, head_dim=head_dim, seed=seed) for seed in (0, 1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(attend, *inputs)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(attend, *inputs)
    for x, new in zip(inputs, fresh, strict=True):
        x.copy_(new)
    if is_packed:
        cu_seqlens.copy_(torch.tensor([0, 10, 200, 300]))
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert_equal_lists(captured, gradients(attend, *fresh))


@ignore_warnings_of_torch
@both_head_dims
def test_compiled_equals_eager(gradients, compiled, on_gpu, head_dim):
    def tokens_first(q, k, v):
        """As a model calls it, with a product that rounds nothing."""
        q, k, v = (x.transpose(1, 2) for x in (2 * q, k, v))
        return causal(q, k, v).transpose(1, 2) * 0.5

    q, k, v, grad_out = (x.transpose(1, 2).contiguous() for x in on_gpu(200, heads=2, head_dim=head_dim))
    inputs = 0.5 * q, k, v, grad_out
    found = gradients(compiled(tokens_first, "inductor"), *inputs)
    assert_equal_lists(found, gradients(tokens_first, *inputs))


@ignore_warnings_of_torch
@pytest.mark.parametrize("lay", [torch.clone, as_operators.token_major, as_operators.every_other])
@pytest.mark.parametrize("keep", [False, True])
def test_operators_keep_their_promises(only_hopper, on_gpu, lay, keep):
    """Schemas, aliases, shapes and strides of fake tensors, and autograd under a tracer."""
    q, k, v, grad_out = map(lay, on_gpu(140, heads=2, kv_heads=1, head_dim=64))
    options = (None, None, True, 0.125, encode(DEFAULT_CONFIG), "hopper")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.sagebwd.forward.default, (*leaves, *options, keep))
    saved = torch.ops.sagebwd.forward(q, k, v, *options, keep)
    of_keys = (None, None) if keep else (k, v)
    arguments = (grad_out, q, *of_keys, *k.shape[1:3], *saved, *options)
    torch.library.opcheck(torch.ops.sagebwd.backward.default, arguments)


@ignore_warnings_of_torch
@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
def test_neither_pass_waits_for_the_device(gradients, on_gpu, device, is_packed):
    cu_seqlens = torch.tensor([0, 65, 65, 300], device=device) if is_packed else None

    def attend(q, k, v):
        return sage_attention(q, k, v, cu_seqlens=cu_seqlens)

    inputs = on_gpu(300, head_dim=64)
    wanted = gradients(attend, *inputs)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gradients(attend, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal_lists(found, wanted)


@both_head_dims
def test_the_same_after_memory_was_given_back(gradients, on_gpu, head_dim):
    inputs = on_gpu(300, heads=2, head_dim=head_dim)
    wanted = [x.cpu() for x in gradients(causal, *inputs)]
    inputs = [x.cpu() for x in inputs]
    gc.collect()
    torch.cuda.empty_cache()
    found = gradients(causal, *(x.cuda() for x in inputs))
    assert_equal_lists([x.cpu() for x in found], wanted)


@both_head_dims
def test_another_than_the_current_gpu(gradients, on_gpu, head_dim):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    inputs = on_gpu(300, heads=2, head_dim=head_dim)
    wanted = gradients(causal, *inputs)
    other = torch.device("cuda", 1)
    found = gradients(causal, *(x.to(other) for x in inputs))
    assert torch.cuda.current_device() == 0
    assert all(x.device == other for x in found)
    assert_equal_lists([x.to("cuda:0") for x in found], wanted)


# --- Many work tiles, long sequences, memory ---------------------------------------------------------------


@causal_and_full
@both_head_dims
def test_more_work_tiles_than_ctas(attend, assert_same, attend_reference, on_gpu, is_causal, head_dim):
    """201 heads of 6 blocks: each CTA takes several work tiles. The same bits as a few heads alone."""
    inputs = on_gpu(333, batch=3, heads=67, head_dim=head_dim, dtype=BF16)
    found = attend(*inputs, is_causal=is_causal)
    for batch in range(3):
        for first in range(0, 67, 9):
            part = (slice(batch, batch + 1), slice(first, first + 9))
            few = attend(*(x[part] for x in inputs), is_causal=is_causal)
            assert_bit_equal({name: found[name][part] for name in NAMES}, few)
    last = (slice(-1, None), slice(-2, None))
    expected = attend_reference(*(x[last].cpu() for x in inputs), is_causal=is_causal)
    assert_same({name: found[name][last].cpu() for name in NAMES}, expected)


@causal_and_full
@both_head_dims
def test_groups_of_many_heads(attend, on_gpu, is_causal, head_dim):
    """Each key head meets the queries of 24 heads one after the other; the other key head has no part."""
    inputs = on_gpu(333, heads=48, kv_heads=2, head_dim=head_dim)
    found = attend(*inputs, is_causal=is_causal)
    for n in range(2):
        q, kv = slice(24 * n, 24 * n + 24), slice(n, n + 1)
        half = [x[:, heads] for x, heads in zip(inputs, (q, kv, kv, q), strict=True)]
        part = {name: found[name][:, q if name in ("out", "dq") else kv] for name in NAMES}
        assert_bit_equal(part, attend(*half, is_causal=is_causal))


@both_head_dims
def test_33001_tokens(gradients, on_gpu, head_dim):
    """An odd length in fp16, near torch's attention; in the first and last tokens too."""
    inputs = on_gpu(33001, head_dim=head_dim)
    found = gradients(causal, *inputs)

    def exact(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    for name, x, wanted in zip(NAMES, found, gradients(exact, *inputs), strict=True):
        for part in (slice(None), slice(0, 128), slice(-128, None)):
            assert relative_l2(x[..., part, :], wanted[..., part, :]) < 0.1, (name, part)


@pytest.mark.parametrize(("heads", "head_dim"), [(32, 64), (16, 128)])
def test_memory(gradients, on_gpu, heads, head_dim):
    """On top of inputs and results at most 1.5 times what q, k and v take: packed operands of one pass."""
    inputs = on_gpu(4096, heads=heads, head_dim=head_dim, dtype=BF16)
    gradients(causal, *inputs)  # allocates what stays: compiled kernels
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = gradients(causal, *inputs)
    torch.cuda.synchronize()
    of_results = sum(x.numel() * x.element_size() for x in results)
    extra = torch.cuda.max_memory_allocated() - before - of_results
    assert extra <= 1.5 * sum(x.numel() * x.element_size() for x in inputs[:3])
