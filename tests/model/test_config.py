from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from model import backends
from model import config as shapes
from model.config import LlamaConfig, flops_per_token, parameter_count, problems
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


@pytest.mark.parametrize("changes", [{}, {"n_kv_heads": 2}, {"qk_norm": False, "tie_embeddings": False}])
def test_parameter_count_is_that_of_the_module(make_config, changes):
    config = make_config(**changes)
    with torch.device("meta"):  # shapes without memory
        model = Llama(config, F.scaled_dot_product_attention)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    inside = [p for name, p in model.named_parameters() if not name.startswith(("embed_tokens", "lm_head"))]
    assert shapes.non_embedding_parameter_count(config) == sum(p.numel() for p in inside)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"n_heads": 16, "n_kv_heads": 6}, ["model.n_kv_heads=6", "model.n_heads=16", "n_kv_heads=4 or 8"]),
        ({"n_kv_heads": 0}, ["model.n_kv_heads=0", "at least 1"]),
        ({"d_head": 63}, ["model.d_head=63 is odd", "d_head=62 or 64"]),
        ({"d_head": 1}, ["model.d_head=1 is odd", "d_head=2"]),
        ({"linear": "fp8"}, ["model.linear=fp8", "float8 or null"]),
        ({"linear": "float8", "d_ffn": 3080}, ["3080", "multiples of 16", "model.linear=null"]),
        ({"d_model": 1000}, ["model.d_model=1000", "model.n_heads=16", "d_model=992 or 1008"]),
        ({"vocab_size": 0}, ["model.vocab_size=0"]),
        ({"n_layers": -1}, ["model.n_layers=-1"]),
        ({"d_ffn": 0, "max_context": 0}, ["model.d_ffn=0", "model.max_context=0"]),
        ({"norm_eps": 0.0}, ["model.norm_eps=0.0", "positive"]),
        ({"rope_theta": float("inf")}, ["model.rope_theta=inf", "finite"]),
        ({"init_std": float("nan")}, ["model.init_std=nan"]),
        ({"qk_norm_gain": 0.0}, ["model.qk_norm_gain=0.0", "positive"]),
    ],
)
def test_a_model_that_cannot_be_built_names_the_setting_and_the_fix(changes, fragments):
    with pytest.raises(ValueError, match=r"^model\.") as caught:
        Llama(LlamaConfig(**changes), F.scaled_dot_product_attention)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


def test_config_files_are_valid():
    configs = {path.stem: read(path.stem) for path in CONFIGS.glob("*.yaml")}
    assert {name: parameter_count(config) for name, config in configs.items()} == PARAMETERS
    assert not [problem for config in configs.values() for problem in problems(config)]


def test_llama_325m_is_the_default_and_lists_every_setting():
    listed = set(OmegaConf.load(CONFIGS / "llama_325m.yaml"))
    assert listed == {field.name for field in fields(LlamaConfig)}
    assert asdict(read("llama_325m")) == asdict(LlamaConfig())


@pytest.mark.parametrize(("tied", "kv_heads"), [(True, 4), (False, 2)])
def test_flops_agree_with_torchs_counter(make_config, tied, kv_heads):
    """Torch counts every matrix product as it runs, and attention without the causal saving."""
    config = make_config(n_kv_heads=kv_heads, qk_norm=False, tie_embeddings=tied)
    shape = {"device": torch.device("cpu"), "dtype": torch.float32, "d_head": 10, "is_gqa": config.is_gqa}
    backend = backends.build({"backend": "fpa", "sdpa": "math"}, **shape)
    tokens = torch.randint(61, (2, 33))
    with FlopCounterMode(display=False) as counter:
        Llama(config, backend.attend)(tokens[:, :-1], tokens[:, 1:]).backward()
    counted = counter.get_total_flops() / (2 * 32)
    attention = 3 * 4 * 3 * 4 * 10 * 32
    norms = 6 * (2 * 3 + 1) * 24  # gains are weights, but multiply vectors, not matrices
    assert flops_per_token(config, context=32) == pytest.approx(counted - attention / 2 + norms, rel=1e-6)
