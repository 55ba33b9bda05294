"""Tokens per second, and the share of the hardware's peak they use (MFU)."""

import re
import time

import torch

from model.config import LlamaConfig, parameter_count

#: Dense bf16 matrix-product peaks in TFLOP/s, without sparsity, from the vendors' datasheets.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100": 989.0,  # SXM
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H200": 989.0,  # SXM
    "H200 NVL": 835.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
}

#: Words in the driver's names of GPUs that do not change the peak: the maker, the socket and the memory.
NEUTRAL = re.compile(r"NVIDIA|GeForce|SXM\d?|PCIe?|\d+GB|HBM\d", re.IGNORECASE)


def peak_tflops(device: torch.device) -> float | None:
    """Peak of the device in dense bf16, in TFLOP/s, if it is a known GPU, else None."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """Peak of a GPU by the driver's name for it, by the longest name of the table within it.

    None if the table has no such GPU, or the name has a word of unknown meaning, such as "Laptop".
    """
    words = re.split(r"[ -]", name)
    inside = [known for known in PEAK_TFLOPS if set(known.split()) <= set(words)]
    if not inside:
        return None
    longest = max(inside, key=len)
    others = set(words) - set(longest.split())
    return PEAK_TFLOPS[longest] if all(map(NEUTRAL.fullmatch, others)) else None


def peak_memory_gib(device: torch.device, *, cuda_graphs: bool = False) -> float | None:
    """Peak memory of tensors on this GPU so far, in GiB; None on a CPU.

    PyTorch's count of tensors leaves out the memory of CUDA graphs. With them this is all memory that PyTorch
    reserved, used or not.
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
    an implementation repeats (recomputed scores, activation checkpointing) is not counted.
    """
    embedding = config.vocab_size * config.d_model * (1 if config.tie_embeddings else 2)
    weights = parameter_count(config) - embedding + config.vocab_size * config.d_model
    return 6 * weights + attention_flops_per_token(config, context)


def attention_flops_per_token(config: LlamaConfig, context: int) -> float:
    """The part of :func:`flops_per_token` that attention itself takes."""
    return 3 * 4 * config.n_layers * config.n_heads * config.d_head * context / 2


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
