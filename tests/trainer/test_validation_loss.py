from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from model.config import LlamaConfig
from model.llama import Llama
from trainer.distributed import Ranks
from trainer.loop import validation_loss

ALONE = Ranks(0, 1, torch.device("cpu"))
SMALL = LlamaConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=2, d_head=16, d_ffn=96, max_context=32)


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return Llama(SMALL, F.scaled_dot_product_attention)


def batches_of(*sizes, context=8):
    tokens = torch.randint(64, (sum(sizes), context + 1), generator=torch.Generator().manual_seed(1))
    return [(part[:, :-1], part[:, 1:]) for part in tokens.split(list(sizes))]


def evaluate(model, batches, micro_batch=4):
    return validation_loss(model, batches, micro_batch=micro_batch, ranks=ALONE, autocast=nullcontext)


class OneOfSeveral(Ranks):
    """A rank among others that have up to three batches."""

    def largest(self, value):
        return max(value, 3)


def test_ranks_of_a_sharded_model_call_it_equally_often(llama):
    calls = []
    llama.register_forward_hook(lambda *_: calls.append(1))
    for sizes in ((4, 4, 3), (4, 2), (1,)):
        calls.clear()
        batches = batches_of(*sizes)
        alone = evaluate(llama, batches)
        calls.clear()
        ranks = OneOfSeveral(0, 1, torch.device("cpu"))
        together = validation_loss(
            llama, batches, micro_batch=4, ranks=ranks, autocast=nullcontext, in_step=True
        )
        assert len(calls) == 3
        assert together == alone


@torch._dynamo.config.patch(error_on_recompile=True)
def test_a_smaller_batch_is_not_compiled_for(llama):
    torch.compiler.reset()  # what other tests compiled
    batches = batches_of(4, 4, 3, 2)
    expected = evaluate(llama, batches)
    assert evaluate(torch.compile(llama, backend="eager"), batches) == pytest.approx(expected, rel=1e-6)
    torch.compiler.reset()
