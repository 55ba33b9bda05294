"""Full-precision attention by a pinned kernel: FlashAttention-4, or one of PyTorch's.

This is the baseline of every comparison, so the kernel must be the fastest available and the same on every
call and in every run. It is chosen once, by a rule and never by timing. (PyTorch's own choice may change with
the version, and silently from call to call.)
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

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
from sagebwd.validation import cast_to_autocast_dtype

log = logging.getLogger(__name__)

#: Kernels of PyTorch's operator.
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FA4 = "fa4"  # of the package flash-attn-4
TAKE_DOCUMENTS = ("flash", "efficient", "math")  # fastest first; all but flash with a mask
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
    _ATEN._flash_attention_forward.default,
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

    def why_no_documents(self) -> str | None:
        if self.sdpa in (None, *TAKE_DOCUMENTS):
            return None
        return (
            f"attention.sdpa={self.sdpa} takes no packed documents here; use attention.sdpa="
            f"{' or '.join(TAKE_DOCUMENTS)}, or null for the fastest of them"
        )

    def build(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        d_head: int,
        is_gqa: bool,
        longest_document: int | None = None,
    ) -> Backend:
        """Attention with the requested kernel, or else with the fastest that can run. Raises ValueError."""
        if device.type == "cuda":
            usable = usable_kernels(device, dtype, d_head, is_gqa)
            order = fastest_first(torch.cuda.get_device_capability(device))
        else:
            usable, order = {"math"}, ()
        if longest_document:
            order = TAKE_DOCUMENTS if order else ()
            usable = usable & ({*TAKE_DOCUMENTS} - ({"flash"} if d_head % 8 else set()))
        kernel = self.sdpa or next((name for name in order if name in usable), None)
        if kernel is None:
            attend, title = F.scaled_dot_product_attention, f"PyTorch's own choice for {device.type}"
            return _sdpa_backend(attend, title, longest_document)
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
        return _sdpa_backend(pinned(kernel), TITLES[kernel], longest_document, kernel == "flash")

    def saved_bytes(self, q: Tensor, k: Tensor, *, device: str) -> SavedBytes:
        """The math kernel keeps P (B, H, N, N) and all heads of q, k, v in float32."""
        if self.sdpa != "math":
            return super().saved_bytes(q, k, device=device)
        p = q.shape[0] * q.shape[1] * q.shape[2] ** 2
        return SavedBytes(total=4 * (3 * q.numel() + p) + q.nbytes, results=0)


@functools.cache
def _say_once(message: str) -> None:
    log.info("%s", message)


def _sdpa_backend(
    attend: AttentionFn, title: str, longest_document: int | None = None, is_flash: bool = False
) -> Backend:
    if not longest_document:
        return _backend(attend, f"scaled_dot_product_attention, {title}")
    how = "FlashAttention-2, packed documents" if is_flash else f"{title}, documents by a mask"
    return _backend(_with_documents(attend, longest_document, is_flash=is_flash), how)


def _with_documents(attend: AttentionFn, longest: int, *, is_flash: bool) -> AttentionFn:
    """The same, with packed documents where `cu_seqlens` is given."""

    def attend_documents(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> Tensor:
        if cu_seqlens is None:
            return attend(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)
        if is_flash:
            return _flash(q, k, v, cu_seqlens, longest, is_causal)
        mask = _mask(cu_seqlens, q.shape[2], longest, is_causal)
        q, k, v = (_sequences(x, longest) for x in (q, k, v))
        out = attend(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)
        return out.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2)

    return attend_documents


def _flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, is_causal: bool) -> Tensor:
    """FlashAttention-2 of packed documents, q (1, H, T, D). It knows groups of heads by their number.

    By the operator below torch.nn.attention.varlen.varlen_attn, whose arguments change with the version.
    """
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in cast_to_autocast_dtype(q, k, v))
    lengths = (cu_seqlens, cu_seqlens, longest, longest)
    out, *_ = _ATEN._flash_attention_forward(q, k, v, *lengths, 0.0, is_causal, False)
    return out.transpose(0, 1).unsqueeze(0)


def _sequences(x: Tensor, length: int) -> Tensor:
    """(1, H, T, D) as (T / length, H, length, D)."""
    return x.transpose(1, 2).squeeze(0).unflatten(0, (-1, length)).transpose(1, 2)


def _mask(cu_seqlens: Tensor, tokens: int, length: int, is_causal: bool) -> Tensor:
    """Which tokens of its sequence each token sees, bool (tokens / length, 1, length, length)."""
    index = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, index, right=True).view(-1, 1, 1, length)
    sees = document.mT == document
    return sees.tril() if is_causal else sees


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
    times as fast as cuDNN's there (results/log.md). For a B200 its authors report the same order; it was not
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


def pinned(name: str) -> AttentionFn:
    """scaled_dot_product_attention by one of KERNELS; RuntimeError where that cannot run."""
    kernel = KERNELS[name]

    def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        # cuDNN does not support a single key (generation from a one-token prompt); the math kernel does.
        chosen = kernel if k.shape[-2] > 1 else SDPBackend.MATH
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(q, k, v, **arguments)

    return attend
