"""Greedy generation, with every cache, gives the tokens of "sdpa"."""

import pytest
import torch
from torch import nn

from sagebwd.metrics import relative_l2
from tests.sagebwd.integrations.tiny_models import (
    EXACT,
    assert_same_gradients,
    draw_tokens,
    make,
    train_step,
)

PROMPT, NEW = 12, 14


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 5},
        {"prefill_chunk_size": 5, "cache_implementation": "static"},
        {"num_beams": 2},
    ],
    ids=lambda how: "-".join(map(str, how)) or "default",
)
def test_greedy_generation_gives_the_tokens_of_sdpa(how):
    """Of prompts that are padded on the left."""
    model, prompt = make("qwen3", initializer_range=0.2).eval(), draw_tokens(3, PROMPT)
    mask = torch.ones_like(prompt)
    mask[0, :5], mask[2, :1] = 0, 0
    texts = []
    for attention in ("sdpa", "sagebwd-exact"):
        model.set_attn_implementation(attention)
        texts.append(model.generate(prompt, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **how))
    assert torch.equal(*texts)
    assert texts[0].shape == (3, PROMPT + NEW)
    assert len(texts[0][:, PROMPT:].unique()) > NEW // 2, "a text to tell apart"


@pytest.mark.parametrize(
    ("window", "how", "is_padded"),
    [
        (16, {}, True),
        (7, {}, False),
        (7, {"cache_implementation": "static"}, True),
        (16, {"cache_implementation": "static"}, False),
        (7, {"prefill_chunk_size": 5}, True),
        (16, {"use_cache": False}, True),
    ],
)
def test_generation_beyond_a_sliding_window_drops_old_keys_as_sdpa_does(window, how, is_padded):
    model = make("mistral", initializer_range=0.2, sliding_window=window).eval()
    prompt = draw_tokens(2, PROMPT)
    mask = torch.ones_like(prompt)
    mask[0, :7] = 0 if is_padded else 1
    settings = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    texts = []
    for attention in ("sdpa", "sagebwd-exact"):
        model.set_attn_implementation(attention)
        texts.append(model.generate(prompt, **how, **settings))
    assert torch.equal(*texts)


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
