"""Attention in a module that DDP or FSDP2 wraps: two ranks compute the gradients of one process."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sagebwd import sage_attention

RANKS = 2
HEADS, HEAD_DIM = 2, 32
CHANNELS = HEADS * HEAD_DIM
SEQUENCES, TOKENS = 4, 40


class Attention(nn.Module):
    """Projections around a causal attention, as in any transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS, bias=False)
        self.out = nn.Linear(CHANNELS, CHANNELS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        out = sage_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True, kernels="triton")
        return self.out(out.to(x.dtype).transpose(1, 2).flatten(2))


def wrapped(module: nn.Module, device: str) -> nn.Module:
    return DistributedDataParallel(module)


def sharded(module: nn.Module, device: str) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh(device, (RANKS,)))


def gradients(device, sequences, prepare=lambda module, device: module):
    """The gradients by name, of a mean over these sequences of a fixed batch."""
    torch.manual_seed(0)
    model = prepare(Attention().to(device), device)
    x, target = torch.randn(2, SEQUENCES, TOKENS, CHANNELS)[:, sequences].to(device)
    (model(x) - target).square().mean().backward()
    return {
        name.removeprefix("module."): getattr(x.grad, "full_tensor", lambda x=x: x.grad)().cpu()
        for name, x in model.named_parameters()
    }


def run_rank(device, rank, folder):
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        share = SEQUENCES // RANKS
        own = slice(share * rank, share * (rank + 1))
        found = {prepare.__name__: gradients(device, own, prepare) for prepare in (wrapped, sharded)}
        torch.save(found, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_two_ranks_compute_the_gradients_of_one_process(device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip("there is one GPU")
    expected = gradients(device, slice(None))
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(device, rank, tmp_path), daemon=True) for rank in range(RANKS)
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
