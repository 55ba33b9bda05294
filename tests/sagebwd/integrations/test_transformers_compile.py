"""Models of transformers compile as one graph, whatever their masks, and train as in eager mode."""

import io
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from sagebwd.integrations.varlen import MEAN_LENGTH, ROOM
from sagebwd.metrics import relative_l2
from tests.sagebwd.integrations.tiny_models import (
    EXACT,
    assert_same_gradients,
    call,
    described,
    draw_tokens,
    make,
    packed,
    padded,
    train_step,
)

# Dynamo reads it
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

LAYER = {"num_hidden_layers": 1}
WINDOW = LAYER | {"sliding_window": 9}
BOTH = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}

#: By name: a model, changes of its config and its inputs.
COMPILED = {
    "no mask": ("llama-gqa", LAYER, dict.fromkeys(("input_ids", "labels"), draw_tokens(2, 33))),
    "two masks, padding": ("gemma3", BOTH, padded("gemma3", "right")),
    "window to both sides, padding": ("modernbert", {"local_attention": 14} | LAYER, padded("", "right")),
    "cu_seq_lens": ("llama-gqa", LAYER, packed("cu_seq_lens")),
    "positions with a mask of ones, window": ("mistral", WINDOW, packed("positions with a mask of ones")),
}


def compiled_step(model: nn.Module, **inputs: object) -> dict[str, torch.Tensor]:
    """The gradients of a model whose forward is one graph."""
    torch.compiler.reset()
    model.zero_grad()
    torch.compile(model, backend="eager", fullgraph=True)(**inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", COMPILED)
def test_a_model_is_one_graph_and_trains_as_in_eager_mode(name):
    model, changes, inputs = COMPILED[name]
    model = make(model, **changes)
    eager = train_step(model, "sagebwd-exact", **inputs)
    assert_same_gradients(compiled_step(model, **inputs), eager.gradients, EXACT)


@pytest.mark.parametrize("how", ["too many", "restarts in all rows", "boundaries that differ", "holes"])
def test_a_batch_that_a_graph_has_no_room_for_gives_nan(how):
    """In eager mode the first two are computed, and the others refused."""
    batch, n = (1, 2 * ROOM) if how == "too many" else (2, 8) if "rows" in how else (1, 8)
    q, k, v = torch.randn(3, batch, 2, n, 8).unbind()
    q.requires_grad_()
    cuts = {"cu_seq_lens_q": torch.tensor([0, 3, 8]), "cu_seq_lens_k": torch.tensor([0, 4, 8])}
    mask, arguments = {
        "too many": (None, {"position_ids": torch.zeros(1, n, dtype=torch.int64)}),
        "restarts in all rows": (None, {"position_ids": torch.arange(n)[None] % 5}),
        "boundaries that differ": (None, cuts),
        "holes": (described(torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]]), (3, 0)), {}),
    }[how]
    assert 2 * ROOM > 1 + 2 * ROOM // MEAN_LENGTH + ROOM
    torch.compiler.reset()
    out, _ = torch.compile(call, backend="eager", fullgraph=True)(q, k, v, mask, **arguments)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert out.isnan().all()
    assert gradient.isnan().any()


def test_a_model_is_exported_and_loaded_again_for_any_length():
    """Longer than its window, and shorter."""
    which, changes, inputs = COMPILED["two masks, padding"]

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make(which, **changes)
            self.model.set_attn_implementation("sagebwd")

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return self.model(*inputs, use_cache=False).logits

    model = Logits()
    inputs = tuple(inputs[key] for key in ("input_ids", "attention_mask") if key in inputs)
    lengths = (({1: torch.export.Dim("length")},) * len(inputs),)
    exported = torch.export.export(model, inputs, dynamic_shapes=lengths)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for n in (33, 10, 9, 2, 1):
        some = [x[:, -n:] for x in inputs]
        assert relative_l2(loaded(*some), model(*some)) < EXACT


def test_other_lengths_and_numbers_of_documents_need_one_more_graph():
    torch.compiler.reset()
    model = make("llama-gqa", **LAYER)
    model.set_attn_implementation("sagebwd-exact")
    graphs = CompileCounter()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for cuts in ([0, 5, 9], [0, 1, 3, 8, 15, 40], [0, 22, 31]):
        tokens, starts = draw_tokens(1, cuts[-1]), torch.tensor(cuts, dtype=torch.int32)
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cuts)])[None]
        inputs = {"position_ids": positions, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        inputs |= {"input_ids": tokens, "labels": tokens, "use_cache": False}
        assert relative_l2(compiled(**inputs).logits, model(**inputs).logits) < EXACT
    assert graphs.frame_count == 2
