"""Inputs and float64 attention, shared by the tests of sagebwd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Fixed order of summation, and no fight over cores between parallel test processes."""
    torch.set_num_threads(1)


@pytest.fixture
def draw() -> Callable[..., list[Tensor]]:
    """Return [q, k, v, grad_out], Gaussian, H_kv heads for k and v."""

    def draw(
        n_q: int = 70,
        n_kv: int | None = None,
        *,
        head_dim: int = 24,
        batch: int = 2,
        heads: int = 2,
        kv_heads: int | None = None,
        sigma: float = 1.0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        q_shape = (batch, heads, n_q, head_dim)
        kv_shape = (batch, kv_heads or heads, n_kv or n_q, head_dim)
        stds = ((q_shape, sigma), (kv_shape, sigma), (kv_shape, 1.0), (q_shape, 1.0))
        return [(std * torch.randn(shape, generator=generator)).to(dtype) for shape, std in stds]

    return draw


@pytest.fixture
def exact() -> Callable[..., dict[str, Tensor]]:
    """Return float64 attention as {out, p, dp, ds, delta, dq, dk, dv}, from its definition and autograd."""

    def exact(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grad_out: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        **_: object,
    ) -> dict[str, Tensor]:
        q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        s = q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        hidden = torch.zeros(s.shape[-2:], dtype=torch.bool)
        if is_causal:
            hidden = torch.ones_like(hidden).triu(1)
        s = s.masked_fill(hidden, -torch.inf)
        p = s.softmax(-1)
        out = p @ values
        ds, dp, dq, dk, dv = torch.autograd.grad(out, (s, p, q, k, v), grad_out.double())
        return {
            "out": out.detach(),
            "p": p.detach(),
            "dp": dp.masked_fill(hidden, 0),
            "ds": ds,
            "delta": (grad_out.double() * out.detach()).sum(-1),
            "dq": dq,
            "dk": dk,
            "dv": dv,
        }

    return exact
