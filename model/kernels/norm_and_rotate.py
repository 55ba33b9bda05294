"""RMSNorm of every head of Q and K, and the rotary embedding, in one pass over memory each way, in Triton.

Q and K come from one matrix product; the gradient of its result is one tensor.

torch.compile needs more passes for the same in PyTorch: on an NVIDIA H200, a block of the 325M model (forward
and backward of 65,536 tokens, 14 ms) took 0.31 ms longer.

Shapes: B sequences, N tokens, H query heads, G key heads, D channels per head, D a power of two.
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
def _halves(x, row, heads, stride, HALF: tl.constexpr):
    """Where the first halves of rows of x are; a row is one head of a token. stride: from token to token."""
    start = (row // heads).to(tl.int64) * stride + row % heads * (2 * HALF)
    return x + start[:, None] + tl.arange(0, HALF)


@triton.jit
def _load_halves(x, row, rows, heads, stride, HALF: tl.constexpr):
    """The two halves of rows of x, in float32; zeros past the last row."""
    inside = row[:, None] < rows
    at = _halves(x, row, heads, stride, HALF)
    first = tl.load(at, inside, 0.0).to(tl.float32)
    second = tl.load(at + HALF, inside, 0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_halves(x, row, rows, heads, stride, first, second, HALF: tl.constexpr):
    inside = row[:, None] < rows
    at = _halves(x, row, heads, stride, HALF)
    tl.store(at, first.to(x.dtype.element_ty), inside)
    tl.store(at + HALF, second.to(x.dtype.element_ty), inside)


@triton.jit
def _load_angles(cos, sin, row, length, heads, HALF: tl.constexpr):
    """Cosines and sines (rows, HALF) of the tokens of these rows."""
    at = (row // heads % length)[:, None] * HALF + tl.arange(0, HALF)
    return tl.load(cos + at), tl.load(sin + at)


@triton.jit
def _inverse_rms(first, second, eps, HALF: tl.constexpr):
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    return tl.rsqrt(squares / (2 * HALF) + eps)[:, None]


@triton.jit
def _norm_rotate(
    x,  # (B, N, heads, 2 · HALF), stride elements from token to token
    gain,
    cos,
    sin,
    out,  # contiguous
    rows,
    length,
    heads,
    stride,
    eps,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, HALF)
    x1, x2 = _load_halves(x, row, rows, heads, stride, HALF)
    inverse = _inverse_rms(x1, x2, eps, HALF)
    y1 = x1 * inverse * tl.load(gain + channel)
    y2 = x2 * inverse * tl.load(gain + HALF + channel)
    c, s = _load_angles(cos, sin, row, length, heads, HALF)
    _store_halves(out, row, rows, heads, heads * 2 * HALF, y1 * c - y2 * s, y2 * c + y1 * s, HALF)


@triton.jit
def _norm_rotate_gradients(
    x,  # (B, N, heads, 2 · HALF), stride elements from token to token
    gain,
    cos,
    sin,
    grad_out,  # contiguous
    grad_x,  # as x
    grad_gain,  # (thread blocks, 2 · HALF): a partial sum from each
    rows,
    length,
    heads,
    stride,
    eps,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    channel = tl.arange(0, HALF)
    gain1, gain2 = tl.load(gain + channel), tl.load(gain + HALF + channel)
    sum1, sum2 = tl.zeros([ROWS, HALF], tl.float32), tl.zeros([ROWS, HALF], tl.float32)
    for begin in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = begin + tl.arange(0, ROWS)
        x1, x2 = _load_halves(x, row, rows, heads, stride, HALF)
        g1, g2 = _load_halves(grad_out, row, rows, heads, heads * 2 * HALF, HALF)
        c, s = _load_angles(cos, sin, row, length, heads, HALF)
        inverse = _inverse_rms(x1, x2, eps, HALF)
        x1, x2 = x1 * inverse, x2 * inverse  # normalised
        y1, y2 = g1 * c + g2 * s, g2 * c - g1 * s  # rotated back
        sum1 += y1 * x1
        sum2 += y2 * x2
        y1, y2 = y1 * gain1, y2 * gain2
        # The component along x is removed: the norm does not depend on the length of x.
        along = ((tl.sum(y1 * x1, 1) + tl.sum(y2 * x2, 1)) / (2 * HALF))[:, None]
        x1, x2 = inverse * (y1 - x1 * along), inverse * (y2 - x2 * along)
        _store_halves(grad_x, row, rows, heads, stride, x1, x2, HALF)
    at = grad_gain + tl.program_id(0) * (2 * HALF) + channel
    tl.store(at, tl.sum(sum1, 0))
    tl.store(at + HALF, tl.sum(sum2, 0))


@torch.library.custom_op("llama::norm_and_rotate", mutates_args=())
def norm_and_rotate(
    qk: Tensor, kv_heads: int, q_gain: Tensor, k_gain: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Q (B, N, H, D) and K (B, N, G, D) of the heads of both, qk (B, N, H + G, D), where kv_heads is G.

    RMSNorm over the channels times the gain (D,) of Q or K, rotated by tables (N, 1, D/2). Computed in
    float32 and rounded once, to qk's dtype. The tables and the gains are float32.
    """
    _, length, _, d_head = qk.shape
    qk, cos, sin = qk.contiguous(), cos.contiguous(), sin.contiguous()
    results = _empty_results(qk, kv_heads)
    with torch.cuda.device_of(qk):
        for x, gain, out in zip(_parts(qk, kv_heads), (q_gain, k_gain), results, strict=True):
            _norm_rotate[(triton.cdiv(x.numel(), FORWARD_ELEMENTS),)](
                *(x, gain, cos, sin, out, x.numel() // d_head, length, x.shape[2], x.stride(1), eps),
                HALF=d_head // 2,
                ROWS=FORWARD_ELEMENTS // d_head,
            )
    return results


def _parts(qk: Tensor, kv_heads: int) -> tuple[Tensor, ...]:
    """The heads of Q and of K: views."""
    return qk.split([qk.shape[2] - kv_heads, kv_heads], dim=2)


def _empty_results(qk: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    q, k = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in _parts(qk, kv_heads))
    return q, k


@torch.library.custom_op("llama::norm_and_rotate_backward", mutates_args=())
def _gradients(
    grad_q: Tensor,
    grad_k: Tensor,
    qk: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradient of qk, and partial sums of the gradients of both gains (2, thread blocks, D)."""
    (_, length, _, d_head), kv_heads = qk.shape, grad_k.shape[2]
    qk, cos, sin = qk.contiguous(), cos.contiguous(), sin.contiguous()
    grad_qk, sums = _empty_gradients(qk, kv_heads)
    parts, grads = _parts(qk, kv_heads), _parts(grad_qk, kv_heads)
    of_q, of_k = zip(parts, (q_gain, k_gain), (grad_q, grad_k), grads, sums, strict=True)
    with torch.cuda.device_of(qk):
        for x, gain, grad_out, grad_x, own_sums in (of_q, of_k):
            _norm_rotate_gradients[(len(own_sums),)](
                *(x, gain, cos, sin, grad_out.contiguous(), grad_x, own_sums),
                *(x.numel() // d_head, length, x.shape[2], x.stride(1), eps),
                HALF=d_head // 2,
                ROWS=BACKWARD_ELEMENTS // d_head,
            )
    return grad_qk, sums


def _empty_gradients(qk: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    largest = max(x.numel() for x in _parts(qk, kv_heads))
    blocks = min(BACKWARD_BLOCKS, triton.cdiv(largest, BACKWARD_ELEMENTS))
    grad_qk = torch.empty_like(qk, memory_format=torch.contiguous_format)
    return grad_qk, qk.new_empty(2, blocks, qk.shape[-1], dtype=torch.float32)


@norm_and_rotate.register_fake
def _(
    qk: Tensor, kv_heads: int, q_gain: Tensor, k_gain: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return _empty_results(qk, kv_heads)


@_gradients.register_fake
def _(
    grad_q: Tensor,
    grad_k: Tensor,
    qk: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    return _empty_gradients(qk, grad_k.shape[2])


def _save_for_backward(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    qk, _, q_gain, k_gain, ctx.eps, cos, sin = inputs
    ctx.save_for_backward(qk, q_gain, k_gain, cos, sin)


def _backward(ctx, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
    qk, q_gain, k_gain, cos, sin = ctx.saved_tensors
    grad_qk, sums = _gradients(grad_q, grad_k, qk, q_gain, k_gain, ctx.eps, cos, sin)
    return grad_qk, None, *sums.sum(1), None, None, None  # summed here, where torch.compile can fuse it


norm_and_rotate.register_autograd(_backward, setup_context=_save_for_backward)
