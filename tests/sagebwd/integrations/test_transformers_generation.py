"""Greedy generation, with every cache, gives the tokens of "sdpa"."""

import pytest
import torch
from torch import nn

from sagebwd.metrics import relative_l2
from tests.sagebwd.integrations.tiny_models import EXACT, assert_same_gradients, draw_tokens, make, train_step

PROMPT, NEW = 12, 14


#: A model, maybe with a window, settings of the generation, and how many tokens of each prompt are padding.
QWEN, STATIC, CHUNKS = ("qwen3", {}), {"cache_implementation": "static"}, {"prefill_chunk_size": 5}
SHORT, LONG = (("mistral", {"sliding_window": n}) for n in (7, 16))
CASES = [
    (QWEN, {}, (5, 0, 1)),
    (QWEN, {"use_cache": False}, (5, 0, 1)),
    (QWEN, STATIC, (5, 0, 1)),
    (QWEN, CHUNKS, (5, 0, 1)),
    (QWEN, CHUNKS | STATIC, (5, 0, 1)),
    (QWEN, {"num_beams": 2}, (5, 0, 1)),
    (LONG, {}, (7, 0)),
    (SHORT, {}, (0, 0)),
    (SHORT, STATIC, (7, 0)),
    (LONG, STATIC, (0, 0)),
    (SHORT, CHUNKS, (7, 0)),
    (LONG, {"use_cache": False}, (7, 0)),
]


@pytest.mark.parametrize(("model", "how", "padding"), CASES, ids=str)
def test_greedy_generation_gives_the_tokens_of_sdpa(model, how, padding):
    """Of prompts that are padded on the left."""
    name, changes = model
    model, prompt = make(name, initializer_range=0.2, **changes).eval(), draw_tokens(len(padding), PROMPT)
    mask = (torch.arange(PROMPT) >= torch.tensor(padding)[:, None]).long()
    settings = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    texts = []
    for attention in ("sdpa", "sagebwd-exact"):
        model.set_attn_implementation(attention)
        texts.append(model.generate(prompt, **how, **settings))
    assert torch.equal(*texts)
    assert texts[0].shape == (len(padding), PROMPT + NEW)
    assert len(texts[0][:, PROMPT:].unique()) > NEW // 2, "a text to tell apart"


def test_a_cache_continues_where_it_stands_and_passes_gradients():
    model, tokens = make("llama-gqa"), draw_tokens(2, 20)
    truth = train_step(model, "sagebwd-exact", input_ids=tokens, labels=tokens)
    model.zero_grad()
    first = model(tokens[:, :11], use_cache=True)
    second = model(tokens[:, 11:], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, second.logits], 1)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert relative_l2(logits.detach(), truth.logits) < EXACT
    found = {name: p.grad for name, p in model.named_parameters()}
    assert_same_gradients(found, truth.gradients, EXACT)
