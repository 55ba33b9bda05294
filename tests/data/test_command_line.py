"""Values on a command line, against Hydra's own parser."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from data.command_line import override

PARSER = OverridesParser.create()


def read(word):
    """The value of an override, interpolations resolved as in a typed setting."""
    parsed = PARSER.parse_override(word)
    assert not parsed.is_sweep_override()
    config = OmegaConf.create({"setting": None})
    OmegaConf.update(config, "setting", parsed.value())
    return config.setting


@given(st.text(alphabet=st.sampled_from("abE10_ ,='\"$\\{}[]():./*+-%@?|~#!<>&;\n\tä"), max_size=8))
@example("true")
@example("NaN")
@example("null")
@example("1e3")
@example("glob(*)")
@example("range(1,3)")
@example("${oc.env:HOME}")
@example("\\\\${a}'\\")
def test_text_is_read_as_that_text(text):
    assert read(override("setting", text)) == text


@pytest.mark.parametrize("value", [None, True, False, 7, -3, 0.0005, 1e-30, 3e5])
def test_other_values_keep_their_type(value):
    found = read(override("setting", value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["runs/a-b_c.d", "../x", "/tmp/run", "bytes", "corpus/*.parquet"])
def test_plain_text_stays_plain(text):
    assert override("setting", text) == f"setting={text}"
