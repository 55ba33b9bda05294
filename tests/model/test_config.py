from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from model import backends
from model.config import LlamaConfig, check, flops_per_token, non_embedding_parameter_count, parameter_count
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
def test_config_file_is_valid(name):
    config = read(name)
    check(config)
    assert parameter_count(config) == PARAMETERS[name]


def test_llama_325m_is_the_default_and_lists_every_setting():
    listed = set(OmegaConf.load(CONFIGS / "llama_325m.yaml"))
    assert listed == {field.name for field in fields(LlamaConfig)}
    assert asdict(read("llama_325m")) == asdict(LlamaConfig())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flops_agree_with_torchs_counter(tied, kv_heads):
    """Torch counts every matrix product as it runs, and attention without the causal saving."""
    config = LlamaConfig(
        vocab_size=320,
        d_model=96,
        n_layers=3,
        n_heads=4,
        n_kv_heads=kv_heads,
        d_head=24,
        d_ffn=200,
        max_context=64,
        qk_norm=False,
        tie_embeddings=tied,
    )
    cpu = torch.device("cpu")
    backend = backends.build(
        {"backend": "fpa", "sdpa": "math"},
        device=cpu,
        dtype=torch.float32,
        d_head=24,
        is_gqa=kv_heads != 4,
    )
    tokens = torch.randint(320, (2, 65))
    with FlopCounterMode(display=False) as counter:
        Llama(config, backend.attend)(tokens[:, :-1], tokens[:, 1:]).backward()
    counted = counter.get_total_flops() / (2 * 64)
    attention = 3 * 4 * 3 * 4 * 24 * 64
    norms = 6 * (2 * 3 + 1) * 96  # gains are weights, but multiply vectors, not matrices
    assert flops_per_token(config, context=64) == pytest.approx(counted - attention / 2 + norms, rel=1e-6)
