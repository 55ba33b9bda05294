"""A hand-written model that takes its attention as an argument, and what training it gives."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY = 64, 4, 97


class Block(nn.Module):
    """A transformer block in the manner of nanoGPT."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, width) to the same."""
        batch, n, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(WIDTH, dim=2)
        q, k, v = (t.view(batch, n, HEADS, WIDTH // HEADS).transpose(1, 2) for t in (q, k, v))
        out = self.attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        x = x + self.proj(out.transpose(1, 2).reshape(batch, n, WIDTH))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """Two blocks between embeddings and a head."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(80, WIDTH)
        self.blocks = nn.Sequential(Block(attention), Block(attention))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each token (B, N) from those before it."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = self.head(self.blocks(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def loss_and_gradients(attention: Callable[..., Tensor]) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model(attention)
    for block in model.blocks:
        nn.init.normal_(block.qkv.weight, std=0.12)  # logits with a standard deviation of about 1
    loss = model(torch.randint(VOCABULARY, (2, 70)))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def assert_trains_as(attention: Callable[..., Tensor], truth: Callable[..., Tensor], *, bound: float) -> None:
    """Loss and the gradient of every parameter, within ``bound`` (relative L2) of those with ``truth``."""
    expected, expected_gradients = loss_and_gradients(truth)
    loss, gradients = loss_and_gradients(attention)
    assert abs(loss - expected) < bound * expected
    for name, gradient in expected_gradients.items():
        assert gradients[name].abs().max() > 0, name
        assert (gradients[name] - gradient).norm() < bound * gradient.norm(), name
