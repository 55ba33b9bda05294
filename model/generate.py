"""Sampling text from a model."""

import torch
from torch import Tensor

from model.llama import Llama

TEMPERATURE, TOP_K = 0.8, 50


@torch.no_grad()
def generate(
    model: Llama,
    tokens: Tensor,
    new_tokens: int,
    *,
    temperature: float = TEMPERATURE,
    top_k: int | None = TOP_K,
    vocab_size: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Continue each sequence by `new_tokens` sampled tokens.

    tokens: (B, N) int64 with N ≥ 1. Returns (B, N + new_tokens), the prompt included.
    temperature: divides the logits; 0 takes the most likely token. top_k: sample among so many most likely
    tokens; None: among all. vocab_size: the tokenizer's, if the model's own is padded beyond it, so that
    padding is never sampled. Raises ValueError for values outside these ranges.

    Every token takes a whole forward pass: there is no KV cache, because this is for samples during training,
    not for serving. The model sees the last max_context tokens. Sampling uses a generator of its own, so the
    random state of a training run does not change.
    """
    _check(tokens, new_tokens, temperature, top_k)
    generator = torch.Generator(tokens.device).manual_seed(seed)
    for _ in range(new_tokens):
        logits = model(tokens[:, -model.config.max_context :])[:, -1, :vocab_size].float()
        tokens = torch.cat((tokens, _sample(logits, temperature, top_k, generator)), dim=1)
    return tokens


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token for each row of logits (B, V), as (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    candidates, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    probabilities = (candidates / temperature).softmax(dim=-1)
    return ids.gather(-1, torch.multinomial(probabilities, num_samples=1, generator=generator))


def _check(tokens: Tensor, new_tokens: int, temperature: float, top_k: int | None) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"tokens of shape {tuple(tokens.shape)} are not a prompt; give (B, N) with at least one token "
            "each, such as the end-of-text token"
        )
    if new_tokens < 0:
        raise ValueError(f"new_tokens={new_tokens} must not be negative")
    if not 0 <= temperature < float("inf"):
        raise ValueError(
            f"temperature={temperature} must be finite and at least 0, which takes the most likely token"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1; None samples among all tokens")
