import pytest
import torch
import torch.nn.functional as F

from model.config import LlamaConfig
from model.llama import Llama


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(0)


@pytest.fixture
def make_config():
    """Makes configs of models with a few thousand parameters, every size another one."""
    sizes = {"vocab_size": 61, "d_model": 24, "n_layers": 3, "n_heads": 4, "d_head": 10, "d_ffn": 40}
    return lambda **changes: LlamaConfig(**(sizes | {"max_context": 32} | changes))


@pytest.fixture
def make_model(make_config):
    """Makes small full-precision models whose logits are far from zero and whose gains are not all one."""

    def make(**changes):
        model = Llama(make_config(init_std=0.2, **changes), F.scaled_dot_product_attention)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        return model

    return make


@pytest.fixture
def tokens():
    return torch.randint(61, (3, 19))
