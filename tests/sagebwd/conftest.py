"""Inputs, shared by the tests of sagebwd."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sagebwd

FP32 = torch.float32


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks of kernels/sets.py, before anything imports that."""
    config.addinivalue_line("markers", "over(names, values): parameters that depend on the kernel set")
    config.addinivalue_line("markers", "emulated: run for the emulated CUDA kernels, too")
    config.addinivalue_line("markers", "reference: run for the reference, too")
    config.addinivalue_line("markers", "only(condition): run for the kernel sets that meet the condition")


@pytest.fixture(autouse=True)
def nothing_counted() -> Iterator[None]:
    """Nothing is in the report, and nothing was said once, before and after."""
    sagebwd.report(clear=True)
    yield
    sagebwd.report(clear=True)


@pytest.fixture
def draw() -> Callable[..., list[Tensor]]:
    """Return [q, k, v, grad_out], Gaussian, H_kv heads for k and v."""

    def draw(
        n_q=70, n_kv=None, *, head_dim=24, batch=2, heads=2, kv_heads=None, sigma=1.0, dtype=FP32, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        q_shape = (batch, heads, n_q, head_dim)
        kv_shape = (batch, kv_heads or heads, n_kv or n_q, head_dim)
        stds = ((q_shape, sigma), (kv_shape, sigma), (kv_shape, 1.0), (q_shape, 1.0))
        return [(std * torch.randn(shape, generator=generator)).to(dtype) for shape, std in stds]

    return draw


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    """Return torch.compile(function, fullgraph=True), by default without generated code.

    What other tests compiled is forgotten: a function has eight graphs at most.
    """
    torch._dynamo.reset()
    yield lambda function, backend="aot_eager": torch.compile(function, fullgraph=True, backend=backend)
    torch._dynamo.reset()
