"""The README's swap in a hand-written model: one call of ``scaled_dot_product_attention`` becomes ours."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sagebwd import SageConfig, sage_attention

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


@pytest.mark.parametrize(
    ("config", "loss_bound", "gradient_bound"),
    [(SageConfig(int8_matmuls=()), 1e-6, 1e-5), (SageConfig(), 1e-3, 0.08), (SageConfig.paper(), 1e-3, 0.08)],
    ids=["no-int8", "default", "paper"],
)
def test_the_swap_costs_the_rounding_and_keeps_every_gradient(config, loss_bound, gradient_bound):
    """The bounds of INT8 are those of tiny_models.py, for the same depth and width."""
    truth, true_gradients = loss_and_gradients(F.scaled_dot_product_attention)
    loss, gradients = loss_and_gradients(
        lambda *args, **kwargs: sage_attention(*args, **kwargs, config=config)
    )
    assert loss == pytest.approx(truth, rel=loss_bound)
    for name, gradient in true_gradients.items():
        assert gradients[name].abs().max() > 0, name
        assert (gradients[name] - gradient).norm() < gradient_bound * gradient.norm(), name


def test_the_swapped_model_trains():
    torch.manual_seed(0)
    model, tokens = Model(sage_attention), torch.randint(VOCABULARY, (4, 40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
