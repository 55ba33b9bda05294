"""Cross-entropy of logits and its gradient in one Triton kernel.

A thread block reads a row of logits twice, once for the logsumexp and once for the gradient, which it writes.
On an NVIDIA H200, 8192 rows of 50,304 bfloat16 logits take 0.58 ms. torch.compile takes 0.95 ms, because it
computes the maximum in a separate pass.

Shapes: T tokens, V words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tuned on an H200: three algorithms, 2 to 32 warps, 512 to 65,536 words at a time, the whole row in
# registers, and persistent thread blocks. The fastest of 290 variants took 0.52 ms, with twice as many loops.
WORDS = 4096
WARPS = 8


def supports(logits: Tensor) -> bool:
    """Whether the kernel can take these logits: they are on a GPU."""
    return logits.is_cuda


@triton.jit
def _load(row, word, words, POLICY: tl.constexpr):
    """Logits of these words in float32, -inf past the last."""
    return tl.load(row + word, word < words, -float("inf"), eviction_policy=POLICY).to(tl.float32)


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _cross_entropy(
    logits,  # (T, V)
    targets,  # (T,)
    share,  # a scalar
    losses,  # (T,)
    grad,  # (T, V)
    words,  # V
    IGNORE_INDEX: tl.constexpr,
    WORDS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + token)
    counts = target != IGNORE_INDEX
    row, grad_row = logits + token * words, grad + token * words
    word = tl.arange(0, WORDS)

    # Each lane has its own maximum until the end, so that no warp waits for the others in the loop.
    largest = tl.full([WORDS], -1e38, tl.float32)  # finite: -inf less -inf would be NaN
    total = tl.zeros([WORDS], tl.float32)
    for begin in range(0, words, WORDS):
        x = _load(row, begin + word, words, "evict_last")
        larger = tl.maximum(largest, x)
        total = total * _exp(largest - larger) + _exp(x - larger)
        largest = larger
    overall = tl.max(largest, 0)
    total = tl.sum(total * _exp(largest - overall), 0)

    # A target outside the vocabulary makes the loss NaN: nothing is read outside the row, and training stops.
    exists = (target >= 0) & (target < words)
    hit = tl.load(row + target, exists, float("nan")).to(tl.float32)
    tl.store(losses + token, tl.where(counts, tl.log(total) + (overall - hit), 0.0))

    inverse, factor = 1.0 / total, tl.where(counts, tl.load(share), 0.0)
    for begin in range(0, words, WORDS):
        at = begin + word
        probability = _exp(_load(row, at, words, "evict_first") - overall) * inverse
        g = (probability - tl.where(at == target, 1.0, 0.0)) * factor
        tl.store(grad_row + at, g.to(grad.dtype.element_ty), at < words, eviction_policy="evict_first")


@torch.library.custom_op("llama::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, targets: Tensor, share: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Losses in nats (T,), float32, and `share` times the gradient of the logits, in their dtype.

    logits: (T, V); targets: (T,) int64, where ignore_index marks a token whose loss and gradient are zero.
    share: a float32 scalar. All sums are float32. A target outside the vocabulary makes its token's loss NaN.
    """
    logits, targets = logits.contiguous(), targets.contiguous()
    losses, grad = _empty_results(logits)
    tokens, words = logits.shape
    with torch.cuda.device_of(logits):
        _cross_entropy[(tokens,)](
            *(logits, targets, share, losses, grad, words, ignore_index), WORDS=WORDS, num_warps=WARPS
        )
    return losses, grad


def _empty_results(logits: Tensor) -> tuple[Tensor, Tensor]:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return logits.new_empty(len(logits), dtype=torch.float32), grad


@cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor, share: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    return _empty_results(logits)
