"""Files of results: plain or compressed, whole or damaged; tables."""

import gzip
import json
import math

import pytest

from scripts.output import finite, read_json, table, write_compressed


def test_a_result_is_found_plain_or_compressed_and_never_twice(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "x.json") == {"a": 1}
    write_compressed(tmp_path / "x", {"a": math.inf})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json.gz"]
    assert read_json(tmp_path / "x.json") == {"a": None}
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="delete the older one"):
        read_json(tmp_path / "x.json")


def test_equal_content_gives_equal_bytes(tmp_path):
    first, again = (write_compressed(tmp_path / name, {"a": [1.5]}).read_bytes() for name in "xy")
    assert first == again
    assert json.loads(gzip.decompress(first)) == {"a": [1.5]}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_what_is_no_result_is_refused(tmp_path, pack):
    path = tmp_path / ("x.json" if pack is bytes else "x.json.gz")
    for content, message in (
        (pack(b"{"), "damaged"),
        (pack(b"{}")[:-1], "damaged"),
        (pack(b"[]"), "an object"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_json(tmp_path / "x.json")


def test_tables():
    assert finite({"a": [math.nan, 1.0]}) == {"a": [None, 1.0]}
    lines = table(["run", "loss", "words"], [["35m", "+0.1", "x"], ["325m", "", "1"]]).splitlines()
    assert lines[1] == "| --- | ---: | --- |"
