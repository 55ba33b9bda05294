"""Files of results: plain or compressed, whole or damaged; tables."""

import gzip
import json
import math

import pytest

from scripts.output import (
    DamagedResult,
    finite,
    read_json,
    read_result,
    replace_file,
    table,
    write_compressed,
)


def test_a_result_is_found_plain_or_compressed_and_never_twice(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "x.json") == {"a": 1}
    write_compressed(tmp_path / "x", {"a": math.inf})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json.gz"]
    assert read_json(tmp_path / "x.json") == {"a": None}
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DamagedResult, match="delete the older one"):
        read_json(tmp_path / "x.json")


def test_equal_content_gives_equal_bytes(tmp_path):
    first, again = (write_compressed(tmp_path / name, {"a": [1.5]}).read_bytes() for name in "xy")
    assert first == again
    assert json.loads(gzip.decompress(first)) == {"a": [1.5]}


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "damaged"), (b"[]", "not an object"), (b"{}", "it has no rows")]
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_what_is_no_result_is_refused(tmp_path, content, message, pack):
    path = tmp_path / ("x.json" if pack is bytes else "x.json.gz")
    path.write_bytes(pack(content))
    with pytest.raises(SystemExit, match=message):
        read_result(path)
    path.write_bytes(pack(b'{"rows": [1]}')[:-1])
    with pytest.raises(SystemExit, match="damaged"):
        read_result(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        replace_file(path, fail)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "old")]


def test_tables():
    assert finite({"a": [math.nan, 1.0]}) == {"a": [None, 1.0]}
    lines = table(["run", "loss", "words"], [["35m", "+0.1", "x"], ["325m", "", "1"]]).splitlines()
    assert lines[1] == "| --- | ---: | --- |"
