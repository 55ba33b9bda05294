"""Files of results: plain or compressed, whole or damaged; tables."""

import gzip
import json
import math

import pytest

from scripts.output import read_json, write_compressed


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
