"""Llama, with the attention computation as an argument.

Shapes: B sequences, N tokens, H query heads, G key and value heads (G divides H), D channels per head, C =
d_model, V = vocab_size. Parameters are float32; mixed precision comes from torch.autocast, under which matrix
products and attention run in bfloat16, the residual stream is stored in it, and the norms, the rotary
embedding and the loss compute in float32. (Do not call model.bfloat16(): it would also round the rotary
tables.)

Modules are named as in the Hugging Face checkpoints, so weights move there and back without renaming.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.backends import AttentionFn
from model.config import LlamaConfig, check
from model.kernels import norm_and_rotate as kernels
from model.loss import linear_cross_entropy


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis, computed in float32, in x's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Tables of the rotary position embedding: cosine and sine of position · frequency."""

    def __init__(self, max_context: int, d_head: int, theta: float):
        super().__init__()
        cos, sin = rotary_tables(max_context, d_head, theta)
        self.register_buffer("cos", cos.float(), persistent=False)
        self.register_buffer("sin", sin.float(), persistent=False)

    def forward(self, length: int, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `length` tokens, (N, 1, D/2) each; positions restart in each document."""
        if cu_seqlens is None:
            return self.cos[:length], self.sin[:length]
        tokens = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        starts = cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]
        return self.cos[tokens - starts], self.sin[tokens - starts]


def rotary_tables(positions: int, d_head: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines in float64, (positions, 1, D/2), of the angles position · theta^(-2i/D) of pair i.

    Float64 because a float32 frequency is off by 6e-8 of itself, which position 4096 turns into 2e-4 radians.
    """
    frequencies = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angles = torch.arange(positions, dtype=torch.float64)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + D/2) of x (B, N, H, D) by the tables' angles.

    The result has the wider of the two dtypes, so float32 tables make it float32 for a bfloat16 x.
    """
    pairs = x.unflatten(-1, (2, -1))
    # flip swaps the halves. Concatenating them would make torch.compile write them to memory, in float32.
    return (pairs * cos.unsqueeze(-2) + pairs.flip(-2) * torch.stack((-sin, sin), dim=-2)).flatten(-2)


def norm_and_rotate(x: Tensor, norm: RMSNorm | None, cos: Tensor, sin: Tensor) -> Tensor:
    """Q or K (B, N, H, D), its heads normalised if there is a norm, rotated, rounded once to its dtype."""
    if norm is None:
        return rotate(x, cos, sin).to(x.dtype)
    if kernels and kernels.supports(x):
        return kernels.norm_and_rotate(x, norm.weight, norm.eps, cos, sin)
    return rotate(norm(x.float()), cos, sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary embedding and, with qk_norm, an RMSNorm on every head of Q and K."""

    def __init__(self, config: LlamaConfig, attention: AttentionFn):
        super().__init__()
        self.d_head = config.d_head
        self.enable_gqa = config.is_gqa
        self.attend = attention
        self.q_proj = nn.Linear(config.d_model, config.n_heads * config.d_head, bias=False)
        self.k_proj = nn.Linear(config.d_model, config.kv_heads * config.d_head, bias=False)
        self.v_proj = nn.Linear(config.d_model, config.kv_heads * config.d_head, bias=False)
        self.o_proj = nn.Linear(config.n_heads * config.d_head, config.d_model, bias=False)
        self.q_norm = RMSNorm(config.d_head, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.d_head, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """x (B, N, C) → (B, N, C); with packed documents B is 1."""
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = norm_and_rotate(q, self.q_norm, cos, sin), norm_and_rotate(k, self.k_norm, cos, sin)
        # (B, N, H, D) in memory, passed as (B, H, N, D) views: no copy here, none in the kernels of SDPA.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        documents = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        out = self.attend(q, k, v, is_causal=True, enable_gqa=self.enable_gqa, **documents)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, H · D) → (B, N, H, D)."""
        return x.unflatten(-1, (-1, self.d_head))


class SwiGLU(nn.Module):
    """Feed-forward network: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ffn, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ffn, bias=False)
        self.down_proj = nn.Linear(config.d_ffn, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: LlamaConfig, attention: AttentionFn):
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.self_attn = Attention(config, attention)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cu_seqlens)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A decoder-only language model; `attention` computes softmax(QKᵀ/√D)V in every layer.

    Raises ValueError if the config is not a possible model (see model.config.check).
    """

    def __init__(self, config: LlamaConfig, attention: AttentionFn):
        super().__init__()
        check(config)
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, attention) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        # With tied embeddings there is no head module: the embedding's own weight is used.
        self.lm_head = (
            None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        )
        self.rotary = RotaryEmbedding(config.max_context, config.d_head, config.rope_theta)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw all matrices from N(0, init_std²), using torch's global generator.

        The gains of norms become one, those of QK-norm qk_norm_gain.

        The two matrices per layer that write to the residual stream are drawn 1/√(2 · n_layers) smaller, so
        that its variance at the start does not grow with depth (as in GPT-2; not published for the paper).
        """
        residual_std = self.config.init_std / (2 * self.config.n_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(self.config.qk_norm_gain)
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.normal_(0.0, residual_std)
            else:
                parameter.normal_(0.0, self.config.init_std)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Logits, or the loss if there are targets.

        tokens: (B, N) int64. targets: (B, N) int64, the token that follows each; -100 is ignored.
        cu_seqlens: (documents + 1,) int32, the boundaries of documents in the sequences laid end to end. A
        document attends to itself only, and its positions begin at 0. None is longer than max_context.
        Returns logits (B, N, V), or the mean cross-entropy over all targets in nats, a float32 scalar.
        Raises ValueError for more tokens than max_context, or targets of another shape than tokens.
        """
        length = tokens.shape[1]
        if targets is not None and targets.shape != tokens.shape:
            raise ValueError(
                f"targets of shape {tuple(targets.shape)} do not match tokens {tuple(tokens.shape)}; "
                "give one target per token"
            )
        if cu_seqlens is None and length > self.config.max_context:
            raise ValueError(
                f"{length} tokens are more than the rotary tables cover; shorten the sequence or raise "
                f"model.max_context={self.config.max_context}"
            )
        x = self.embed(tokens)
        if cu_seqlens is None:
            cos, sin = self.rotary(length)
        else:
            x = x.flatten(0, 1).unsqueeze(0)
            cos, sin = self.rotary(x.shape[1], cu_seqlens)
        for layer in self.layers:
            x = layer(x, cos, sin, cu_seqlens)
        return self.output(x.view(*tokens.shape, -1), targets)

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, N) → (B, N, C), the start of the residual stream, in its dtype."""
        x = self.embed_tokens(tokens)
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x

    def output(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Logits or loss of the last block's x (B, N, C)."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        x = self.norm(x)
        if targets is None:
            return F.linear(x, head.weight)
        return linear_cross_entropy(x.flatten(0, 1), head.weight, targets.flatten())
