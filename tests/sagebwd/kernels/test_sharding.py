"""DTensors: the batch and the heads are sharded, tokens are gathered. In one process, as rank 0 of 4."""

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sagebwd import SageConfig, sage_attention

WHOLE, BATCH, HEADS, TOKENS = Replicate(), Shard(0), Shard(1), Shard(2)


@pytest.fixture(scope="module")
def mesh():
    """2 × 2 processes, of which only this one exists: collectives return garbage."""
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2))
    torch.distributed.destroy_process_group()


@pytest.fixture
def shard(mesh):
    """shard(x, placements) -> rank 0's part of x as a DTensor."""

    def shard(x, placements):
        part = x
        for placement in placements:
            part = part.chunk(2, placement.dim)[0] if placement.is_shard() else part
        whole = {"shape": x.shape, "stride": x.stride()}
        return DTensor.from_local(part.contiguous(), mesh, placements, run_check=False, **whole)

    return shard


def gradients(leaves, **arguments):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = sage_attention(*leaves, is_causal=True, enable_gqa=True, **arguments)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.mark.parametrize("config", [SageConfig(), SageConfig.consistent()])
@pytest.mark.parametrize(
    "placements", [(WHOLE, WHOLE), (BATCH, HEADS), (WHOLE, HEADS), (HEADS, HEADS), (BATCH, BATCH)]
)
def test_batch_and_heads_are_sharded(draw, shard, placements, config):
    """Each part is attention of that part, and lies as the inputs do."""
    *inputs, _ = draw(20, batch=4, heads=8, kv_heads=4, head_dim=16)
    parts = [shard(x, placements) for x in inputs]
    wanted = gradients([x.to_local() for x in parts], config=config)
    for x, part in zip(gradients(parts, config=config), wanted, strict=True):
        assert x.placements == placements
        assert torch.equal(x.to_local(), part)


@pytest.mark.parametrize("placements", [(TOKENS, WHOLE), (HEADS, HEADS), (WHOLE, HEADS)])
def test_what_cannot_be_sharded_is_gathered(draw, shard, placements):
    """Tokens, and heads of which some shards would have more: groups of queries would meet other keys."""
    *inputs, _ = draw(20, batch=1, heads=6, kv_heads=3, head_dim=16)
    out = sage_attention(*(shard(x, placements) for x in inputs), enable_gqa=True)
    assert out.placements == (WHOLE, WHOLE)


@pytest.mark.parametrize("placements", [(WHOLE, WHOLE), (WHOLE, HEADS), (HEADS, HEADS)])
def test_a_mask_goes_with_sharded_heads(draw, shard, placements):
    """As a DTensor; what does not go with one is refused by name."""
    *inputs, _ = draw(20, batch=3, heads=8, kv_heads=4, head_dim=16)
    keep = torch.arange(20) < torch.tensor([[20], [13], [0]])
    bias = torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)[:, None, None]
    parts = [shard(x, placements) for x in inputs]
    for mask in ({"key_padding_mask": keep, "window_size": (5, 0)}, {"attn_mask": bias}):
        wanted = gradients([x.to_local() for x in parts], **mask)
        sharded = {name: shard(x, (WHOLE, WHOLE)) for name, x in mask.items() if isinstance(x, torch.Tensor)}
        for x, part in zip(gradients(parts, **mask | sharded), wanted, strict=True):
            assert x.placements == placements
            assert torch.equal(x.to_local(), part)
    with pytest.raises(
        NotImplementedError, match=r"no lse and no sinks with .* a mask; call .* to_local\(\)"
    ):
        sage_attention(*parts, sharded["attn_mask"], enable_gqa=True, return_lse=True)
    with pytest.raises(ValueError, match=r"key_padding_mask is no DTensor and q is; pass distribute_tensor"):
        sage_attention(*parts, key_padding_mask=keep, enable_gqa=True)


def test_sinks_are_sharded_as_the_heads_are(draw, shard):
    q, k, v, _ = draw(20, batch=4, heads=4, kv_heads=2, head_dim=16)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    leaves = [shard(x, (WHOLE, HEADS)) for x in (q, k, v)] + [shard(sinks, (WHOLE, Shard(0)))]
    results = []
    for own in (leaves, [x.to_local() for x in leaves]):
        *qkv, sinks = (x.detach().requires_grad_() for x in own)
        out = sage_attention(*qkv, sinks=sinks, is_causal=True, enable_gqa=True)
        results.append(torch.autograd.grad(out.sum(), [*qkv, sinks]))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found.to_local(), wanted)
