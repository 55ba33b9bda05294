"""Attention in a module that DDP or FSDP2 wraps: two ranks compute the gradients of one process."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sagebwd import sage_attention
from tests.sagebwd.kernels.sets import kernels_only
from tests.warm import SERVER

RANKS = 2
HEADS = 2
SEQUENCES, TOKENS = 2, 40


class Attention(nn.Module):
    """Projections around a causal attention, as in any transformer."""

    def __init__(self, kernels: str, channels: int) -> None:
        super().__init__()
        self.kernels = kernels
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        out = sage_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True, kernels=self.kernels)
        return self.out(out.to(x.dtype).transpose(1, 2).flatten(2))


def wrapped(module: nn.Module, device: str) -> nn.Module:
    return DistributedDataParallel(module)


def sharded(module: nn.Module, device: str) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh(device, (RANKS,)))


def gradients(kernels, channels, device, sequences, prepare=lambda module, device: module):
    """The gradients by name, of a mean over these sequences of a fixed batch."""
    torch.manual_seed(0)
    model = prepare(Attention(kernels, channels).to(device), device)
    x, target = torch.randn(2, SEQUENCES, TOKENS, channels)[:, sequences].to(device)
    (model(x) - target).square().mean().backward()
    return {
        name.removeprefix("module."): getattr(x.grad, "full_tensor", lambda x=x: x.grad)().cpu()
        for name, x in model.named_parameters()
    }


def run_rank(kernels, channels, device, rank, folder):
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        share = SEQUENCES // RANKS
        own = slice(share * rank, share * (rank + 1))
        model = (kernels, channels, device, own)
        found = {prepare.__name__: gradients(*model, prepare) for prepare in (wrapped, sharded)}
        torch.save(found, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort the process while the interpreter ends


@kernels_only
def test_two_ranks_compute_the_gradients_of_one_process(kernel_set, device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip("there is one GPU")
    model = kernel_set.name, HEADS * kernel_set.head_dims[0], device
    expected = gradients(*model, slice(None))
    ranks = [
        SERVER.Process(target=run_rank, args=(*model, rank, tmp_path), daemon=True) for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    for rank in range(RANKS):
        for way, found in torch.load(tmp_path / f"{rank}.pt").items():
            assert found.keys() == expected.keys()
            for name, x in found.items():
                where = f"{way}, rank {rank}, {name}: "
                torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-6, msg=where.__add__)
