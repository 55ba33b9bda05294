"""Settings: what the presets are, and that every wrong one is refused with the fix."""

from dataclasses import replace

import pytest

from sagebwd import SageConfig
from sagebwd.config import MATMULS, PRESETS


def test_paper_is_the_literal_algorithm_and_the_default_differs_in_granularity_and_tile():
    config = SageConfig.paper()
    assert config.granularity == config.operand_scales == "block"
    assert config.smooth_k
    assert not any((config.smooth_q, config.smooth_v, config.unsigned_p))
    assert set(MATMULS) - set(config.int8_matmuls) == {"dp"}
    assert SageConfig() == replace(config, granularity="row", block_q=None, block_kv=None)


SHOWN = {
    "SageConfig(smooth_q=True)": SageConfig(smooth_q=True),
    "SageConfig.consistent(block_q=128)": SageConfig.consistent(block_q=128),
    "SageConfig.paper(int8_matmuls=())": replace(SageConfig.paper(), int8_matmuls=[]),
    "SageConfig(smooth_v=True)": SageConfig.low_bias(unsigned_p=False),  # nearer
    "SageConfig(int8_matmuls=('s_fwd', 'o'))": SageConfig(int8_matmuls=["o", "s_fwd", "o"]),  # in order
}


@pytest.mark.parametrize(("text", "config"), [*SHOWN.items(), *((None, x) for x in PRESETS.values())])
def test_is_shown_as_code_from_the_nearest_preset(config, text):
    assert eval(repr(config)) == config
    assert repr(config) == text if text else len(repr(config)) < 30


REFUSED = [
    ({"operand_scales": "row"}, "operand_scales is 'row'; set it to 'block' or 'token'"),
    ({"granularity": "token"}, "granularity is 'token'; set it to 'block' or 'row'"),
    ({"block_q": 0}, "block_q is 0; set it to a positive multiple of 16, such as 64, or to None"),
    ({"block_q": -64}, "block_q is -64"),
    ({"block_kv": 40}, "block_kv is 40; set it to a positive multiple of 16"),
    ({"block_kv": 64.0}, "block_kv is 64.0"),
    ({"block_kv": True}, "block_kv is True"),
    ({"smooth_k": "no"}, "smooth_k is 'no'; set it to true or false"),
    ({"int8_matmuls": ("s", "o")}, "int8_matmuls names s; choose from s_fwd, o"),
    ({"int8_matmuls": "o"}, "int8_matmuls is 'o'; give a list of products"),
    ({"int8_matmuls": None}, r"int8_matmuls is None; give a list of products"),
    ({"smooth_v": True, "int8_matmuls": ("dv",)}, "add 'o' to int8_matmuls or set smooth_v=False"),
    ({"unsigned_p": True, "int8_matmuls": ("s_fwd", "dk")}, "add 'o' or 'dv' to int8_matmuls or set unsi"),
    ({"unsigned_p": 255}, "unsigned_p is 255; set it to true or false"),
    ({"compensate_o": True}, "remove 'o' from int8_matmuls"),
    ({"dp_fp16_accumulation": True, "int8_matmuls": ("dp",)}, "remove 'dp' from int8_matmuls or set dp_"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_refuses_with_the_fix(settings, message):
    with pytest.raises(ValueError, match=message):
        SageConfig(**settings)


def test_only_an_int8_product_of_p_has_an_unsigned_p():
    config = SageConfig(unsigned_p=True, int8_matmuls=("s_fwd", "s_bwd", "dv", "dk"))
    assert [matmul for matmul in MATMULS if config.is_unsigned(matmul)] == ["dv"]
