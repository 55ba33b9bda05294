"""One sequence over several ranks by PyTorch's context-parallel ring, against one call.

A backward gets a part of the keys with the output and logsumexp of all of them. Rows of its dS do
not sum to zero. If the smoothing takes that for granted, a strong mean of K spoils dQ. Ulysses calls an
attention as it is: it needs no test but that of its ranks.
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard

from sagebwd import SageConfig, sage_attention
from sagebwd.integrations import torch_flash
from sagebwd.metrics import relative_l2
from sagebwd.reference import exact_attention
from tests import warm
from tests.inputs import gradients

RANKS = 4
N, HEADS, D = 256, 4, 32
NAMES = ("o", "dq", "dk", "dv")


def draw():
    """q, k, v and grad_out; K has a mean of 8 times its standard deviation."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = torch.randn(4, 2, HEADS, N, D, generator=generator)
    return q, k + 8 * torch.randn(2, HEADS, 1, D, generator=generator), v, grad_out


def whole(is_causal):
    """[out, dq, dk, dv] of one INT8 call."""
    return gradients(sage_attention, *draw(), is_causal=is_causal)


def ring(mesh, is_causal):
    """The same by PyTorch's ring. On a GPU scaled_dot_product_attention calls the operator."""
    _cp_options.enable_load_balance = is_causal
    tensors = [x.clone() for x in draw()]
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 4):
        *inputs, grad_out = (x.clone() for x in tensors)
        leaves = [x.requires_grad_() for x in inputs]
        shards = (DTensor.from_local(x, mesh, [Shard(2)]) for x in leaves)
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*shards, 0.0, is_causal)
        out = out.to_local()
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
        return context_parallel_unshard(mesh, found, [2] * 4)


def run_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    override = torch_flash.Override(SageConfig(), "CPU")
    found = {}
    for ranks in (2, 4):
        mesh = init_device_mesh("cpu", (RANKS // ranks, ranks), mesh_dim_names=("data", "context"))
        for is_causal in (False, True):
            found[ranks, is_causal] = ring(mesh["context"], is_causal)
    override.remove()
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort the process while the interpreter ends


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank found."""
    folder = tmp_path_factory.mktemp("rings")
    ranks = [warm.SERVER.Process(target=run_rank, args=(rank, folder)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_err_as_one_call(results, ranks, is_causal):
    exact = exact_attention(*draw(), is_causal=is_causal)
    truth, one = (exact.out, exact.dq, exact.dk, exact.dv), whole(is_causal)
    for of_rank in results:
        for name, x, y, z in zip(NAMES, of_rank[ranks, is_causal], one, truth, strict=True):
            assert relative_l2(x, z) < 1.2 * relative_l2(y, z) < 0.03, name
