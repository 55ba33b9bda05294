"""The emulation of one head: the reference where both can say the same, exact where nothing is rounded."""

from dataclasses import replace

import pytest
import torch

from sagebwd import SageConfig
from sagebwd.metrics import relative_l2
from sagebwd.reference import attention
from scripts import attention_emulation as emulation
from scripts.attention_emulation import EXACT, Head, emulate, scheme_of
from scripts.table1 import exact_attention

CONFIGS = [
    SageConfig.paper(),
    SageConfig(),
    SageConfig.strictly_causal(),
    SageConfig(smooth_q=True),
    SageConfig(smooth_k=False, exact_delta=True),
    SageConfig(s_levels=2),
    SageConfig(int8_matmuls=("o", "dv", "dq", "dk")),
    SageConfig(int8_matmuls=("s_fwd", "s_bwd", "o"), block_q=32, block_kv=48),
]


def draw(tokens: int = 150, channels: int = 24, sigma: float = 2.0) -> list[torch.Tensor]:
    """q, k, v and dO (1, 1, N, D) that bf16 holds, q and k with a mean."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = torch.randn(4, 1, 1, tokens, channels, generator=generator)
    mean = torch.randn(2, channels, generator=generator)
    return [x.bfloat16().float() for x in (sigma * q + mean[0], sigma * k + mean[1], v, grad_out)]


def head_of(tensors: list[torch.Tensor]) -> Head:
    return Head(*(x[0, 0] for x in tensors))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_agrees_with_the_reference(config):
    tensors = draw()
    found = emulate(head_of(tensors), scheme_of(config, 24, torch.bfloat16))
    wanted = attention(*(x.bfloat16() for x in tensors), is_causal=True, config=config)
    for name, x in found._asdict().items():
        assert relative_l2(x.bfloat16(), getattr(wanted, name)[0, 0]) < 5e-4, name  # numbers next to ties


def test_without_rounding_it_is_attention():
    tensors = draw()
    for delta in emulation.DELTAS:
        found = emulate(head_of(tensors), replace(EXACT, delta=delta))
        for x, wanted in zip(found, exact_attention(*tensors, is_causal=True), strict=True):
            assert relative_l2(x, wanted[0, 0]) < 2e-6
