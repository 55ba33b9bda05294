"""How many kernels a call launches, and what else a GPU is asked to do; nothing runs on one."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from sagebwd.config import DEFAULT_CONFIG
from sagebwd.interface import AttentionParams
from sagebwd.kernels.hopper import attention as hopper
from sagebwd.window import CAUSAL
from tests.sagebwd.kernels.cuda import sources_on_cpu
from tests.sagebwd.kernels.operators import Watch

PARAMS = AttentionParams(CAUSAL, 0.1, DEFAULT_CONFIG, "hopper", pack_for_backward=True)
#: Operators that take or describe memory, and launch nothing.
LAUNCH_NOTHING = ("empty", "view", "transpose", "detach", "expand")


def count(forward, backward, launched, sample):
    """The kernels and launching operators of a forward, and those of a backward."""
    *qkv, grad_out = sample
    with Watch() as forward_ran:
        saved = forward(*qkv, PARAMS)
    first = [*launched]
    launched.clear()
    with Watch() as backward_ran:
        backward(grad_out, *qkv, saved, PARAMS)
    first_others, others = (
        [name for name in ran.names if not any(word in name for word in LAUNCH_NOTHING)]
        for ran in (forward_ran, backward_ran)
    )
    return (first, first_others), ([*launched], others)


@pytest.fixture
def sample(draw):
    return draw(9, batch=1, heads=2, head_dim=64, dtype=torch.float16)


def test_hopper(sample, monkeypatch):
    launched = []

    def start_loading(sources, source, name, shared_bytes, **defines):
        start = lambda *_: launched.append(name.removesuffix("_kernel"))  # noqa: E731
        return lambda: SimpleNamespace(parameters=None, start=start)

    sources_on_cpu.no_gpu(monkeypatch, start_loading)
    assert count(hopper.forward, hopper.backward, launched, sample) == (
        (["token_sum", "token_mean", "pack_q", "pack_kv_int8", "forward"], []),
        (["pack_grad", "dk_dv", "pack_k_columns", "dq"], []),
    )


def test_triton(sample, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from sagebwd.kernels.triton import backward, forward, quantize

    launched = []

    for module in (quantize, forward, backward):
        for name in [x for x in vars(module) if x.endswith("_kernel")]:
            launch = lambda *_, name=name, **__: launched.append(name.strip("_").removesuffix("_kernel"))  # noqa: E731
            monkeypatch.setattr(module, name, defaultdict(lambda launch=launch: launch))
    assert count(forward.forward, backward.backward, launched, sample) == (
        (["block_sum", "mean", "quantize", "quantize", "quantize", "forward"], []),
        (["quantize", "quantize", "quantize_grad", "dk_dv", "dq"], []),
    )
