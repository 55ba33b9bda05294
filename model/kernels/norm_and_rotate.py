"""RMSNorm of every head and the rotary embedding in one pass over memory, forward and backward, in Triton.

torch.compile needs more passes for the same in PyTorch: on an NVIDIA H200, a block of the 325M model (forward
and backward of 65,536 tokens, 14 ms) took 0.31 ms longer.

Shapes: B sequences, N tokens, H heads, D channels per head, D a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements per iteration of a thread block, and thread blocks of the backward (four per SM of an H200). Tuned
# there with the number of warps, for 65,536 tokens of 16 heads of 64: 7 combinations took 70 to 85 µs forward
# (this one 70), 41 took 106 to 279 µs backward (this one 108). Reducing the gain's sums in every iteration
# instead of at the end took at least 127 µs.
FORWARD_ELEMENTS = 2048
BACKWARD_ELEMENTS = 4096
BACKWARD_BLOCKS = 528


def supports(x: Tensor) -> bool:
    """Whether x (B, N, H, D) is on a GPU, and D is a power of two that is not too large."""
    d_head = x.shape[-1]
    return x.is_cuda and 2 <= d_head <= FORWARD_ELEMENTS and d_head & (d_head - 1) == 0


@triton.jit
def _load_halves(x, row, rows, HALF: tl.constexpr):
    """The two halves of rows of x (rows, 2 · HALF), in float32; zeros past the last row."""
    inside = row[:, None] < rows
    at = x + row[:, None].to(tl.int64) * (2 * HALF) + tl.arange(0, HALF)
    first = tl.load(at, inside, 0.0).to(tl.float32)
    second = tl.load(at + HALF, inside, 0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_halves(x, row, rows, first, second, HALF: tl.constexpr):
    inside = row[:, None] < rows
    at = x + row[:, None].to(tl.int64) * (2 * HALF) + tl.arange(0, HALF)
    tl.store(at, first.to(x.dtype.element_ty), inside)
    tl.store(at + HALF, second.to(x.dtype.element_ty), inside)


@triton.jit
def _load_angles(cos, sin, row, length, heads, HALF: tl.constexpr):
    """Cosines and sines (rows, HALF) of the tokens of these rows; a row is one head of a token."""
    at = (row // heads % length)[:, None] * HALF + tl.arange(0, HALF)
    return tl.load(cos + at), tl.load(sin + at)


@triton.jit
def _inverse_rms(first, second, eps, HALF: tl.constexpr):
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    return tl.rsqrt(squares / (2 * HALF) + eps)[:, None]


@triton.jit
def _norm_rotate(x, gain, cos, sin, out, rows, length, heads, eps, HALF: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, HALF)
    x1, x2 = _load_halves(x, row, rows, HALF)
    inverse = _inverse_rms(x1, x2, eps, HALF)
    y1 = x1 * inverse * tl.load(gain + channel)
    y2 = x2 * inverse * tl.load(gain + HALF + channel)
    c, s = _load_angles(cos, sin, row, length, heads, HALF)
    _store_halves(out, row, rows, y1 * c - y2 * s, y2 * c + y1 * s, HALF)


@triton.jit
def _norm_rotate_gradients(
    x,
    gain,
    cos,
    sin,
    grad_out,
    grad_x,
    grad_gain,  # (thread blocks, 2 · HALF): a partial sum from each
    rows,
    length,
    heads,
    eps,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    channel = tl.arange(0, HALF)
    gain1, gain2 = tl.load(gain + channel), tl.load(gain + HALF + channel)
    sum1, sum2 = tl.zeros([ROWS, HALF], tl.float32), tl.zeros([ROWS, HALF], tl.float32)
    for begin in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = begin + tl.arange(0, ROWS)
        x1, x2 = _load_halves(x, row, rows, HALF)
        g1, g2 = _load_halves(grad_out, row, rows, HALF)
        c, s = _load_angles(cos, sin, row, length, heads, HALF)
        inverse = _inverse_rms(x1, x2, eps, HALF)
        x1, x2 = x1 * inverse, x2 * inverse  # normalised
        y1, y2 = g1 * c + g2 * s, g2 * c - g1 * s  # rotated back
        sum1 += y1 * x1
        sum2 += y2 * x2
        y1, y2 = y1 * gain1, y2 * gain2
        # The component along x is removed: the norm does not depend on the length of x.
        along = ((tl.sum(y1 * x1, 1) + tl.sum(y2 * x2, 1)) / (2 * HALF))[:, None]
        _store_halves(grad_x, row, rows, inverse * (y1 - x1 * along), inverse * (y2 - x2 * along), HALF)
    at = grad_gain + tl.program_id(0) * (2 * HALF) + channel
    tl.store(at, tl.sum(sum1, 0))
    tl.store(at + HALF, tl.sum(sum2, 0))


@torch.library.custom_op("llama::norm_and_rotate", mutates_args=())
def norm_and_rotate(x: Tensor, gain: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMSNorm over the channels of x (B, N, H, D) times gain (D,), rotated by tables (N, 1, D/2).

    Computed in float32 and rounded once, to x's dtype. The tables and the gain are float32.
    """
    _, length, heads, d_head = x.shape
    x = x.contiguous()
    out = torch.empty_like(x)
    with torch.cuda.device_of(x):
        _norm_rotate[(triton.cdiv(x.numel(), FORWARD_ELEMENTS),)](
            *(x, gain, cos.contiguous(), sin.contiguous(), out, x.numel() // d_head, length, heads, eps),
            HALF=d_head // 2,
            ROWS=FORWARD_ELEMENTS // d_head,
        )
    return out


@torch.library.custom_op("llama::norm_and_rotate_backward", mutates_args=())
def _gradients(
    grad_out: Tensor, x: Tensor, gain: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of x, and partial sums of the gradient of the gain (thread blocks, D)."""
    _, length, heads, d_head = x.shape
    x, grad_out = x.contiguous(), grad_out.contiguous()
    grad_x, sums = _empty_gradients(x)
    with torch.cuda.device_of(x):
        _norm_rotate_gradients[(len(sums),)](
            *(x, gain, cos.contiguous(), sin.contiguous(), grad_out, grad_x, sums),
            *(x.numel() // d_head, length, heads, eps),
            HALF=d_head // 2,
            ROWS=BACKWARD_ELEMENTS // d_head,
        )
    return grad_x, sums


def _empty_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = min(BACKWARD_BLOCKS, triton.cdiv(x.numel(), BACKWARD_ELEMENTS))
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, x.new_empty(blocks, x.shape[-1], dtype=torch.float32)


@norm_and_rotate.register_fake
def _(x: Tensor, gain: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_gradients.register_fake
def _(grad_out: Tensor, x: Tensor, gain: Tensor, eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return _empty_gradients(x)


def _save_for_backward(ctx, inputs: tuple, output: Tensor) -> None:
    x, gain, ctx.eps, cos, sin = inputs
    ctx.save_for_backward(x, gain, cos, sin)


def _backward(ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, gain, cos, sin = ctx.saved_tensors
    grad_x, sums = _gradients(grad_out, x, gain, ctx.eps, cos, sin)
    return grad_x, sums.sum(0), None, None, None  # summed here, where torch.compile can fuse it


norm_and_rotate.register_autograd(_backward, setup_context=_save_for_backward)
