"""Models of other projects that scripts.bench.training compares with this repository's Llama."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

import model.huggingface
from model.config import LlamaConfig
from model.llama import Llama


class HuggingFaceLlama(nn.Module):
    """transformers' LlamaForCausalLM with the weights of ours; `mask=False` keeps it from making a mask."""

    def __init__(self, config: LlamaConfig, mask: bool = True):
        super().__init__()
        self.config = config
        import transformers  # slow to import; only these baselines need it
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        transformers.AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
        transformers.AttentionMaskInterface.register("sdpa_causal", lambda *_, **__: None)  # None: causal
        ours = Llama(replace(config, qk_norm=False), F.scaled_dot_product_attention)
        attention = "sdpa" if mask else "sdpa_causal"
        with tempfile.TemporaryDirectory() as folder:
            model.huggingface.save(ours, folder)
            theirs = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation=attention)
        self.llama = theirs.train()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; (B, N) each."""
        return self.llama(tokens, labels=targets, shift_labels=targets, use_cache=False).loss


class NanoBlock(nn.Module):
    """A GPT-2 layer without biases. Its feed-forward has as many weights as a SwiGLU of width d_ffn."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        width, inner, self.d_head = config.d_model, config.d_ffn * 3 // 2, config.d_head
        self.widths = [heads * config.d_head for heads in (config.n_heads, config.kv_heads, config.kv_heads)]
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, sum(self.widths), bias=False)
        self.project = nn.Linear(self.widths[0], width, bias=False)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) → (B, N, C)."""
        parts = self.qkv(self.norm_1(x)).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.d_head)).transpose(1, 2) for part in parts)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.project(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class NanoGPT(nn.Module):
    """GPT-2 in the style of nanoGPT, with the sizes of `config` and a tied head."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_context, config.d_model)
        self.blocks = nn.ModuleList(NanoBlock(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.init_std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; (B, N) each."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


#: By the name that --baselines takes.
BASELINES: dict[str, Callable[[LlamaConfig], nn.Module]] = {
    "hf": HuggingFaceLlama,
    "hf-causal": lambda config: HuggingFaceLlama(config, mask=False),
    "nanogpt": NanoGPT,
}
