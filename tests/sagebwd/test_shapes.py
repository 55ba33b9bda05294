"""Shapes as torch's operator takes them: leading dimensions, and values of another width than queries.

Kernels of every set see four dimensions and one head size, so that the reference stands for all of them here;
the sinks in kernels/test_lse.py have values of other widths with each.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import sagebwd
from sagebwd import SageConfig, sage_attention
from tests.inputs import assert_same, gradients

NO_INT8 = SageConfig(int8_matmuls=())
#: By number of dimensions: those before heads, and the heads of queries and of keys.
DIMENSIONS = {2: ((), 1, 1), 3: ((), 4, 2), 4: ((6,), 4, 2), 5: ((3, 2), 4, 2), 6: ((3, 1, 2), 4, 2)}


def inputs(dimensions, *, n_q=40, n_kv=50, head_dim=16, value_dim=16):
    """q, k, v, grad_out."""
    batch, heads, kv_heads = DIMENSIONS[dimensions]
    generator = torch.Generator().manual_seed(0)
    q, k = (heads, n_q), (kv_heads, n_kv)
    shapes = ((*q, head_dim), (*k, head_dim), (*k, value_dim), (*q, value_dim))
    shapes = (shape if dimensions > 2 else shape[1:] for shape in shapes)
    return [torch.randn(*batch, *shape, generator=generator) for shape in shapes]


def as_four(x):
    """(…, H, N, D) as (B, H, N, D)."""
    return x.reshape(-1, *x.shape[-3:]) if x.dim() > 2 else x[None, None]


def test_means_what_torch_means():
    """By name, and in the order of torch."""
    tensors = inputs(4)
    for arguments, settings in (((), {}), ((), {"is_causal": True, "scale": 0.4}), ((None, 0.0, True), {})):
        wanted = gradients(scaled_dot_product_attention, *tensors, *arguments, enable_gqa=True, **settings)
        found = gradients(sage_attention, *tensors, *arguments, enable_gqa=True, config=NO_INT8, **settings)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_dimensions_change_no_bit(dimensions):
    """With lse, sinks, and masks of each shape."""
    tensors = inputs(dimensions, value_dim=24)
    batch = tensors[0].shape[:-3]
    shown = torch.rand(*batch, 50, generator=torch.Generator().manual_seed(1)) < 0.7
    wide = shown[..., None, :] if dimensions == 2 else shown[..., None, None, :]
    masks = [{"attn_mask": wide}, {"attn_mask": wide.expand(*tensors[0].shape[:-1], 50)}]
    sinks = torch.linspace(-1, 2, DIMENSIONS[dimensions][1])
    settings = {"sinks": sinks, "return_lse": True, "enable_gqa": True}
    flat = shown.reshape(-1, 50)
    wanted = gradients(sage_attention, *map(as_four, tensors), key_padding_mask=flat, **settings)
    for mask in ({"key_padding_mask": shown}, *masks):
        found = gradients(sage_attention, *tensors, **mask, **settings)
        for x, y, shape in zip(found, wanted, (tensors[3], *tensors[:3], tensors[0][..., 0]), strict=True):
            assert x.shape == shape.shape
            assert torch.equal(x, y.view_as(x))


def test_packed_sequences_without_a_batch():
    q, k, v, grad_out = inputs(3)
    cuts = {"cu_seqlens": torch.tensor([0, 15, 40]), "cu_seqlens_kv": torch.tensor([0, 30, 50])}
    cuts["enable_gqa"] = True
    found = gradients(sage_attention, q, k, v, grad_out, **cuts)
    wanted = gradients(sage_attention, *(x[None] for x in (q, k, v, grad_out)), **cuts)
    assert_same(found, [x[0] for x in wanted])


def test_the_wider_head_size_decides_which_kernels_run():
    for sizes in ({"head_dim": 264}, {"value_dim": 264}):
        q, k, v, _ = (x.half() for x in inputs(4, **sizes))
        assert "the head size is 264" in sagebwd.explain(q, k, v, device="RTX 4090").reasons["triton"]


def test_compiles_without_a_break(compiled):
    tensors = inputs(5, value_dim=24)
    wanted = gradients(sage_attention, *tensors, enable_gqa=True)
    assert_same(gradients(compiled(sage_attention), *tensors, enable_gqa=True), wanted)
