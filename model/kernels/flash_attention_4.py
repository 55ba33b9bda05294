"""FlashAttention-4, the package flash-attn-4, as operators that torch.compile and checkpointing know.

The package's own function is a torch.autograd.Function around code that torch.compile cannot trace.
PyTorch's activate_flash_attention_impl("FA4") is not used. It replaces FlashAttention-2 in the whole process.
torch 2.13 expects two results of the package's forward; 4.0.0b36 returns five. And it fills a
random state that nothing reads, two launches more.

Like that of PyTorch, the operators call the forward and backward that the package's own function is made of.

Shapes: B sequences, N tokens, H heads, G key heads (a divisor of H), D channels per head.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch
from torch import Tensor

from sagebwd.validation import cast_to_autocast_dtype

MODULE = "flash_attn.cute.interface"
INSTALL = 'pip install "flash-attn-4>=4.0.0b36", or "flash-attn-4[cu13]>=4.0.0b36" with CUDA 13'

#: Largest head size, by major compute capability of the GPUs that the package has a backward for. Blackwell
#: data-center GPUs (10 and 11) take 256, too.
LARGEST_HEAD_DIM = {9: 256, 10: 128, 11: 128, 12: 128}


def why_not(device: torch.device, dtype: torch.dtype, d_head: int) -> str | None:
    """Why FlashAttention-4 cannot train with such Q, K and V; None if it can."""
    if device.type != "cuda":
        return f"FlashAttention-4 runs on NVIDIA GPUs, not on {device.type}"
    if torch.version.hip:
        return "FlashAttention-4 does not run on AMD GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in LARGEST_HEAD_DIM:
        return f"FlashAttention-4 needs a Hopper or Blackwell GPU, not compute capability {major}.{minor}"
    if major == 12 and torch.are_deterministic_algorithms_enabled():
        return "FlashAttention-4 has no deterministic backward on compute capability 12.0"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention-4 takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    largest = LARGEST_HEAD_DIM[major]
    if d_head % 8 or not (d_head <= largest or (major in (10, 11) and d_head == 256)):
        return f"FlashAttention-4 takes head sizes that are multiples of 8 up to {largest}, not {d_head}"
    return why_not_installed()


def why_not_installed() -> str | None:
    """What is wrong with the installation of the package; None if it can be imported."""
    try:
        _package()
    except ModuleNotFoundError as error:
        return f"FlashAttention-4 is not installed ({error}); {INSTALL}"
    except Exception as error:  # a package built for another PyTorch or CUDA may raise anything
        return f"FlashAttention-4 cannot be imported ({type(error).__name__}: {error}); {INSTALL}"
    return None


def installed_version() -> str:
    """The version of the package, for the log."""
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return "unknown version"


def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    """As :class:`model.backends.AttentionFn`; casts under autocast as scaled_dot_product_attention does.

    Raises ValueError for shapes whose result would differ from that of scaled_dot_product_attention.
    """
    if is_causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} tokens and k {k.shape[2]}; FlashAttention-4 aligns a causal mask with the "
            "last token, not with the first; use attention.sdpa=flash"
        )
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads and k {k.shape[1]}; pass enable_gqa=True")
    q, k, v = cast_to_autocast_dtype(q, k, v)
    return flash_attention_4(q, k, v, is_causal)[0]


def _package() -> ModuleType:
    return importlib.import_module(MODULE)


def _tokens_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, H, N, D) ↔ (B, N, H, D), as views."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """For each (B, H, N, D) a new tensor of that shape that lies token by token in memory."""
    return _tokens_first(*(x.new_empty(x.transpose(1, 2).shape) for x in tensors))


@torch.library.custom_op("llama::flash_attention_4", mutates_args=())
def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attention (B, H, N, D) of q (B, H, N, D) and k, v (B, G, N, D), and the logsumexp (B, H, N) in fp32."""
    (out,) = _empty_like(q)
    with torch.cuda.device_of(q):  # the package asks for the current device
        _, lse, *_ = _package()._flash_attn_fwd(
            *_tokens_first(q, k, v), causal=is_causal, return_lse=True, out=out.transpose(1, 2)
        )
    return out, lse


@torch.library.custom_op("llama::flash_attention_4_backward", mutates_args=())
def _gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, laid out token by token."""
    dq, dk, dv = _empty_like(q, k, v)
    inputs = _tokens_first(q, k, v, out, grad_out)
    results = dict(zip(("dq", "dk", "dv"), _tokens_first(dq, dk, dv), strict=True))
    with torch.cuda.device_of(q):
        _package()._flash_attn_bwd(
            *inputs,
            lse,
            causal=is_causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **results,
        )
    return dq, dk, dv


@flash_attention_4.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return _empty_like(q)[0], q.new_empty(q.shape[:-1], dtype=torch.float32)


@_gradients.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    return _empty_like(q, k, v)


def _save_for_backward(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 4
    return (*_gradients(grad_out, *ctx.saved_tensors, ctx.is_causal), None)


flash_attention_4.register_autograd(_backward, setup_context=_save_for_backward)
