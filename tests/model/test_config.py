from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from model.config import LlamaConfig, check, non_embedding_parameter_count, parameter_count
from model.llama import Llama

CONFIGS = Path(__file__).parents[2] / "configs" / "model"
# Worked out once from the modules' shapes; a change of the architecture has to be meant.
PARAMETERS = {
    "llama_325m": 324_185_600,
    "llama_1b": 1_197_814_016,
    "llama_35m": 34_659_712,
    "llama_tiny": 894_336,
    "llama_debug": 37_088,
}


def read(name: str) -> LlamaConfig:
    return OmegaConf.to_object(OmegaConf.merge(LlamaConfig, OmegaConf.load(CONFIGS / f"{name}.yaml")))


def built(config: LlamaConfig) -> Llama:
    with torch.device("meta"):  # shapes without memory
        return Llama(config, F.scaled_dot_product_attention)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 2},
        {"qk_norm": False},
        {"tie_embeddings": False},
        {"n_kv_heads": 1, "qk_norm": False, "tie_embeddings": False},
    ],
)
def test_parameter_count_is_that_of_the_module(make_config, changes):
    config = make_config(**changes)
    model = built(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    inside = [p for name, p in model.named_parameters() if not name.startswith(("embed_tokens", "lm_head"))]
    assert non_embedding_parameter_count(config) == sum(p.numel() for p in inside)


def test_paper_model_has_324_million_parameters():
    config = LlamaConfig()
    assert parameter_count(config) == 324_185_600
    assert sum(p.numel() for p in built(config).parameters()) == 324_185_600
    assert non_embedding_parameter_count(config) == 272_674_304
    assert parameter_count(LlamaConfig(vocab_size=50257)) == 324_137_472
    assert parameter_count(LlamaConfig(qk_norm=False)) == 324_183_040


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"n_heads": 16, "n_kv_heads": 6}, ["model.n_kv_heads=6", "model.n_heads=16", "n_kv_heads=4 or 8"]),
        ({"n_heads": 4, "n_kv_heads": 8}, ["model.n_kv_heads=8", "n_kv_heads=4"]),
        ({"n_kv_heads": 0}, ["model.n_kv_heads=0", "at least 1"]),
        ({"d_head": 63}, ["model.d_head=63 is odd", "d_head=62 or 64"]),
        ({"d_head": 1}, ["model.d_head=1 is odd", "d_head=2"]),
        ({"d_model": 1000}, ["model.d_model=1000", "model.n_heads=16", "d_model=992 or 1008"]),
        ({"d_model": 10}, ["model.d_model=10", "d_model=16"]),
        ({"vocab_size": 0}, ["model.vocab_size=0"]),
        ({"n_layers": -1}, ["model.n_layers=-1"]),
        ({"d_ffn": 0, "max_context": 0}, ["model.d_ffn=0", "model.max_context=0"]),
        ({"norm_eps": 0.0}, ["model.norm_eps=0.0", "positive"]),
        ({"rope_theta": float("inf")}, ["model.rope_theta=inf", "finite"]),
        ({"init_std": float("nan")}, ["model.init_std=nan"]),
        ({"qk_norm_gain": 0.0}, ["model.qk_norm_gain=0.0", "positive"]),
        ({"qk_norm_gain": 2.0, "qk_norm": False}, ["model.qk_norm_gain=2.0", "model.qk_norm=true"]),
    ],
)
def test_check_names_the_setting_and_the_fix(changes, fragments):
    with pytest.raises(ValueError, match=r"^model\.") as caught:
        check(LlamaConfig(**changes))
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_model_refuses_an_invalid_config(make_config):
    with pytest.raises(ValueError, match="d_head=7 is odd"):
        Llama(make_config(d_head=7), F.scaled_dot_product_attention)


def test_there_is_a_test_for_every_config_file():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_config_file_lists_every_setting_and_is_valid(name):
    assert set(OmegaConf.load(CONFIGS / f"{name}.yaml")) == {field.name for field in fields(LlamaConfig)}
    config = read(name)
    check(config)
    assert parameter_count(config) == PARAMETERS[name]


def test_llama_325m_is_the_default():
    assert asdict(read("llama_325m")) == asdict(LlamaConfig())


def test_wrong_type_and_unknown_name_are_refused():
    with pytest.raises(ValidationError):
        OmegaConf.merge(LlamaConfig, {"n_layers": "many"})
    with pytest.raises(Exception, match="n_layer"):
        OmegaConf.merge(LlamaConfig, {"n_layer": 3})
