"""Values on a command line, against Hydra's own parser."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from common.overrides import override, readable

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


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("~/x.txt", "/home/u/x.txt"),
        ("bücher.txt", "bücher.txt"),
        ("x(1).txt", "x(1).txt"),
        ("k=v.txt", "k=v.txt"),
        ("it's.txt", "it's.txt"),
        ("日本/a\\'b(.txt", "日本/a\\'b(.txt"),
        ("a,(b.txt", "a,(b.txt"),
        ("corpus/*.parquet", "corpus/*.parquet"),
        ("'quoted, (text)'", "quoted, (text)"),
        ("3", 3),
        ("[1,2]", [1, 2]),
    ],
)
def test_paths_are_read_as_people_write_them(monkeypatch, typed, meant):
    monkeypatch.setenv("HOME", "/home/u")
    (word,) = readable([f"setting={typed}"])
    assert read(word) == meant


def test_in_a_sweep_a_comma_separates_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")
    flag, word = readable(["setting=~/a.txt,b.txt,x(1).txt", "-m"])
    assert flag == "-m"  # first: Hydra's argparse takes no option between settings
    swept = PARSER.parse_override(word).sweep_string_iterator()
    assert [read(f"setting={text}") for text in swept] == ["/home/u/a.txt", "b.txt", "x(1).txt"]


@pytest.mark.parametrize(
    "word", ["--help", "~experiment", "attention=choice(fpa,sagebwd)", "a=${b}", "x(1)", "a=[b"]
)
def test_other_words_are_left_as_they_are(word):
    assert readable([word]) == [word]
