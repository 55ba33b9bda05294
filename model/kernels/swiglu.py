"""silu(gate) · up and its gradient, each in one pass over memory, in Triton.

Gate and up come from one matrix product; the gradient of its result is one tensor. torch.compile computes
each element of it by both formulas, that of gate and that of up, and selects one.

Shapes: T tokens, F = d_ffn.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a thread block, all of one token: eight, or 16 bytes in bfloat16, per thread


def supports(gate_up: Tensor) -> bool:
    """Whether the kernels can take it: it is on a GPU."""
    return gate_up.is_cuda


@triton.jit
def _place(width, BLOCK: tl.constexpr):
    """Token and channels of this thread block."""
    blocks = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    return token, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _forward(gate_up, out, width, BLOCK: tl.constexpr):
    token, channel = _place(width, BLOCK)
    inside, at = channel < width, gate_up + token * 2 * width + channel
    gate = tl.load(at, inside, 0.0).to(tl.float32)
    up = tl.load(at + width, inside, 0.0).to(tl.float32)
    tl.store(out + token * width + channel, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), inside)


@triton.jit
def _backward(gate_up, grad_out, grad, width, BLOCK: tl.constexpr):
    token, channel = _place(width, BLOCK)
    inside, offset = channel < width, token * 2 * width + channel
    gate = tl.load(gate_up + offset, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + offset + width, inside, 0.0).to(tl.float32)
    g = tl.load(grad_out + token * width + channel, inside, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    of_gate = g * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(grad + offset, of_gate.to(grad.dtype.element_ty), inside)
    tl.store(grad + offset + width, (g * silu).to(grad.dtype.element_ty), inside)


def _run(kernel: triton.JITFunction, *tensors: Tensor, width: int) -> None:
    tokens = tensors[0].numel() // (2 * width)
    with torch.cuda.device_of(tensors[0]):
        kernel[(tokens * triton.cdiv(width, BLOCK),)](*tensors, width, BLOCK=BLOCK)


@torch.library.custom_op("llama::swiglu", mutates_args=())
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of gate and up side by side, (..., 2F) → (..., F).

    Computed in float32 and rounded once, to their dtype.
    """
    out = _empty_result(gate_up)
    _run(_forward, gate_up.contiguous(), out, width=out.shape[-1])
    return out


def _empty_result(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("llama::swiglu_backward", mutates_args=())
def _gradient(grad_out: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of gate and up, (..., 2F)."""
    grad = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    _run(_backward, gate_up.contiguous(), grad_out.contiguous(), grad, width=grad_out.shape[-1])
    return grad


@swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return _empty_result(gate_up)


@_gradient.register_fake
def _(grad_out: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


swiglu.register_autograd(
    lambda ctx, grad_out: _gradient(grad_out, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
