"""Files of results: plain and compressed are read alike, and compressing is deterministic."""

import gzip

import pytest

from scripts.paper.result_files import (
    DamagedResult,
    Results,
    read_json,
    read_records,
    stored,
    write_compressed,
    write_compressed_json,
)


def test_plain_and_compressed_are_read_alike(tmp_path):
    (tmp_path / "plain.json").write_text('{"é": 1}', encoding="utf-8")
    write_compressed_json(tmp_path / "packed.json", {"é": 1})
    write_compressed(tmp_path / "lines.jsonl", '{"a": 1}\n{"a": 2}\n')
    results = Results(tmp_path)
    assert results.json("plain.json") == results.json("packed.json") == {"é": 1}
    assert results.metrics("lines.jsonl") == [{"a": 1}, {"a": 2}]
    assert results.name("packed.json") == "packed.json.gz"
    assert (results.has("plain.json", "packed.json"), results.has("gone.json")) == (True, False)
    with pytest.raises(FileNotFoundError):
        results.json("gone.json")


def test_the_same_content_gives_the_same_bytes_and_replaces_a_plain_file(tmp_path):
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    paths[0].write_text("{}")
    first, second = (write_compressed_json(path, {"x": [1.5, float("nan")]}) for path in paths)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[4:8] == bytes(4)  # gzip's date
    assert read_json(paths[0]) == {"x": [1.5, None]}
    assert not paths[0].exists()


def test_two_forms_of_one_file_are_refused(tmp_path):
    write_compressed_json(tmp_path / "a.json", {})
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DamagedResult, match=r"both .*a\.json and a\.json\.gz are there"):
        stored(tmp_path / "a.json")


DAMAGED = {
    "not gzip": b"no gzip",
    "cut short": gzip.compress(b"{}", mtime=0)[:-6],
    "not JSON": gzip.compress(b"{", mtime=0),
    "a list": gzip.compress(b"[]", mtime=0),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_named(tmp_path, content):
    (tmp_path / "a.json.gz").write_bytes(content)
    with pytest.raises(DamagedResult, match=r"a\.json\.gz (is damaged|holds a list)"):
        read_json(tmp_path / "a.json")


def test_damaged_records_are_named(tmp_path):
    write_compressed(tmp_path / "a.jsonl", '{"a": 1}\n{"a"')
    with pytest.raises(DamagedResult, match=r"a\.jsonl\.gz is damaged"):
        read_records(tmp_path / "a.jsonl")
