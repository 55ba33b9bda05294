"""torch's FlopCounterMode counts attention, forward and backward."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from sagebwd import sage_attention


def count(device="cpu", *, n_q=24, n_kv=40, batch=2, **arguments):
    """FLOPs of a forward and of its backward, 4 query heads and 2 key heads of 16 channels."""
    q = torch.ones(batch, 4, n_q, 16, device=device, requires_grad=True)
    k = torch.ones(batch, 2, n_kv, 16, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = sage_attention(q, k, k, enable_gqa=True, **arguments)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def expected(batch, n_q, n_kv):
    """As torch counts its own attention; the formula beside it is that of the products."""
    q, k = (batch, 4, n_q, 16), (batch, 2, n_kv, 16)
    found = sdpa_flop_count(q, k, k), sdpa_backward_flop_count(q, q, k, k)
    product = 2 * batch * 4 * n_q * n_kv * 16
    assert found == (2 * product, 5 * product)
    return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_that_of_torch(device, is_causal):
    assert count(device, is_causal=is_causal) == expected(2, 24, 40)


def test_documents_and_visible_keys():
    """Only what they compute; where their lengths cannot be read, documents of one length."""
    cu_seqlens, cu_seqlens_kv = torch.tensor([0, 4, 24]), torch.tensor([0, 30, 40])
    each = expected(1, 4, 30), expected(1, 20, 10)
    found = count(batch=1, cu_seqlens=cu_seqlens, cu_seqlens_kv=cu_seqlens_kv)
    assert found == tuple(map(sum, zip(*each, strict=True)))
    arguments = {"cu_seqlens": cu_seqlens.to("meta"), "cu_seqlens_kv": cu_seqlens_kv.to("meta")}
    assert count("meta", batch=1, **arguments) == expected(2, 12, 20)
    mask = torch.arange(40).expand(2, 40) < 13
    assert count(key_padding_mask=mask) == expected(2, 24, 13)
    assert count("meta", key_padding_mask=mask.to("meta")) == expected(2, 24, 40)
