"""The README's swap in a hand-written model: one call of ``scaled_dot_product_attention`` becomes ours."""

import pytest
import torch
from torch.nn import functional as F

from sagebwd import SageConfig, sage_attention
from tests.sagebwd.integrations.hand_written import VOCABULARY, Model, loss_and_gradients


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
