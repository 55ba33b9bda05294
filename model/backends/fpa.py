"""Full-precision attention by a pinned kernel: FlashAttention-4, or one of PyTorch's.

This is the baseline of every comparison, so the kernel must be the fastest available and the same on every
call and in every run. It is chosen once, by a rule and never by timing. (PyTorch's own choice may change with
the version, and silently from call to call.)
"""

import functools
import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.backends import Attention, AttentionFn, Backend, SavedBytes
from model.kernels import flash_attention_4

log = logging.getLogger(__name__)

#: Kernels of PyTorch's operator.
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FA4 = "fa4"  # of the package flash-attn-4
CHOICES = (*KERNELS, FA4)
TITLES = {
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "efficient": "memory-efficient",
    "math": "math",
    FA4: "FlashAttention-4",
}
HOPPER = (9, 0)  # compute capability
FA4_IS_FASTEST = (9, 10)  # major compute capabilities: Hopper, and Blackwell data-center GPUs

_ATEN = torch.ops.aten
SAVED_OPERATORS = (
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.llama.flash_attention_4.default,
)


@dataclass
class Settings(Attention):
    """Settings of full-precision attention."""

    sdpa: str | None = None  # the kernel, one of CHOICES; None: the fastest that runs here

    def __post_init__(self) -> None:
        if self.sdpa is not None and self.sdpa not in CHOICES:
            raise ValueError(
                f"attention.sdpa={self.sdpa} is unknown; choose one of {', '.join(CHOICES)}, or null for the "
                "fastest available"
            )

    def build(self, *, device: torch.device, dtype: torch.dtype, d_head: int, is_gqa: bool) -> Backend:
        """Attention with the requested kernel, or else with the fastest that can run. Raises ValueError."""
        if device.type == "cuda":
            usable = usable_kernels(device, dtype, d_head, is_gqa)
            order = fastest_first(torch.cuda.get_device_capability(device))
        else:
            usable, order = {"math"}, ()
        kernel = self.sdpa or next((name for name in order if name in usable), None)
        if kernel is None:
            return _sdpa_backend(F.scaled_dot_product_attention, f"PyTorch's own choice for {device.type}")
        if kernel not in usable:
            why = ""
            if kernel == FA4:
                why = f": {flash_attention_4.why_not(device, dtype, d_head)}"
            elif kernel == "cudnn" and torch.are_deterministic_algorithms_enabled():
                why = ": its backward is not deterministic, as hardware.deterministic=true asks"
            raise ValueError(
                f"attention.sdpa={kernel} cannot run on {device} with {dtype}, d_head={d_head}, "
                f"is_gqa={is_gqa}{why}; use attention.sdpa={' or '.join(sorted(usable))}, or null for the "
                "fastest available"
            )
        if kernel == FA4:
            description = f"{TITLES[FA4]}, flash-attn-4 {flash_attention_4.installed_version()}"
            return _backend(flash_attention_4.attend, description)
        if FA4 in order and self.sdpa is None:
            why = flash_attention_4.why_not(device, dtype, d_head)
            _say_once(f"{why}. Full precision runs {TITLES[kernel]}")
        return _sdpa_backend(_pin(KERNELS[kernel]), TITLES[kernel])

    def saved_bytes(self, q: Tensor, k: Tensor, *, device: str) -> SavedBytes:
        """The math kernel keeps P (B, H, N, N) and all heads of q, k, v in float32."""
        if self.sdpa != "math":
            return super().saved_bytes(q, k, device=device)
        p = q.shape[0] * q.shape[1] * q.shape[2] ** 2
        return SavedBytes(total=4 * (3 * q.numel() + p) + q.nbytes, results=0)


@functools.cache
def _say_once(message: str) -> None:
    log.info("%s", message)


def _sdpa_backend(attend: AttentionFn, kernel: str) -> Backend:
    return _backend(attend, f"scaled_dot_product_attention, {kernel}")


def _backend(attend: AttentionFn, description: str) -> Backend:
    return Backend(
        attend,
        description,
        title="full-precision attention",
        saved_operators=SAVED_OPERATORS,
        # Full precision is the baseline, so the probe shows the error that SageBwd would have. Where no
        # SageBwd kernel runs (float32 on a GPU, for example) the plain PyTorch reference measures the same,
        # slowly.
        probe_instead=({"backend": "sagebwd"}, {"backend": "sagebwd", "kernels": "reference"}),
    )


def fastest_first(capability: tuple[int, int]) -> tuple[str, ...]:
    """The kernels in order of preference on a GPU of this compute capability.

    On Hopper, cuDNN uses the asynchronous tensor-core instructions and PyTorch's FlashAttention-2 does not:
    cuDNN is 1.3 to 1.9 times as fast on an H200. Forward and backward of FlashAttention-4 are 1.07 to 1.16
    times as fast as cuDNN's there (docs/log.md). For a B200 its authors report the same order; it was not
    measured here. On older GPUs FlashAttention-2 is the established best.
    """
    if capability[0] in FA4_IS_FASTEST:
        return (FA4, "cudnn", "flash", "efficient", "math")
    if capability >= HOPPER:
        return ("cudnn", "flash", "efficient", "math")
    return ("flash", "efficient", "cudnn", "math")


def usable_kernels(device: torch.device, dtype: torch.dtype, d_head: int, is_gqa: bool) -> set[str]:
    """The kernels that can train this kind of causal attention on a CUDA device."""
    q = torch.empty(1, 2, 128, d_head, device=device, dtype=dtype, requires_grad=True)
    kv = q[:, :1] if is_gqa else q
    params = SDPAParams(q, kv, kv, None, 0.0, True, is_gqa)  # no mask, no dropout, causal
    usable = {
        # cuDNN's backward accumulates in an arbitrary order. PyTorch's FlashAttention-2 and memory-efficient
        # kernels switch to a slower, deterministic backward.
        "cudnn": not torch.are_deterministic_algorithms_enabled() and can_use_cudnn_attention(params),
        "flash": can_use_flash_attention(params),
        "efficient": can_use_efficient_attention(params),
        "math": True,
        FA4: flash_attention_4.why_not(device, dtype, d_head) is None,
    }
    return {name for name, can_run in usable.items() if can_run}


def _pin(kernel: SDPBackend) -> AttentionFn:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
        # cuDNN does not support a single key (generation from a one-token prompt); the math kernel does.
        chosen = kernel if k.shape[-2] > 1 else SDPBackend.MATH
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)

    return attend
