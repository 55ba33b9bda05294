import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model import backends
from model.config import LlamaConfig
from model.llama import Llama
from trainer.throughput import Stopwatch, flops_per_token, peak_of, peak_tflops


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flops_agree_with_torchs_counter(tied, kv_heads):
    """Torch counts every matrix product as it runs, and attention without the causal saving."""
    config = LlamaConfig(
        vocab_size=320,
        d_model=96,
        n_layers=3,
        n_heads=4,
        n_kv_heads=kv_heads,
        d_head=24,
        d_ffn=200,
        max_context=64,
        qk_norm=False,
        tie_embeddings=tied,
    )
    cpu = torch.device("cpu")
    backend = backends.build(
        {"backend": "fpa", "sdpa": "math"},
        device=cpu,
        dtype=torch.float32,
        d_head=24,
        is_gqa=kv_heads != 4,
    )
    tokens = torch.randint(320, (2, 65))
    with FlopCounterMode(display=False) as counter:
        Llama(config, backend.attend)(tokens[:, :-1], tokens[:, 1:]).backward()
    counted = counter.get_total_flops() / (2 * 64)
    attention = 3 * 4 * 3 * 4 * 24 * 64
    norms = 6 * (2 * 3 + 1) * 96  # gains are weights, but multiply vectors, not matrices
    assert flops_per_token(config, context=64) == pytest.approx(counted - attention / 2 + norms, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_are_those_of_the_very_gpu(name, peak, monkeypatch):
    assert peak_of(name) == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda")) == peak
    assert peak_tflops(torch.device("cpu")) is None


def test_stopwatch_leaves_pauses_out():
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    time.sleep(0.02)
    watch.pause()
    time.sleep(0.2)
    watch.start()
    time.sleep(0.02)
    assert 0.04 <= watch.take() < 0.15
    assert watch.take() < 0.02  # starts from zero, and still runs
