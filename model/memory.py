"""Bytes of memory that a forward and backward of a Llama take, counted tensor by tensor.

What autograd saves was read off the model: in eager mode with saved_tensors_hooks, compiled from the
partition that Inductor makes of the forward. tests/model/test_memory.py repeats both. Parameters, gradients
and optimizer are not counted here.

Shapes: B sequences, N tokens, T = B · N, H query heads, G key and value heads, D channels per head, C =
d_model, F = d_ffn, V = vocab_size.
"""

from dataclasses import dataclass

from model.backends import SavedBytes
from model.config import LlamaConfig
from model.loss import CHUNK

FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Pass:
    """How a micro-batch is computed.

    element: bytes of an element under autocast, 2 for bfloat16; without autocast 4.
    recompute: whether a block saves its input and attention's results only (activation checkpointing).
    """

    sequences: int
    context: int
    element: int
    compiled: bool
    on_gpu: bool
    recompute: bool = False

    @property
    def tokens(self) -> int:
        return self.sequences * self.context


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch.

    blocks: saved for backward by all blocks, without `attention`.
    attention: saved for backward by the attention of all blocks: q, k, v, O and logsumexp, or what replaces
        them.
    weight_copies: the blocks' weights in autocast's dtype, which are alive until the backward.
    working: what the output head, or the backward of a block, needs in addition, whichever is more.
    """

    blocks: int
    attention: int
    weight_copies: int
    working: int

    @property
    def total(self) -> int:
        return self.blocks + self.attention + self.weight_copies + self.working


def activations(config: LlamaConfig, work: Pass, attention: SavedBytes) -> Activations:
    """Memory of a micro-batch at its peak; `attention` is that of one block."""
    layers = config.n_layers
    block, kept = _saved_by_block(config, work), attention.total
    # The gradients of the feed-forward network's two inner tensors.
    backward = 2 * work.element * config.d_ffn * work.tokens
    if work.recompute:
        backward += block + attention.total - attention.results  # of the block that is computed again
        block, kept = _saved_with_recompute(config, work), attention.results
    return Activations(
        blocks=layers * block,
        attention=layers * kept,
        weight_copies=layers * _weight_copies(config, work),
        working=max(backward, head_bytes(config, work)),
    )


def _saved_with_recompute(config: LlamaConfig, work: Pass) -> int:
    """Of one block: its input."""
    return work.tokens * work.element * config.d_model


def _saved_by_block(config: LlamaConfig, work: Pass) -> int:
    """Of one block without attention itself, in bytes."""
    e, c = work.element, config.d_model
    per_token = 2 * e * c  # the normalised inputs of attention and of the feed-forward network
    if work.compiled:
        # Inputs of both norms with an inverse RMS; gate, up, and the product that `down` takes.
        per_token += 2 * (e * c + FLOAT32) + 3 * e * config.d_ffn
    else:
        per_token += 2 * _saved_by_norm(c, work) + 4 * e * config.d_ffn  # and silu(gate)
    return work.tokens * (per_token + _saved_before_attention(config, work)) + _rotary_tables(config, work)


def _saved_before_attention(config: LlamaConfig, work: Pass) -> int:
    """Per token, what QK-norm and rotary embedding save."""
    heads = config.n_heads + config.kv_heads
    if not config.qk_norm:
        return 0
    if work.compiled or work.on_gpu:  # one operator, which saves its input
        return work.element * heads * config.d_head
    return heads * _saved_by_norm(config.d_head, work)


def _saved_by_norm(width: int, work: Pass) -> int:
    """Per row of an RMSNorm in eager mode: its input in float32, the inverse RMS, on a CPU their product too.

    Without autocast the input is the residual stream itself, which nothing else saves.
    """
    return FLOAT32 * (width + 1) + (0 if work.on_gpu else FLOAT32 * width)


def _rotary_tables(config: LlamaConfig, work: Pass) -> int:
    """Sines with their signs, (N, 1, 2, D/2) in float32, which eager mode makes for Q and K of each block."""
    if work.compiled or (work.on_gpu and config.qk_norm):
        return 0
    return 2 * FLOAT32 * work.context * config.d_head


def _weight_copies(config: LlamaConfig, work: Pass) -> int:
    """Of one block's matrices, rounded for autocast. Compiled and recomputed, they are rounded again."""
    if work.element == FLOAT32 or (work.compiled and work.recompute):
        return 0
    return work.element * block_matrices(config)


def block_matrices(config: LlamaConfig) -> int:
    """Parameters of one block's matrices: all but the gains of its norms."""
    heads = config.n_heads + config.kv_heads
    return config.d_model * (2 * config.d_head * heads + 3 * config.d_ffn)


def head_bytes(config: LlamaConfig, work: Pass) -> int:
    """Of the last norm, the head and the loss at their peak; see model/loss.py."""
    weight, chunk = config.vocab_size * config.d_model, min(work.tokens, CHUNK)
    copy = 0 if work.element == FLOAT32 else work.element * weight
    if work.on_gpu:
        logits = 2 * work.element  # and their gradient
        # The stream before and after the norm, in float32 and rounded, and its gradient three times: in
        # chunks, whole, and scaled. Fitted: with 16 bytes in bfloat16 the estimate is that of an H200.
        per_token = 8 * work.element * config.d_model
    else:
        # Logits in float32, without their logsumexp, exponentials and targets, and targets as bool.
        logits = 4 * FLOAT32 + 1 + (0 if work.element == FLOAT32 else work.element)
        per_token = _saved_by_norm(config.d_model, work) + 2 * work.element * config.d_model
    return chunk * config.vocab_size * logits + FLOAT32 * weight + copy + work.tokens * per_token
