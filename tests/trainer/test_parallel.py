import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model.backends import fpa
from model.config import LlamaConfig
from model.llama import Llama
from trainer import parallel
from trainer.distributed import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
SMALL = LlamaConfig(vocab_size=64, d_model=32, n_layers=3, n_heads=2, d_head=16, d_ffn=96, max_context=32)


class Counted(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[operator] = self.counts.get(operator, 0) + 1
        return operator(*args, **(kwargs or {}))


def tokens():
    """Two sequences: what is read, and what is to be said."""
    drawn = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def step(hardware):
    """Loss, gradients, and how often attention and matrix products ran."""
    torch.manual_seed(0)
    llama = Llama(SMALL, F.scaled_dot_product_attention)
    wrapped, whole = parallel.place(llama, hardware, ALONE, saved_operators=fpa.SAVED_OPERATORS)
    assert wrapped is whole is llama
    with Counted() as ran:
        loss = whole(*tokens())
        loss.backward()
    attention = ran.counts[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    return (
        loss.detach(),
        [p.grad for p in llama.parameters()],
        attention,
        ran.counts[torch.ops.aten.mm.default],
    )


def test_recomputation_changes_no_bit_and_repeats_all_but_attention(compose_settings):
    hardware = compose_settings("experiment=debug").hardware
    loss, gradients, attention, products = step(hardware)
    hardware.recompute = "blocks"
    loss_again, gradients_again, attention_again, products_again = step(hardware)
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    assert attention_again == attention == SMALL.n_layers
    assert products_again > products


def test_clipping_returns_the_norm_before():
    model = torch.nn.Linear(3, 2)
    model.weight.grad, model.bias.grad = torch.full((2, 3), 2.0), torch.full((2,), 1.0)
    assert parallel.clip_gradients(model, None).item() == pytest.approx(26**0.5)
    assert parallel.clip_gradients(model, 1.0).item() == pytest.approx(26**0.5)
    assert parallel.clip_gradients(model, 1.0).item() == pytest.approx(1.0, abs=1e-5)
    assert model.weight.grad.norm().item() == pytest.approx((24 / 26) ** 0.5, rel=1e-4)
