"""Documents packed into one row train as if each were alone."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from sagebwd.metrics import relative_l2
from tests.sagebwd.integrations.tiny_models import (
    EXACT,
    LENGTHS,
    assert_same_gradients,
    draw_tokens,
    make,
    packed,
    train_step,
)


@pytest.mark.parametrize(
    ("name", "how", "attention"),
    [
        ("llama-gqa", "collator", "sagebwd-exact"),
        ("mistral", "positions", "sagebwd-exact"),
        ("llama-gqa", "positions with a cache", "sagebwd"),
        ("mistral", "positions with a mask of ones", "sagebwd"),
        ("llama-gqa", "positions with a mask of ones", "sagebwd-exact"),
        ("mistral", "cu_seq_lens", "sagebwd-exact"),
    ],
)
def test_packed_documents_train_as_if_each_were_alone(name, how, attention):
    model, inputs = make(name, **({"sliding_window": 9} if name == "mistral" else {})), packed(how)
    together = train_step(model, attention, **inputs)
    model.zero_grad()
    documents = inputs["input_ids"][0].split(LENGTHS)
    logits, loss = [], torch.tensor(0.0)
    for document in documents:
        out = model(input_ids=document[None])
        logits.append(out.logits[0].detach())
        loss += nn.functional.cross_entropy(out.logits[0, :-1], document[1:], reduction="sum")
    loss = loss / (sum(LENGTHS) - len(LENGTHS))
    loss.backward()
    assert together.loss == pytest.approx(loss.item(), rel=EXACT)
    assert relative_l2(together.logits[0], torch.cat(logits)) < EXACT
    alone = {name: p.grad for name, p in model.named_parameters()}
    assert_same_gradients(together.gradients, alone, EXACT)


def test_packed_rows_may_be_padded_too():
    model, inputs = make("llama-gqa"), packed("positions with a mask of ones")
    inputs = {name: torch.cat([x, x.roll(1, 1)]) for name, x in inputs.items()}
    inputs["position_ids"][1] = torch.tensor([0, *range(20), *range(20)])
    inputs["attention_mask"][:, -5:] = 0
    found = train_step(model, "sagebwd-exact", **inputs).logits
    for row, starts in ((0, (0, 13, 14, 34, 36)), (1, (0, 1, 21, 36))):
        for start, stop in pairwise(starts):
            alone = model(input_ids=inputs["input_ids"][row : row + 1, start:stop]).logits
            assert relative_l2(found[row, start:stop], alone[0].detach()) < EXACT


def test_positions_that_rise_by_more_than_one_or_stay_part_nothing():
    model, tokens = make("llama"), draw_tokens(1, 8)
    positions = torch.tensor([[0, 1, 5, 5, 5, 6, 9, 10]])
    inputs = {"input_ids": tokens, "labels": tokens, "position_ids": positions, "use_cache": True}
    truth, found = (train_step(model, attention, **inputs) for attention in ("sdpa", "sagebwd-exact"))
    assert relative_l2(found.logits, truth.logits) < EXACT
