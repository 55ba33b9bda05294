"""The independent truth is transformers' "sdpa": same weights, same output, same gradients.

With ``int8_matmuls=()`` nothing is quantized, and fp32 results must agree to its rounding: a wrong mask,
scale or head cannot hide behind the error of INT8. Weights are drawn so that logits have a standard deviation
of about 1; with the libraries' own, attention would be nearly a mean, whatever is wrong with it.
"""

import importlib
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from sagebwd import SageConfig, sage_attention
from sagebwd.integrations.packing import remember_last
from sagebwd.integrations.transformers import register

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GQA = {"num_key_value_heads": 2, "head_dim": 16}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
MODERNBERT = {"cls_token_id": 1, "sep_token_id": 2}

MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "llama-gqa": (transformers.LlamaForCausalLM, transformers.LlamaConfig, GQA),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, GQA),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, {"num_key_value_heads": 1}),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig, NO_DROPOUT),
    "modernbert": (transformers.ModernBertForMaskedLM, transformers.ModernBertConfig, MODERNBERT),
}

#: An order above the rounding of fp32 sums, four below what a wrong mask changes.
EXACT = 1e-5
#: An INT8 operand is off by up to 1/254 of the largest of its block, 3 to 4 of its standard deviations: 0.8%
#: of noise. A layer's output passes two quantized products and a gradient up to six, of two operands each, in
#: each of two layers; found are 2.2% and, with the paper's one scale per tile of P and dS, 5.7%.
INT8_LOSS, INT8_OUTPUT, INT8_GRADIENT = 1e-3, 0.03, 0.08


@pytest.fixture(autouse=True, scope="module")
def names() -> None:
    register()
    register("sagebwd-paper", SageConfig.paper())
    register("sagebwd-exact", SageConfig(int8_matmuls=()))


def make(name: str, **changes: object) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model_class, config_class, sizes = MODELS[name]
    return model_class(config_class(**(SIZES | sizes | changes)))


def draw_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def error(x: Tensor, truth: Tensor) -> float:
    return float((x - truth).norm() / truth.norm())


def train_step(model: nn.Module, attention: str, **inputs: Tensor) -> SimpleNamespace:
    """Loss, logits and the gradient of each parameter."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return SimpleNamespace(loss=out.loss.item(), logits=out.logits.detach(), gradients=gradients)


def assert_same_gradients(found: dict[str, Tensor], truth: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == truth.keys()
    for name, gradient in truth.items():
        if name.endswith("key.bias"):
            # Softmax ignores a shift of all keys: this gradient is zero but for rounding, in any attention.
            assert found[name].norm() < bound * truth[name.replace("key", "query")].norm(), name
        else:
            assert found[name].abs().max() > 0, name
            assert error(found[name], gradient) < bound, name


# Training, without padding


@pytest.mark.parametrize("name", MODELS)
def test_without_int8_a_model_trains_as_with_sdpa(name):
    model, tokens = make(name), draw_tokens(3, 33)
    truth = train_step(model, "sdpa", input_ids=tokens, labels=tokens)
    found = train_step(model, "sagebwd-exact", input_ids=tokens, labels=tokens)
    assert found.loss == pytest.approx(truth.loss, rel=EXACT)
    assert error(found.logits, truth.logits) < EXACT
    assert_same_gradients(found.gradients, truth.gradients, EXACT)


@pytest.mark.parametrize("attention", ["sagebwd", "sagebwd-paper"])
@pytest.mark.parametrize("name", MODELS)
def test_int8_costs_a_model_its_rounding_and_no_more(name, attention):
    model, tokens = make(name), draw_tokens(2, 60)
    truth = train_step(model, "sdpa", input_ids=tokens, labels=tokens)
    found = train_step(model, attention, input_ids=tokens, labels=tokens)
    assert found.loss == pytest.approx(truth.loss, rel=INT8_LOSS)
    assert EXACT < error(found.logits, truth.logits) < INT8_OUTPUT
    assert_same_gradients(found.gradients, truth.gradients, INT8_GRADIENT)


def test_a_training_step_in_bf16_keeps_the_dtype_and_every_gradient():
    model, tokens = make("qwen3").to(torch.bfloat16), draw_tokens(2, 40)
    found = train_step(model, "sagebwd", input_ids=tokens, labels=tokens)
    assert found.logits.dtype == torch.bfloat16
    assert all(x.abs().max() > 0 for x in found.gradients.values())


def test_a_decoder_with_is_causal_false_attends_in_both_directions():
    model, tokens = make("llama-gqa"), draw_tokens(2, 20)
    truth, found = (
        train_step(model, attention, input_ids=tokens, labels=tokens, is_causal=False)
        for attention in ("sdpa", "sagebwd-exact")
    )
    assert error(found.logits, truth.logits) < EXACT
    causal = train_step(model, "sagebwd-exact", input_ids=tokens, labels=tokens)
    assert error(causal.logits, truth.logits) > 0.1


def test_gradient_checkpointing_changes_nothing():
    model, tokens = make("llama-gqa").train(), draw_tokens(2, 40)
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    inputs = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
    plain = train_step(model, "sagebwd", **inputs)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    checkpointed = train_step(model, "sagebwd", **inputs)
    assert_same_gradients(checkpointed.gradients, plain.gradients, EXACT)


def test_a_few_steps_of_training_lower_the_loss():
    model, tokens = make("llama-gqa", initializer_range=0.02), draw_tokens(4, 32)
    model.set_attn_implementation("sagebwd")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


# Padding


def padded(name: str, side: str) -> dict[str, Tensor]:
    """Three rows of 33 tokens, of which 9, 0 and 20 are padding that the loss does not count."""
    tokens = draw_tokens(3, 33)
    mask = torch.ones_like(tokens)
    mask[0, :9], mask[2, :20] = 0, 0
    mask = mask if side == "left" else mask.flip(1)
    # A token that follows padding is not a target: the padding's query, which sees no key, would predict it,
    # and what attention returns for such a query is up to the implementation.
    is_target = (mask * mask.roll(1, 1)).bool()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(~is_target, -100)}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_is_as_with_sdpa_at_the_real_tokens(name, side):
    model, inputs = make(name), padded(name, side)
    real = inputs["attention_mask"].bool()
    truth = train_step(model, "sdpa", **inputs)
    found = train_step(model, "sagebwd-exact", **inputs)
    assert found.loss == pytest.approx(truth.loss, rel=EXACT)
    assert error(found.logits[real], truth.logits[real]) < EXACT
    assert_same_gradients(found.gradients, truth.gradients, EXACT)
    found = train_step(model, "sagebwd", **inputs)
    assert error(found.logits[real], truth.logits[real]) < INT8_OUTPUT
    assert_same_gradients(found.gradients, truth.gradients, INT8_GRADIENT)


def test_the_content_of_padding_changes_nothing():
    model, inputs = make("llama"), padded("llama", "left")
    before = train_step(model, "sagebwd", **inputs)
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 5)
    after = train_step(model, "sagebwd", **inputs)
    real = inputs["attention_mask"].bool()
    assert torch.equal(before.logits[real], after.logits[real])


def test_a_hole_in_the_mask_hides_its_keys_and_parts_no_document():
    model, inputs = make("llama"), padded("llama", "right")
    inputs["attention_mask"][1, 10:14] = 0
    inputs["labels"][1, 10:14] = -100
    real = inputs["attention_mask"].bool()
    for positions in (None, (inputs["attention_mask"].cumsum(1) - 1).masked_fill(~real, 1)):
        truth = train_step(model, "sdpa", **inputs, position_ids=positions)
        found = train_step(model, "sagebwd-exact", **inputs, position_ids=positions)
        assert error(found.logits[real], truth.logits[real]) < EXACT


def test_a_mask_of_ones_is_no_mask():
    model, tokens = make("llama"), draw_tokens(2, 20)
    plain = train_step(model, "sagebwd", input_ids=tokens, labels=tokens)
    ones = train_step(
        model, "sagebwd", input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)
    )
    assert torch.equal(plain.logits, ones.logits)


@pytest.mark.parametrize("n_target", [20, 33, 40])
def test_cross_attention_to_a_padded_source_is_as_with_sdpa(n_target):
    sizes = {
        f"{part}_{size}": n
        for part in ("encoder", "decoder")
        for size, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))
    }
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        dropout=0.0,
        init_std=0.12,
        **sizes,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    model, inputs = transformers.BartForConditionalGeneration(config), padded("bart", "right")
    # As many target as source tokens, 33, is a trap: a hidden key must not hide the query in its place.
    inputs["labels"] = draw_tokens(3, n_target, seed=1)
    truth, found = (train_step(model, attention, **inputs) for attention in ("sdpa", "sagebwd-exact"))
    assert error(found.logits, truth.logits) < EXACT


# Packing

LENGTHS = (13, 1, 20, 7)


def packed(how: str) -> dict[str, Tensor]:
    """Four documents in one row, told apart as ``how`` says."""
    tokens = draw_tokens(1, sum(LENGTHS))
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    labels = tokens.clone()
    labels[:, starts[:-1].long()] = -100
    inputs = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    if how == "collator":
        collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
        return collator([{"input_ids": document.tolist()} for document in tokens[0].split(LENGTHS)])
    return (
        inputs
        | {
            "positions": {"use_cache": False},
            "positions with a cache": {"use_cache": True},
            "positions with a mask of ones": {"attention_mask": torch.ones_like(tokens)},
            "cu_seq_lens": {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "use_cache": False},
        }[how]
    )


@pytest.mark.parametrize("attention", ["sagebwd-exact", "sagebwd"])
@pytest.mark.parametrize(
    "how",
    ["collator", "positions", "positions with a cache", "positions with a mask of ones", "cu_seq_lens"],
)
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_packed_documents_train_as_if_each_were_alone(name, how, attention):
    model, inputs = make(name), packed(how)
    together = train_step(model, attention, **inputs)
    model.zero_grad()
    documents = inputs["input_ids"][0].split(LENGTHS)
    logits, loss, n_labels = [], torch.tensor(0.0), sum(LENGTHS) - len(LENGTHS)
    for document in documents:
        out = model(input_ids=document[None])
        logits.append(out.logits[0].detach())
        loss = (
            loss + nn.functional.cross_entropy(out.logits[0, :-1], document[1:], reduction="sum") / n_labels
        )
    loss.backward()
    assert together.loss == pytest.approx(loss.item(), rel=EXACT)
    assert error(together.logits[0], torch.cat(logits)) < EXACT
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
            assert error(found[row, start:stop], alone[0].detach()) < EXACT


def test_positions_that_rise_by_more_than_one_or_stay_part_nothing():
    model, tokens = make("llama"), draw_tokens(1, 8)
    positions = torch.tensor([[0, 1, 5, 5, 5, 6, 9, 10]])
    inputs = {"input_ids": tokens, "labels": tokens, "position_ids": positions, "use_cache": True}
    truth, found = (train_step(model, attention, **inputs) for attention in ("sdpa", "sagebwd-exact"))
    assert error(found.logits, truth.logits) < EXACT


# On a GPU: the kernels, and tensors that must all be there


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("how", ["even", "left", "right", "positions", "cu_seq_lens"])
def test_on_a_gpu_a_model_trains_as_with_sdpa_but_for_the_rounding(how):
    model = make("qwen3", hidden_size=256, head_dim=64, initializer_range=0.06).to("cuda", torch.bfloat16)
    inputs = packed(how) if how in ("positions", "cu_seq_lens") else padded("qwen3", how)
    if how == "even":
        del inputs["attention_mask"]
    inputs = {name: x.to("cuda") if isinstance(x, Tensor) else x for name, x in inputs.items()}
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    truth = train_step(model, "sdpa", **inputs)
    found = train_step(model, "sagebwd", **inputs)
    assert found.loss == pytest.approx(truth.loss, rel=2 * INT8_LOSS)
    assert error(found.logits[real], truth.logits[real]) < 2 * INT8_OUTPUT
    assert_same_gradients(found.gradients, truth.gradients, 2 * INT8_GRADIENT)


# Generation

PROMPT, NEW = 12, 14


@pytest.mark.parametrize("is_padded", [False, True], ids=["even", "left-padded"])
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
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_greedy_generation_gives_the_tokens_of_sdpa(name, how, is_padded):
    model, prompt = make(name, initializer_range=0.2).eval(), draw_tokens(3, PROMPT)
    mask = torch.ones_like(prompt)
    if is_padded:
        mask[0, :5], mask[2, :1] = 0, 0
    texts = []
    for attention in ("sdpa", "sagebwd-exact"):
        model.set_attn_implementation(attention)
        texts.append(model.generate(prompt, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **how))
    assert torch.equal(*texts)
    assert texts[0].shape == (3, PROMPT + NEW)
    assert len(texts[0][:, PROMPT:].unique()) > NEW // 2, "a text to tell apart"


@pytest.mark.parametrize("is_padded", [False, True], ids=["even", "left-padded"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_beyond_a_sliding_window_drops_old_keys_as_sdpa_does(cache, is_padded):
    model, prompt = make("mistral", initializer_range=0.2, sliding_window=16).eval(), draw_tokens(2, PROMPT)
    mask = torch.ones_like(prompt)
    mask[0, :7] = 0 if is_padded else 1
    settings = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    texts = []
    for attention in ("sdpa", "sagebwd-exact"):
        model.set_attn_implementation(attention)
        texts.append(model.generate(prompt, cache_implementation=cache, **settings))
    assert torch.equal(*texts)


def test_int8_generation_starts_from_the_logits_of_sdpa_but_for_rounding():
    model, prompt = make("llama-gqa").eval(), draw_tokens(2, PROMPT)
    settings = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    texts = []
    for attention in ("sdpa", "sagebwd"):
        model.set_attn_implementation(attention)
        texts.append(model.generate(prompt, **settings))
    assert texts[1].sequences.shape == (2, PROMPT + NEW)
    assert EXACT < error(texts[1].logits[0], texts[0].logits[0]) < INT8_OUTPUT


def test_a_cache_continues_where_it_stands_and_passes_gradients():
    model, tokens = make("llama-gqa"), draw_tokens(2, 20)
    truth = train_step(model, "sagebwd-exact", input_ids=tokens, labels=tokens)
    model.zero_grad()
    first = model(tokens[:, :11], use_cache=True)
    second = model(tokens[:, 11:], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, second.logits], 1)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert error(logits.detach(), truth.logits) < EXACT
    found = {name: p.grad for name, p in model.named_parameters()}
    assert_same_gradients(found, truth.gradients, EXACT)


# The registered functions themselves


def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, name: str = "sagebwd", **arguments):
    """The registered attention in a layer that is causal unless ``is_causal`` says otherwise."""
    arguments.setdefault("module", nn.Identity())
    return AttentionInterface()[name](query=q, key=k, value=v, attention_mask=mask, **arguments)


def prepare_mask(name: str = "sagebwd", **arguments) -> Tensor | None:
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, "q_offset": 0, "device": "cpu"}
    return AttentionMaskInterface()[name](**(sizes | arguments))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("name", "config"), [("sagebwd", SageConfig()), ("sagebwd-paper", SageConfig.paper())]
)
def test_each_name_runs_sage_attention_with_its_own_config(draw, name, config, is_causal):
    q, k, v, _ = draw(40, heads=4, kv_heads=2)
    out, weights = call(q, k, v, name=name, scaling=0.3, is_causal=is_causal)
    settings = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True, "config": config}
    assert weights is None
    assert out.shape == (2, 40, 4, 24)
    assert out.is_contiguous()
    assert torch.equal(out, sage_attention(q, k, v, **settings).transpose(1, 2))


def test_registering_again_takes_the_new_config(draw):
    q, k, v, _ = draw(40)
    register("sagebwd-again")
    before, _ = call(q, k, v, name="sagebwd-again")
    register("sagebwd-again", SageConfig(int8_matmuls=()))
    after, _ = call(q, k, v, name="sagebwd-again")
    assert 1e-4 < error(after, before) < INT8_OUTPUT


@pytest.mark.parametrize("name", ["sdpa", "my-flash", "a/b", "", "paged|sagebwd", "mine"])
def test_a_name_that_means_something_else_is_refused(name, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", lambda: None)
    with pytest.raises(ValueError, match="name"):
        register(name)


def test_a_config_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"pass a sagebwd\.SageConfig"):
        register("sagebwd-x", {"smooth_k": True})


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "sagebwd.integrations.transformers")
    with pytest.raises(ImportError, match="pip install 'transformers>=5'"):
        importlib.import_module("sagebwd.integrations.transformers")


@pytest.mark.parametrize("mask", [torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), None], ids=["padded", "whole"])
def test_the_last_query_alone_sees_all_real_keys(draw, mask):
    q, k, v, _ = draw(1, 4)
    out, _ = call(q, k, v, None if mask is None else mask.int(), name="sagebwd-exact")
    shown = None if mask is None else mask[:, None, None].bool()
    assert error(out, scaled_dot_product_attention(q, k, v, shown).transpose(1, 2)) < EXACT


def test_a_mask_says_better_than_the_layer_whether_attention_is_causal(draw):
    q, k, v, _ = draw(6)
    hidden = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]])
    out, _ = call(q, k, v, -hidden.int(), name="sagebwd-exact", is_causal=True)
    truth = scaled_dot_product_attention(q[:1], k[:1], v[:1], hidden[:1, None, None].bool())
    assert error(out[:1], truth.transpose(1, 2)) < EXACT
    assert out[1].abs().max() == 0


@pytest.mark.parametrize(
    "documents",
    [
        {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]]).int()},
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
        {"position_ids": torch.tensor([[2, 3, 4, 2, 3, 4]])},
        {"position_ids": torch.tensor([[0, 3, 4, 1, 2, 3]])},
        dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 3, 3, 6])),
    ],
    ids=["mask", "restart", "restart at 2", "fall", "boundaries"],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_each_sign_of_a_new_document_is_enough(draw, documents, is_causal):
    q, k, v, _ = draw(6, batch=1)
    mask = documents.get("attention_mask")
    others = {name: x for name, x in documents.items() if name != "attention_mask"}
    out, _ = call(q, k, v, mask if is_causal or mask is None else -mask, is_causal=is_causal, **others)
    for half in (slice(0, 3), slice(3, 6)):
        alone, _ = call(q[:, :, half], k[:, :, half], v[:, :, half], is_causal=is_causal)
        assert error(out[:, half], alone) < EXACT


def test_position_ids_that_are_not_of_a_text_are_left_alone(draw):
    q, k, v, _ = draw(6)
    plain, _ = call(q, k, v)
    for shape in ((3, 2, 6), (2, 6, 2), (2, 5), (6,)):
        assert torch.equal(call(q, k, v, position_ids=torch.zeros(shape, dtype=torch.int64))[0], plain)


def test_hidden_tokens_give_zero_and_get_no_gradient(draw):
    q, k, v, grad_out = draw(6)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).int()
    out, _ = call(q, k, v, mask)
    assert out[0, :2].abs().max() == out[1].abs().max() == 0
    out.backward(grad_out.transpose(1, 2))
    for x in tensors:
        assert x.grad[0, :, :2].abs().max() == x.grad[1].abs().max() == 0
        assert x.grad[0, :, 3:].abs().amax(-1).min() > 0


def test_the_mask_function_returns_none_only_where_nothing_is_left_open():
    bidirectional = {"mask_function": masking_utils.bidirectional_mask_function}
    may_skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    ones = torch.ones(2, 6)
    for whole in ({}, {"attention_mask": ones}, {"q_length": 1, "q_offset": 5}, bidirectional | may_skip):
        assert prepare_mask(**whole) is None
    assert prepare_mask(allow_is_causal_skip=False).tolist() == [[1] * 6] * 2
    assert prepare_mask(q_length=3, q_offset=3).tolist() == [[1] * 6] * 2
    assert prepare_mask(**bidirectional).tolist() == [[-1] * 6] * 2
    # Cross-attention sees keys past the last query; a static cache says how many of its slots are filled.
    assert prepare_mask(q_length=3, **bidirectional).tolist() == [[-1] * 6] * 2
    filled = prepare_mask(q_length=3, q_offset=torch.tensor(1), **bidirectional)
    assert filled.tolist() == [[-1] * 4] * 2
    half = torch.tensor([[0, 1], [1, 1]])
    padded = prepare_mask(q_length=2, kv_length=2, attention_mask=half, **bidirectional, **may_skip)
    assert padded.tolist() == [[0, -1], [-1, -1]]


@pytest.mark.parametrize("q_offset", [3, torch.tensor(3)])
def test_empty_slots_of_a_static_cache_are_cut_off(draw, q_offset):
    q, k, v, _ = draw(2, 9)
    mask = prepare_mask(q_length=2, kv_length=9, q_offset=q_offset)
    assert mask.tolist() == [[1] * 5] * 2
    out, _ = call(q, k, v, mask, name="sagebwd-exact")
    seen = torch.ones(2, 5, dtype=torch.bool).tril(3)
    truth = scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], seen)
    assert error(out, truth.transpose(1, 2)) < EXACT


def test_the_mask_function_of_older_releases_gets_cache_position():
    old = {"q_length": None, "device": None, "kv_length": 9}
    assert prepare_mask(**old, cache_position=torch.arange(3, 5)).tolist() == [[1] * 5] * 2


@pytest.mark.parametrize("entries", [1, 2**24])
def test_mask_patterns_are_evaluated_whole_whatever_the_memory(monkeypatch, entries):
    module = sys.modules["sagebwd.integrations.transformers"]
    monkeypatch.setattr(module, "MASK_ENTRIES_AT_ONCE", entries)
    window = masking_utils.sliding_window_causal_mask_function
    assert prepare_mask(mask_function=window(6), local_size=6) is None
    with pytest.raises(NotImplementedError, match=r"some of 6 keys \(a window or chunk of 5\)"):
        prepare_mask(mask_function=window(5), local_size=5)
    last = {"q_length": 2, "q_offset": 4}
    assert prepare_mask(mask_function=window(6), **last).tolist() == [[1] * 6] * 2
    with pytest.raises(NotImplementedError, match="some of 6 keys"):
        prepare_mask(mask_function=window(5), **last)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    split = masking_utils.packed_sequence_mask_function(documents)
    causal = masking_utils.and_masks(split, masking_utils.causal_mask_function)
    assert torch.equal(prepare_mask(mask_function=causal), documents + 1)
    assert torch.equal(prepare_mask(mask_function=split), -documents - 1)


def test_the_last_layout_is_remembered_until_a_tensor_changes():
    calls = []
    remembering = remember_last(lambda *arguments: calls.append(arguments) or len(calls))
    x, same = torch.zeros(3, device="meta"), torch.zeros(3, device="meta")
    assert [remembering(x, 1), remembering(x, 1)] == [1, 1]
    assert [remembering(x, 2), remembering(same, 2), remembering(None, 2), remembering(x, 2)] == [2, 3, 4, 5]
    x.add_(1)
    assert remembering(x, 2) == 6
    with torch.inference_mode():
        assert [remembering(x, 2), remembering(x, 2)] == [7, 8]
    in_memory_of_numpy = torch.zeros(3)
    assert [remembering(in_memory_of_numpy), remembering(in_memory_of_numpy)] == [9, 10]


# Refusals: what sagebwd does not compute stops with the way out, in a model where one asks for it


TINY = {"num_hidden_layers": 1}
SINKS = transformers.GptOssConfig, TINY | {"num_local_experts": 2, "head_dim": 16, "num_key_value_heads": 2}
SOFTCAP = transformers.Gemma2Config, TINY | GQA
T5 = (
    transformers.T5Config,
    {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "dropout_rate": 0.0},
)
BLOOM = transformers.BloomConfig, {"vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SINKS, "attention sinks"),
        (SOFTCAP, "soft-capping"),
        (T5, "(position bias|computes attention itself)"),
        (BLOOM, "computes attention itself"),
    ],
    ids=["sinks", "softcap", "position-bias", "own-attention"],
)
def test_a_model_with_another_attention_is_refused(config, message):
    config_class, sizes = config
    config = config_class(**((SIZES if config_class not in (T5[0], BLOOM[0]) else {}) | sizes))
    kind = transformers.AutoModel
    model = kind.from_config(config, attn_implementation="sagebwd")
    inputs = {"input_ids": draw_tokens(2, 10)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with pytest.raises(NotImplementedError, match=f"{message}.*use attn_implementation"):
        model(**inputs)


def refusals() -> dict[str, tuple[dict, dict, str]]:
    """By name: changes of a Llama or Mistral config, inputs of its forward, and the message."""
    starts = torch.tensor([0, 4, 10])
    return {
        "dropout": ({"attention_dropout": 0.1}, {}, "attention dropout is 0.1.*set it to 0"),
        "window": ({"sliding_window": 9}, {}, "some of 10 keys .a window or chunk of 9.*shorten the input"),
        "weights": ({}, {"output_attentions": True}, "set output_attentions=False"),
        "4-D mask": ({}, {"attention_mask": torch.ones(2, 1, 10, 10)}, "no mask for each pair of tokens"),
        "hidden": ({}, {"attention_mask": torch.zeros(2, 10)}, "hides every token"),
        "rows": ({}, {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}, "2 rows, .* in one row"),
        "only q": ({}, {"cu_seq_lens_q": starts}, "pass both"),
    }


@pytest.mark.parametrize("name", refusals())
def test_a_model_that_asks_for_what_is_missing_is_refused(name):
    changes, inputs, message = refusals()[name]
    model = make("mistral", **changes).train()
    model.set_attn_implementation("sagebwd")
    with pytest.raises((NotImplementedError, ValueError), match=message):
        model(input_ids=draw_tokens(2, 10), **inputs)


@pytest.mark.parametrize("starts", [[0, 4, 9], [1, 4, 10], [0, 6, 4, 10]])
def test_boundaries_that_do_not_cover_the_row_are_refused(starts):
    model, starts = make("llama"), torch.tensor(starts)
    model.set_attn_implementation("sagebwd")
    with pytest.raises(ValueError, match="must start at 0, never fall, and end at 10"):
        model(input_ids=draw_tokens(1, 10), cu_seq_lens_q=starts, cu_seq_lens_k=starts)


def test_custom_mask_functions_are_refused():
    model, embeds = make("llama"), torch.zeros(2, 10, 64)
    model.set_attn_implementation("sagebwd")
    for name in ("or_mask_function", "and_mask_function"):
        custom = {name: lambda batch, head, q, kv: kv < 3}
        with pytest.raises(NotImplementedError, match="changed by or_mask_function or and_mask_function"):
            masking_utils.create_causal_mask(model.config, embeds, None, past_key_values=None, **custom)


@pytest.mark.parametrize(
    "arguments",
    [
        {name: torch.ones(1)}
        for name in ("softcap", "s_aux", "sinks", "position_bias", "head_mask", "indices", "cache")
    ]
    + [{"sliding_window": 5}, {"dropout": 0.5}, {"module": SimpleNamespace(sinks=torch.ones(2))}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_an_argument_that_would_change_the_result_is_refused(draw, arguments):
    q, k, v, _ = draw(6)
    with pytest.raises(NotImplementedError, match=r"use attn_implementation|set it to 0"):
        call(q, k, v, **arguments)


def test_an_argument_passes_unless_the_models_own_attention_reads_it(draw, monkeypatch):
    q, k, v, _ = draw(6)
    llama = sys.modules["transformers.models.llama.modeling_llama"]
    module = make("llama").model.layers[0].self_attn
    call(q, k, v, module=module, num_items_in_batch=3, use_cache=True, temperature=2.0, softcap=None)

    class Layer(llama.LlamaAttention):
        pass

    def eager(module, query, key, value, attention_mask, temperature=1.0, **kwargs):
        pass

    monkeypatch.setattr(llama, "eager_attention_forward", eager)
    with pytest.raises(NotImplementedError, match="takes temperature, which sagebwd does not support"):
        call(q, k, v, module=Layer(make("llama").config, 0), temperature=2.0)


def test_boundaries_that_do_not_fit_are_refused(draw):
    q, k, v, _ = draw(2, 6, batch=1)
    starts, others = torch.tensor([0, 2]), torch.tensor([0, 6])
    with pytest.raises(ValueError, match="1 rows, 2 queries and 6 keys"):
        call(q, k, v, is_causal=False, cu_seq_lens_q=starts, cu_seq_lens_k=others)
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        call(k, k, v, cu_seq_lens_q=others, cu_seq_lens_k=torch.tensor([0, 3, 6]))


@pytest.mark.parametrize(
    "scaling", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}]
)
def test_a_layer_that_leaves_its_scaling_to_the_attention_is_refused(draw, scaling):
    q, k, v, _ = draw(6)
    with pytest.raises(NotImplementedError, match="does not pass its scaling; update transformers"):
        call(q, k, v, module=SimpleNamespace(**scaling))
    call(q, k, v, module=SimpleNamespace(**scaling), scaling=0.1)


def test_several_queries_after_unknown_keys_are_refused(draw):
    q, k, v, _ = draw(2, 6)
    with pytest.raises(NotImplementedError, match="2 queries, 6 keys and no mask"):
        call(q, k, v)


def test_a_mask_that_does_not_fit_the_keys_is_refused(draw):
    q, k, v, _ = draw(6)
    with pytest.raises(ValueError, match=r"the mask is for \(batch, keys\) \(2, 7\), a layer has \(2, 6\)"):
        call(q, k, v, torch.ones(2, 7).int())


def test_a_mask_from_elsewhere_is_refused(draw):
    q, k, v, _ = draw(6)
    for mask in (torch.ones(2, 6), torch.ones(2, 6).bool(), torch.ones(2, 6, 6).int(), object()):
        with pytest.raises(NotImplementedError, match="pass one of padding"):
            call(q, k, v, mask)
