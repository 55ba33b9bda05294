"""The independent truth here is transformers: same weights, same logits, same gradients."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from model import huggingface
from model.config import differences
from model.llama import Llama

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def load(folder: Path) -> Llama:
    return huggingface.load(folder, F.scaled_dot_product_attention)


def theirs_of(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


SHAPES = [  # how transformers calls the model, our settings of it, the size of the files that it then writes
    (Qwen3ForCausalLM, {"n_kv_heads": 2}, "50GB"),
    (Qwen3ForCausalLM, {"tie_embeddings": False}, "10KB"),
    (LlamaForCausalLM, {"n_kv_heads": 1, "qk_norm": False, "rope_theta": 500.0, "norm_eps": 1e-2}, "10KB"),
]


@pytest.mark.parametrize(("kind", "shape", "shard"), SHAPES)
def test_transformers_computes_the_same_and_we_from_what_it_saves(
    make_model, tokens, tmp_path, kind, shape, shard
):
    ours = make_model(**shape)
    huggingface.save(ours, tmp_path / "ours")
    theirs = theirs_of(tmp_path / "ours")
    assert type(theirs) is kind
    assert theirs.config.bos_token_id is theirs.config.eos_token_id is None  # Llama's defaults: 1 and 2
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=3e-5, rtol=3e-5)

    # Their loss shifts the labels itself and leaves out the last position, as -100 does here.
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    loss, their_loss = ours(tokens, targets), theirs(tokens, labels=tokens).loss
    torch.testing.assert_close(their_loss, loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    their_loss.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    found = {name.removeprefix("model."): parameter.grad for name, parameter in theirs.named_parameters()}
    torch.testing.assert_close(found, gradients, atol=3e-5, rtol=1e-4)

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert (tmp_path / "theirs" / INDEX).exists() == (shard == "10KB")
    assert torch.equal(load(tmp_path / "theirs")(tokens), ours(tokens))


def test_weights_of_a_model_with_other_gains_fit_one_without(make_config, tokens, tmp_path):
    """The gain is of the initialisation: the file has the gains themselves."""
    model = Llama(make_config(qk_norm_gain=4.0), F.scaled_dot_product_attention)
    huggingface.save(model, tmp_path)
    again = load(tmp_path)
    assert differences(again.config, model.config) == []
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_saving_in_another_precision_rounds_the_weights_once(make_model, tmp_path, dtype):
    model = make_model()
    huggingface.save(model, tmp_path, dtype=dtype)
    assert f"torch.{json.loads((tmp_path / 'config.json').read_text())['dtype']}" == str(dtype)
    again = load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {*stored} == {f"model.{name}" for name, _ in model.named_parameters()}  # the tied head once
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight.to(dtype).float())
    assert next(model.parameters()).dtype == torch.float32


def test_older_spelling_of_rope_settings_is_read(make_model, tmp_path):
    huggingface.save(make_model(rope_theta=777.0), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(fields | {"rope_scaling": None}))
    assert load(tmp_path).config.rope_theta == 777.0


REFUSED = [  # a file, what it holds then (fields that change; None: it is missing), what the error has of it
    (CONFIG, None, "config.json"),
    (CONFIG, b"", "not valid JSON"),
    (CONFIG, b"\xff\xfe{}", "not text in UTF-8"),
    (CONFIG, b"[" * 100_000, "nested too deeply"),
    (CONFIG, b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    (CONFIG, b"null", "holds null, not an object"),
    (CONFIG, b"{}", "model_type=None, supported are llama, qwen3"),
    (CONFIG, b'{"model_type": "llama", "vocab_size": 3}', "no field 'hidden_size'"),
    # Models that compute something else.
    (CONFIG, {"model_type": "mistral"}, "model_type=mistral, supported are llama, qwen3"),
    (CONFIG, {"attention_bias": True}, "attention_bias=true, supported is false"),
    (CONFIG, {"mlp_bias": True}, "mlp_bias=true"),
    (CONFIG, {"hidden_act": "gelu"}, 'hidden_act="gelu", supported is "silu"'),
    (CONFIG, {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    (CONFIG, {"use_sliding_window": True}, "use_sliding_window=true"),
    (CONFIG, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    (CONFIG, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    (CONFIG, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling of type llama3"),
    (CONFIG, {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "of type linear"),
    (CONFIG, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    # Models that cannot be built.
    (CONFIG, {"hidden_size": 25}, "cannot be built: model.d_model=25 is not a multiple"),
    (CONFIG, {"num_attention_heads": 0, "head_dim": None}, "cannot be built: model.n_heads=0"),
    (CONFIG, {"rms_norm_eps": float("nan")}, "cannot be built: model.norm_eps=nan must be positive and fini"),
    # Values of another kind.
    (CONFIG, {"vocab_size": "61"}, 'vocab_size is "61", not a whole number; correct it, or copy or download'),
    (CONFIG, {"num_hidden_layers": True}, "num_hidden_layers is true, not a whole number"),
    (CONFIG, {"max_position_embeddings": "x" * 99}, f'max_position_embeddings is "{"x" * 59}…, not a whole'),
    (CONFIG, {"initializer_range": [0.1]}, "initializer_range is [0.1], not a whole number or a fraction"),
    (CONFIG, {"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false", not true or false'),
    (CONFIG, {"model_type": ["llama"]}, 'model_type is ["llama"], not a text'),
    (CONFIG, {"layer_types": [["full_attention"]]}, "supported is full_attention"),
    (CONFIG, {"rope_scaling": "linear"}, 'rope_scaling is "linear", not an object'),
    (CONFIG, {"rope_parameters": {"rope_theta": "10000"}}, 'rope_theta is "10000", not a whole number'),
    # Weights that do not fit.
    (CONFIG, {"num_hidden_layers": 4}, "layers.3.self_attn.q_proj.weight"),
    (CONFIG, {"num_hidden_layers": 2}, "layers.2.self_attn.q_proj.weight"),
    (CONFIG, {"vocab_size": 60}, "embed_tokens.weight"),
    (WEIGHTS, None, "model.safetensors"),
    (WEIGHTS, b"half a file", "model.safetensors is damaged"),
    (INDEX, b"[]", "holds [], not an object"),
    (INDEX, b"{}", "no field 'weight_map'"),
    (INDEX, b'{"weight_map": null}', "weight_map is null, not an object"),
    (INDEX, b'{"weight_map": {}}', "weight_map is empty"),
    (INDEX, b'{"weight_map": {"w": 3}}', "weight_map.w is 3, not the name of a .safetensors file in that fo"),
    (INDEX, b'{"weight_map": {"w": "../x.safetensors"}}', 'weight_map.w is "../x.safetensors"'),
    (INDEX, b'{"weight_map": {"w": "/etc/passwd"}}', 'weight_map.w is "/etc/passwd"'),
    (INDEX, b'{"weight_map": {"w": "config.json"}}', 'weight_map.w is "config.json"'),
    (INDEX, b'{"weight_map": {"w": "a\\u0000.safetensors"}}', "weight_map.w is"),
]


@pytest.mark.parametrize(("name", "content", "words"), REFUSED, ids=lambda value: repr(value)[:40])
def test_a_folder_that_is_no_model_of_ours_is_refused_by_file_and_field(
    make_model, tmp_path, name, content, words
):
    huggingface.save(make_model(), tmp_path)
    file = tmp_path / name
    if isinstance(content, dict):
        content = json.dumps(json.loads(file.read_text()) | content).encode()
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=name.removesuffix(".index.json")) as caught:
        load(tmp_path)
    assert words in str(caught.value)


def test_a_shard_that_is_missing_or_holds_another_weight_is_named(make_model, tmp_path):
    huggingface.save(make_model(), tmp_path / "ours")
    theirs_of(tmp_path / "ours").save_pretrained(tmp_path, max_shard_size="10KB")
    *_, last = sorted(tmp_path.glob("model-*.safetensors"))
    shard = load_file(last)
    save_file({f"{name}_": tensor for name, tensor in shard.items()}, last)
    with pytest.raises(ValueError, match=r"do not fit its config\.json"):
        load(tmp_path)
    last.unlink()
    with pytest.raises(FileNotFoundError, match=last.name):
        load(tmp_path)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, INDEX])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_and_not_waited_for(make_model, tmp_path, name, make):
    huggingface.save(make_model(), tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is not a regular file; replace it"):
        load(tmp_path)


def test_links_to_files_are_read(make_model, tmp_path):
    """The cache of the Hugging Face Hub is made of them."""
    huggingface.save(make_model(), tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    load(tmp_path / "snapshot")


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda x: x.to(torch.int32), "is int32, supported are float16, bfloat16, float32, float64"),
        (lambda x: x.index_fill(0, torch.tensor([1, 3]), torch.nan), "has 48 of 1464 values that are NaN"),
        (lambda x: x.double().index_fill(0, torch.tensor([1]), 1e300), "has 24 of 1464 values that are Na"),
    ],
)
def test_weights_that_are_not_finite_floating_point_are_refused(make_model, tmp_path, change, fragment):
    huggingface.save(make_model(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file(weights | {name: change(weights[name])}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: model\.embed_tokens\.weight") as caught:
        load(tmp_path)
    assert fragment in str(caught.value)


def test_failed_save_leaves_the_older_files_and_no_litter(make_model, tmp_path, monkeypatch):
    huggingface.save(make_model(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fill_the_disk(weights, path, metadata):
        Path(path).write_bytes(b"half a file")
        raise OSError("No space left on device")

    monkeypatch.setattr(huggingface, "save_file", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        huggingface.save(make_model(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
