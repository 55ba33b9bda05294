"""Kernels under a mask that hides keys: the same bits as each sequence's visible tokens alone."""

from __future__ import annotations

import pytest
import torch

from sagebwd import sage_attention
from tests.sagebwd.kernels.inputs import NAMES
from tests.sagebwd.kernels.sets import on_gpu

VISIBLE = ([*range(2, 40), 55], range(60))


def test_hidden_tokens_influence_nothing(sample, kernels):
    """Causal, so that they are hidden as queries, too; holes and padding hold NaN."""
    inputs = sample(70, batch=2)
    mask = torch.zeros(2, 70, dtype=torch.bool)
    for row, tokens in enumerate(VISIBLE):
        mask[row, [*tokens]] = True
    poisoned = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs]
    found = kernels(*poisoned, key_padding_mask=mask, is_causal=True)
    for row, tokens in enumerate(VISIBLE):
        alone = kernels(*(x[row : row + 1, :, [*tokens]] for x in inputs), is_causal=True)
        for name in NAMES:
            assert torch.equal(found[name][row : row + 1, :, [*tokens]], alone[name]), name
            assert not found[name][row].mT[..., ~mask[row]].any(), name


@on_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_a_mask_never_waits_for_the_device(sample_on_device, kernel_set, device):
    """An additive one, whose values decide; eagerly, and replayed as a CUDA graph with another mask."""
    *inputs, grad_out = sample_on_device(300, batch=2, heads=2)
    leaves = [x.requires_grad_() for x in inputs]
    lengths = torch.tensor([[300], [177]], device=device)
    mask = torch.where(torch.arange(300, device=device) < lengths, 0.0, -torch.inf)[:, None, None]

    def step():
        out = sage_attention(*leaves, mask, is_causal=True, kernels=kernel_set.name)
        # Without its graph, whose nodes belong to the stream that they were made on.
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles the kernels
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    mask[0, ..., 41:] = -torch.inf
    graph.replay()
    torch.cuda.synchronize()
    for x, wanted in zip(captured, step(), strict=True):
        assert torch.equal(x, wanted)
        assert not x[0, :, 41:].any()
        assert x[0, :, :41].any()
