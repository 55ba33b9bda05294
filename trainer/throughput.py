"""Tokens per second, and what share of the hardware's peak they use (MFU)."""

import time

import torch

from model.config import LlamaConfig, parameter_count

# Dense bf16 matrix-product peaks in TFLOP/s, without sparsity, from the vendors' datasheets.
PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def peak_tflops(device: torch.device) -> float | None:
    """Peak of the device if it is a known GPU (the first name that matches), else None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def peak_memory_gib(device: torch.device, *, cuda_graphs: bool = False) -> float | None:
    """Most memory that tensors have taken on this GPU so far, in GiB; None on a CPU.

    PyTorch does not count what lies in CUDA graphs. With them it is all that PyTorch took, to use it or not.
    """
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_reserved if cuda_graphs else torch.cuda.max_memory_allocated
    return peak(device) / 2**30


def flops_per_token(config: LlamaConfig, context: int) -> float:
    """Floating-point operations of the model per trained token, forward and backward.

    6 · (parameters outside the embedding + the head d_model · vocab_size), as each weight takes part in one
    multiply-add forward and two backward; plus causal attention, where a token attends to context / 2 others
    on average: QKᵀ and PV take 4 · d_head · context / 2 per head forward, and twice that backward. Work that
    an implementation repeats (recomputed scores, activation checkpointing) does not count.
    """
    embedding = config.vocab_size * config.d_model * (1 if config.tie_embeddings else 2)
    weights = parameter_count(config) - embedding + config.vocab_size * config.d_model
    attention = 3 * 4 * config.n_layers * config.n_heads * config.d_head * context / 2
    return 6 * weights + attention


class Stopwatch:
    """Measures training time only: paused during evaluation, checkpoints and the like."""

    def __init__(self, device: torch.device):
        self._device = device
        self._elapsed = 0.0
        self._started: float | None = None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def start(self) -> None:
        self._started = self._now()

    def pause(self) -> None:
        if self._started is not None:
            self._elapsed += self._now() - self._started
            self._started = None

    def take(self) -> float:
        """Seconds counted since the last call; keeps running if it was running."""
        running = self._started is not None
        self.pause()
        elapsed, self._elapsed = self._elapsed, 0.0
        if running:
            self.start()
        return elapsed
