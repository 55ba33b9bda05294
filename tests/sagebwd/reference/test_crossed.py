"""The reference against float64 attention: presets × packed documents × groups × masks, at random."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagebwd.config import PRESETS, SageConfig
from sagebwd.metrics import relative_l2
from sagebwd.reference import attention, exact_attention

NAMES = ("out", "dq", "dk", "dv")
#: Without INT8 no switch changes anything, whatever it would do to what is quantized.
EXACT = [
    SageConfig(int8_matmuls=(), block_q=16, block_kv=32, **switches)
    for switches in (
        {}, {"smooth_k": False}, {"smooth_q": True}, {"compensate_o": True}, {"granularity": "block"},
        {"operand_scales": "token"},
    )
]  # fmt: skip
LIMITS = st.sampled_from([-1, 0, 1, 15, 16, 31, 33, 63])  # around the edges of tiles
LENGTHS = st.lists(st.sampled_from([0, 1, 7, 16, 33, 70]), min_size=1, max_size=4)


@settings(max_examples=160, deadline=None)
@given(
    config=st.sampled_from([*EXACT, *EXACT, *PRESETS.values()]),
    rows=LENGTHS,
    columns=LENGTHS,
    is_packed=st.booleans(),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    head_dim=st.sampled_from([24, 24, 1, 130]),
    scale=st.sampled_from([None, None, 0.0, 0.3, -0.3]),
    window_size=st.tuples(LIMITS, LIMITS),
    is_causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_attention(
    config, rows, columns, is_packed, heads, head_dim, scale, window_size, is_causal, seed
):
    """Exact but for rounding to fp32 without INT8, near it with; zero where a query or key sees nothing."""
    columns = (columns * len(rows))[: len(rows)]  # as many documents
    n_q, n_kv = max(sum(rows), 1), max(sum(columns), 1)
    packed = {}
    if is_packed:
        lengths = {"cu_seqlens": rows, "cu_seqlens_kv": columns}
        packed = {name: torch.tensor([0, *own]).cumsum(0) for name, own in lengths.items()}
    generator, q, k = torch.Generator().manual_seed(seed), (heads[0], n_q), (heads[1], n_kv)
    batch = 1 if is_packed else 2
    inputs = [torch.randn(batch, *x, head_dim, generator=generator) for x in (q, k, k, q)]
    mask = {"window_size": window_size, "is_causal": is_causal, "scale": scale, **packed}
    found = attention(*inputs, config=config, enable_gqa=True, **mask)
    wanted = exact_attention(*inputs, **mask)
    sees = wanted.lse.isfinite()
    assert torch.equal(found.lse.isfinite(), sees)
    for name in NAMES:
        x, y = getattr(found, name), getattr(wanted, name)
        assert x.isfinite().all(), name
        if config in EXACT:
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4, msg=name)
        elif head_dim > 1 and y.norm() > 0.1 * y.numel() ** 0.5:  # else noise, as dQ of one visible key
            assert relative_l2(x, y) < 0.15, name
    for name in ("out", "dq"):
        assert not getattr(found, name)[~sees].any(), name
