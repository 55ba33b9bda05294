"""What SageBwd does not compute is refused with the fix, or computed in full precision and reported."""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers import masking_utils

import sagebwd
from sagebwd.metrics import relative_l2
from sagebwd.window import CAUSAL
from tests.sagebwd.integrations.tiny_models import (
    EXACT,
    SIZES,
    assert_same_gradients,
    call,
    described,
    draw_tokens,
    make,
    padded,
    train_step,
)

SEEN = (torch.rand(2, 1, 10, 10, generator=torch.Generator().manual_seed(0)) < 0.5) | torch.eye(10).bool()
#: By name: a model, its inputs beside tokens, and what SageBwd does not compute. More: test_families.py.
NOT_COMPUTED = {
    "dropout": (lambda: make("llama", attention_dropout=0.2), {}, r"attention dropout \(0.2\)"),
    "float64": (lambda: make("llama-gqa").double(), {}, "this input: q is float64"),
    "mask": (lambda: make("llama-gqa"), {"attention_mask": SEEN}, "a mask for each pair of tokens"),
}


@pytest.mark.parametrize(("build", "inputs", "reason"), NOT_COMPUTED.values(), ids=NOT_COMPUTED.keys())
def test_what_sagebwd_does_not_compute_is_refused_or_computed_in_full_precision(build, inputs, reason):
    model, tokens = build(), draw_tokens(2, 10)
    inputs = {**inputs, "input_ids": tokens, "labels": tokens}
    torch.manual_seed(1)  # of dropout
    truth = train_step(model, "sdpa", **inputs)
    with pytest.raises(NotImplementedError, match=f"{reason}.*; .*register sagebwd with fallback='sdpa'"):
        train_step(model, "sagebwd", **inputs)
    assert sagebwd.report().rows == ()
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=f"LlamaAttention runs in full precision, not in INT8: {reason}"):
        found = train_step(model, "sagebwd-or-full", **inputs)
    assert_same_gradients(found.gradients, truth.gradients, EXACT)


def test_a_model_that_computes_attention_itself_is_noticed_when_it_is_built():
    """DeBERTa calls neither the mask nor the attention that is registered, so nothing else would tell."""
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    config = transformers.DebertaV2Config(num_hidden_layers=1, num_attention_heads=2, **sizes)
    message = "attention that the model computes itself"
    with pytest.raises(NotImplementedError, match=f"DebertaV2Model: sagebwd does not compute {message}; use"):
        transformers.AutoModel.from_config(config, attn_implementation="sagebwd")
    config._attn_implementation = None
    with pytest.warns(UserWarning, match=f"DebertaV2Model runs in full precision, not in INT8: {message}"):
        model = transformers.AutoModel.from_config(config, attn_implementation="sagebwd-or-full")
    assert model.config._attn_implementation == "eager"
    assert [row.reason for row in sagebwd.report().rows] == [message]


def test_a_model_may_run_in_both_and_the_report_says_where():
    """One layer has a bias that its attention passes on, the other has none."""
    model, inputs = make("llama-gqa"), padded("llama-gqa", "left")
    truth = train_step(model, "sdpa", **inputs)
    bias = {"position_bias": torch.zeros(1, 4, 33, 33)}
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | bias), with_kwargs=True
    )
    with pytest.warns(UserWarning, match="LlamaAttention runs in full precision.*a position bias"):
        found = train_step(model, "sagebwd-exact-or-full", **inputs)
    assert_same_gradients(found.gradients, truth.gradients, EXACT)
    assert str(sagebwd.report()).splitlines()[1:] == [
        "LlamaAttention  0       1      full precision: a position bias (position_bias)",
        "LlamaAttention  1       1      INT8 (reference)",
    ]


def test_attention_weights_come_from_eager():
    model, inputs = make("llama-gqa"), {"input_ids": draw_tokens(2, 10)}
    model.set_attn_implementation("eager")
    truth = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("sagebwd-or-full")
    with pytest.warns(UserWarning, match="full precision, not in INT8: the attention weights"):
        found = model(**inputs, output_attentions=True).attentions
    assert len(found) == 2
    for weights, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(weights, expected)


def test_in_full_precision_too_the_queries_are_the_last_tokens(draw):
    q, k, v = (x.double() for x in draw(2, 6)[:3])
    documents = torch.tensor([[1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1]])
    with pytest.warns(UserWarning, match="full precision"):
        out, _ = call(q, k, v, described(documents, CAUSAL), name="sagebwd-or-full")
    seen = (documents[:, None, -2:, None] == documents[:, None, None]) & (documents != 0)[:, None, None]
    truth = scaled_dot_product_attention(q, k, v, seen & torch.ones(2, 6, dtype=torch.bool).tril(4))
    assert relative_l2(out, truth.transpose(1, 2)) < EXACT


@pytest.mark.parametrize(
    "make_mask", [torch.clone, lambda seen: torch.where(seen, 0.0, -1e9)], ids=["bool", "float"]
)
def test_a_ready_mask_of_documents_and_padding_runs_in_int8(make_mask):
    model, tokens = make("llama-gqa"), draw_tokens(2, 10)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [1] * 10])
    seen = (documents[:, None, :, None] == documents[:, None, None]) & (documents[:, None, None] > 0)
    seen = seen & torch.ones(10, 10, dtype=torch.bool).tril()
    labels = tokens.masked_fill(documents == 0, -100)
    labels[0, 2] = -100  # the last token of the padding would predict it
    inputs = {"input_ids": tokens, "labels": labels, "attention_mask": make_mask(seen)}
    truth = train_step(model, "sdpa", **inputs)
    found = train_step(model, "sagebwd-exact", **inputs)
    assert_same_gradients(found.gradients, truth.gradients, EXACT)
    assert [row.kernels for row in sagebwd.report().rows] == ["reference"]


def test_a_learned_bias_in_place_of_a_mask_keeps_its_gradient_though_it_starts_at_zero(draw):
    q, k, v, grad_out = draw(6)
    biases = [torch.zeros(1, 1, 6, 6, requires_grad=True) for _ in range(2)]
    with pytest.warns(UserWarning, match="a mask for each pair of tokens"):
        found, _ = call(q, k, v, biases[0], name="sagebwd-exact-or-full")
    truth = scaled_dot_product_attention(q, k, v, biases[1]).transpose(1, 2)
    for out in (found, truth):
        out.backward(grad_out.transpose(1, 2))
    assert relative_l2(biases[0].grad, biases[1].grad) < EXACT


def test_what_nobody_computes_is_refused_in_spite_of_the_fallback(draw):
    """A layer without an eager attention of its own, and sinks that are not the layer's."""
    q, k, v, _ = draw(6)
    layer = make("llama").model.layers[0].self_attn
    for reason, name, arguments in (
        ("soft-capping", "softcap", {"softcap": 30.0}),
        ("attention dropout", "s_aux", {"module": layer, "s_aux": torch.ones(2), "dropout": 0.1}),
    ):
        message = f"nor transformers' own attention for {name}"
        with pytest.warns(UserWarning, match=reason), pytest.raises(NotImplementedError, match=message):
            call(q, k, v, name="sagebwd-or-full", **arguments)


def test_queries_shared_by_the_batch_go_to_full_precision(draw):
    q, k, v, _ = draw(6)
    with pytest.warns(UserWarning, match="queries and keys of different batch sizes"):
        out, _ = call(q[:1], k, v, name="sagebwd-or-full", is_causal=False)
    assert relative_l2(out, scaled_dot_product_attention(q[:1], k, v).transpose(1, 2)) < EXACT


STARTS = torch.tensor([0, 4, 10])
ROW, PACKED = {"input_ids": draw_tokens(1, 10)}, ("cu_seq_lens_q", "cu_seq_lens_k")
#: Inputs of Mistral's forward, and a word of the message.
BAD_MODELS = [
    ({"output_attentions": True}, "output_attentions=False"),
    ({"attention_mask": torch.ones(2, 1, 10, 10)}, "a mask of padding"),
    (dict.fromkeys(PACKED, STARTS), "in one row"),
    ({"cu_seq_lens_q": STARTS}, "pass both"),
    *(
        (dict.fromkeys(PACKED, torch.tensor(starts)) | ROW, "start at 0, never fall, and end at 10")
        for starts in ([0, 4, 9], [1, 4, 10], [0, 6, 4, 10])
    ),
]


@pytest.mark.parametrize(("inputs", "message"), BAD_MODELS)
def test_a_model_that_asks_for_what_is_missing_is_refused(inputs, message):
    model = make("mistral").train()
    model.set_attn_implementation("sagebwd")
    with pytest.raises((NotImplementedError, ValueError), match=message):
        model(**{"input_ids": draw_tokens(2, 10), **inputs})


def test_custom_mask_functions_are_refused():
    model, embeds = make("llama"), torch.zeros(2, 10, 64)
    model.set_attn_implementation("sagebwd")
    for name in ("or_mask_function", "and_mask_function"):
        custom = {name: lambda batch, head, q, kv: (kv < 3) | (kv == q)}
        with pytest.raises(NotImplementedError, match=r"Llama: .* queries see some of 10 keys, neither"):
            masking_utils.create_causal_mask(model.config, embeds, None, past_key_values=None, **custom)


#: Queries and keys, and what is passed with them.
BAD_CALLS = [
    *(
        ((6, 6), {name: torch.ones(1)})
        for name in ("softcap", "sinks", "position_bias", "head_mask", "indices", "cache")
    ),
    ((6, 6), {"sliding_window": 5}),
    ((6, 6), {"dropout": 0.5}),
    ((6, 6), {"module": SimpleNamespace(sinks=torch.ones(2))}),
    ((6, 6), {"module": SimpleNamespace(scale_attn_by_inverse_layer_idx=True)}),
    ((6, 6), {"module": SimpleNamespace(scale_attn_weights=False)}),
    ((2, 6), {}),  # queries after unknown keys
    ((2, 6), {"is_causal": False} | dict(zip(PACKED, map(torch.tensor, ([0, 2], [0, 6])), strict=True))),
    ((6, 6), dict(zip(PACKED, map(torch.tensor, ([0, 6], [0, 3, 6])), strict=True))),
    ((2, 2), {"attention_mask": torch.tensor([[True, False], [True, True]])}),  # of rows and keys
    ((6, 6), {"attention_mask": described(torch.ones(2, 7), CAUSAL)}),
    *(
        ((6, 6), {"attention_mask": mask})
        for mask in (torch.ones(2, 6), torch.ones(2, 6).bool(), torch.ones(2, 6, 6).int(), object())
    ),
]


@pytest.mark.parametrize(("lengths", "arguments"), BAD_CALLS)
def test_what_would_change_the_result_is_refused(draw, lengths, arguments):
    q, k, v, _ = draw(*lengths, batch=1 if "cu_seq_lens_q" in arguments else 2)
    arguments = dict(arguments)
    mask = arguments.pop("attention_mask", None)
    with pytest.raises((NotImplementedError, ValueError)):
        call(q, k, v, mask, **arguments)


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
    with pytest.raises(NotImplementedError, match="does not compute the argument temperature"):
        call(q, k, v, module=Layer(make("llama").config, 0), temperature=2.0)
