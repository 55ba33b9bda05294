"""Models of transformers train with SageBwd as with "sdpa", with and without padding."""

import warnings

import pytest
import torch
import transformers
from torch import Tensor

from sagebwd.metrics import relative_l2
from tests.sagebwd.integrations.tiny_models import (
    EXACT,
    GQA,
    INT8_GRADIENT,
    INT8_LOSS,
    INT8_OUTPUT,
    MODELS,
    SIZES,
    VOCABULARY,
    assert_same_gradients,
    draw_tokens,
    make,
    packed,
    padded,
    train_step,
)

WINDOWED = {
    "mistral": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9},
    "gemma3": {"num_hidden_layers": 6, "sliding_window": 9},
    "modernbert": {"local_attention": 14, "global_attn_every_n_layers": 2},
}
#: A model, changes of its config, and the side of its padding, if it has any.
CASES = [
    *((name, {}, None) for name in MODELS),
    *((name, {}, ("left", "right")[n % 2]) for n, name in enumerate(MODELS)),
    *((name, changes, side) for name, changes in WINDOWED.items() for side in ("left", None)),
]


def check(model, inputs, attentions):
    """A training step is that of "sdpa" at the real tokens, to these bounds: loss, logits and gradients."""
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    truth = train_step(model, "sdpa", **inputs)
    for attention, (of_loss, of_logits, of_gradients) in attentions.items():
        found = train_step(model, attention, **inputs)
        assert found.loss == pytest.approx(truth.loss, rel=of_loss)
        assert relative_l2(found.logits[real], truth.logits[real]) < of_logits
        assert_same_gradients(found.gradients, truth.gradients, of_gradients)
    return relative_l2(found.logits[real], truth.logits[real])


@pytest.mark.parametrize(("name", "changes", "side"), CASES)
def test_a_model_trains_as_with_sdpa_but_for_the_rounding_of_int8(name, changes, side):
    inputs = padded(name, side or "left")
    if side is None:
        inputs = {"input_ids": inputs["input_ids"], "labels": inputs["input_ids"]}
    bounds = {"sagebwd-exact": (EXACT,) * 3, "sagebwd": (INT8_LOSS, INT8_OUTPUT, INT8_GRADIENT)}
    assert check(make(name, **changes), inputs, bounds) > EXACT


@pytest.mark.parametrize("is_padded", [False, True])
def test_sinks_train_as_with_eager(is_padded):
    """gpt-oss, whose layers see everything or a window."""
    sizes = SIZES | GQA | {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 7}
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    tokens = draw_tokens(2, 33)
    given = padded("gpt-oss", "left") if is_padded else {"input_ids": tokens, "labels": tokens}
    truth = train_step(model, "eager", **given)
    assert any(name.endswith("sinks") for name in truth.gradients)
    for attention, bound in (("sagebwd-exact", EXACT), ("sagebwd", INT8_GRADIENT)):
        assert_same_gradients(train_step(model, attention, **given).gradients, truth.gradients, bound)


# Padding


def test_a_hole_in_the_mask_hides_its_keys_and_parts_no_document():
    model, inputs = make("llama"), padded("llama", "right")
    inputs["attention_mask"][1, 10:14] = 0
    inputs["labels"][1, 10:14] = -100
    real = inputs["attention_mask"].bool()
    for positions in (None, (inputs["attention_mask"].cumsum(1) - 1).masked_fill(~real, 1)):
        truth = train_step(model, "sdpa", **inputs, position_ids=positions)
        found = train_step(model, "sagebwd-exact", **inputs, position_ids=positions)
        assert relative_l2(found.logits[real], truth.logits[real]) < EXACT


@pytest.mark.parametrize("n_target", [20, 33, 40])
def test_cross_attention_to_a_padded_source_is_as_with_sdpa(n_target):
    counts = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in counts.items()}
    sizes |= {"vocab_size": VOCABULARY, "d_model": 64, "dropout": 0.0, "init_std": 0.12, "pad_token_id": 0}
    others = dict.fromkeys(("eos_token_id", "decoder_start_token_id", "forced_eos_token_id"), 2)
    torch.manual_seed(0)
    config = transformers.BartConfig(**sizes, bos_token_id=1, **others)
    model, inputs = transformers.BartForConditionalGeneration(config), padded("bart", "right")
    # As many target as source tokens, 33, is a trap: a hidden key must not hide the query in its place.
    inputs["labels"] = draw_tokens(3, n_target, seed=1)
    truth, found = (train_step(model, attention, **inputs) for attention in ("sdpa", "sagebwd-exact"))
    assert relative_l2(found.logits, truth.logits) < EXACT


def test_a_window_over_padding_inside_the_text_is_not_computed_by_its_wrong_distances():
    model, inputs = make("mistral", sliding_window=9), padded("mistral", "right")
    inputs["attention_mask"][1, 10:14] = 0
    inputs["labels"][1, 10:15] = -100
    truth = train_step(model, "sdpa", **inputs)
    with pytest.raises(NotImplementedError, match="a sliding window over padding inside the text; pad left"):
        train_step(model, "sagebwd-exact", **inputs)
    with pytest.warns(UserWarning, match="a sliding window over padding inside the text"):
        found = train_step(model, "sagebwd-exact-or-full", **inputs)
    assert_same_gradients(found.gradients, truth.gradients, EXACT)


def to_gpu(inputs: dict[str, object]) -> dict[str, object]:
    return {name: x.to("cuda") if isinstance(x, Tensor) else x for name, x in inputs.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["even", "left", "right", "window", "positions", "cu_seq_lens"])
def test_on_a_gpu_a_model_trains_as_with_sdpa_but_for_the_rounding(how):
    name, window, side = ("mistral", {"sliding_window": 9}, "left") if how == "window" else ("qwen3", {}, how)
    sizes = {"hidden_size": 256, "head_dim": 64, "initializer_range": 0.06}
    model = make(name, **sizes, **window).to("cuda", torch.bfloat16)
    inputs = packed(how) if how in ("positions", "cu_seq_lens") else padded(name, side)
    if how == "even":
        del inputs["attention_mask"]
    check(model, to_gpu(inputs), {"sagebwd": (2 * INT8_LOSS, 2 * INT8_OUTPUT, 2 * INT8_GRADIENT)})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_on_a_gpu_masks_are_read_once_however_many_layers_there_are():
    waits = []
    for layers in (6, 12):
        sizes = {"num_hidden_layers": layers, "sliding_window": 9, "hidden_size": 256, "head_dim": 64}
        model, inputs = make("gemma3", **sizes).to("cuda", torch.bfloat16), to_gpu(padded("gemma3", "left"))
        train_step(model, "sagebwd", **inputs)  # compiles the kernels
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                model(**inputs, use_cache=False)  # a cache copies the window of each layer to the GPU
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing" in str(warning.message) for warning in said))
    assert waits[0] == waits[1]


@pytest.mark.gpu
def test_on_a_gpu_fp32_falls_back():
    model, inputs = make("llama").to("cuda"), to_gpu(padded("llama", "left"))
    truth = train_step(model, "sdpa", **inputs)
    with pytest.raises(NotImplementedError, match=r"q, k, v are float32 \(cast them to bfloat16"):
        train_step(model, "sagebwd", **inputs)
    with pytest.warns(UserWarning, match="LlamaAttention runs in full precision, not in INT8: this input"):
        found = train_step(model, "sagebwd-or-full", **inputs)
    assert_same_gradients(found.gradients, truth.gradients, 1e-3)
