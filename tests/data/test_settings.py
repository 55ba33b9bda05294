"""Settings that cannot work are named, with the fix, before anything is read or downloaded."""

import re
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from data.checks import check, without_effect
from data.settings import DataSettings, vocabulary_size

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "data"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"source": "pile"},
            "data.source=pile is unknown; choose one of openwebtext, parquet, jsonl, text, stdlib",
        ),
        ({"tokenizer": "gpt4"}, "data.tokenizer=gpt4 is unknown; choose one of gpt2, bytes"),
        ({"val_fraction": 0.0}, "data.val_fraction=0.0 must lie between 0 and 1"),
        ({"val_fraction": 1.0}, "data.val_fraction=1.0 must lie between 0 and 1"),
        ({"processes": 0}, "data.processes=0 must be at least 1"),
        ({"prepare_on_first_use_mb": -1}, "data.prepare_on_first_use_mb=-1 must not be negative"),
        ({"name": "a/b"}, "data.name='a/b' must be a plain folder name"),
        ({"name": ".."}, "data.name='..' must be a plain folder name"),
        ({"source": "text"}, "data=text needs data.path=FILE"),
        ({"source": "jsonl"}, "data=jsonl needs data.path=FILE"),
        ({"source": "text", "path": "/nowhere/book.txt"}, "data.path=/nowhere/book.txt: no such file"),
        ({"source": "parquet", "path": "/nowhere/*.parquet"}, "data.path=/nowhere/*.parquet: no such file"),
        ({"source": "stdlib", "path": "x"}, "data.path=x has no effect with data.source=stdlib"),
        ({"revision": None}, "data.source=openwebtext needs data.revision=COMMIT"),
    ],
)
def test_what_cannot_work_is_named(changed, message):
    settings = DataSettings(**{"revision": "abc"} | changed)
    with pytest.raises(ValueError, match=re.escape(message)):
        check(settings)


def test_validation_files_are_looked_for_too(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"data.val_path=nothing.txt: no such file"):
        check(DataSettings(source="text", path=str(tmp_path / "a.txt"), val_path="nothing.txt"))


def test_a_folder_without_such_files(tmp_path):
    with pytest.raises(ValueError, match=r"the folder holds no .jsonl or .jsonl.gz or .jsonl.zst file"):
        check(DataSettings(source="jsonl", path=str(tmp_path)))


def test_a_parquet_file_without_the_column(tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"no column data.column='text'; it has 'body'"):
        check(DataSettings(source="parquet", path=str(tmp_path)))
    check(DataSettings(source="parquet", path=str(tmp_path), column="body"))


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_config_fits_the_settings(file):
    merged = OmegaConf.merge(OmegaConf.structured(DataSettings), OmegaConf.load(file))
    settings = OmegaConf.to_object(merged)
    if settings.source in ("parquet", "jsonl", "text"):
        with pytest.raises(ValueError, match=r"needs data\.path"):
            check(settings)
    elif settings.source == "mixture":
        with pytest.raises(ValueError, match=r"data=mixture needs sources"):
            check(settings)
    else:
        check(settings)


def test_is_quick_and_offline(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("used the network"))
    start = time.perf_counter()
    check(DataSettings(revision="abc"))
    assert time.perf_counter() - start < 0.1


def test_vocabulary_sizes_are_the_tokenizers():
    from data.tokenizers import Bytes

    assert vocabulary_size("bytes") == Bytes().vocab_size
    assert vocabulary_size("gpt2") == 50257


def test_files_of_another_source_are_refused(tmp_path):
    for name, other in (("a.jsonl", "jsonl"), ("b.parquet", "parquet"), ("c.jsonl.gz", "jsonl")):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ValueError, match=f"{name}: {name} is not plain text; use data={other}"):
            check(DataSettings(source="text", path=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("word", "changed", "told"),
    [
        ("data.val_fraction=0.1", {"val_path": "b.txt"}, "data.val_path=b.txt; leave out one of them"),
        ("data.column=body", {}, "data.source=text, which has no columns; leave it out, or use data=parquet"),
        ("data.revision=abc", {}, "data.source=text; leave it out, or use data=openwebtext"),
        ("data.column=body", {"source": "stdlib", "path": None}, "data.source=stdlib, which has no columns"),
    ],
)
def test_what_has_no_effect_is_named_if_it_was_typed(tmp_path, monkeypatch, word, changed, told):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    key, value = word.removeprefix("data.").split("=")
    text = DataSettings(**{"source": "text", "path": "a.txt", "tokenizer": "bytes", key: value} | changed)
    text.val_fraction = float(text.val_fraction)
    check(text)  # as a configuration may set it
    assert list(without_effect(["steps=8", "data.tokenizer=bytes"], text)) == []
    (found,) = without_effect(["data.tokenizer=bytes", word], text)
    assert found.startswith(f"{word} has no effect with {told}")


def test_what_one_of_several_texts_reads_has_an_effect(tmp_path):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text('{"body": "x"}')
    further = {"b": str(tmp_path / "b.jsonl")}
    text = DataSettings(source="text", path=str(tmp_path / "a.txt"), tokenizer="bytes", column="body")
    assert [*without_effect(["data.column=body"], text)]
    text.validation = further
    assert not [*without_effect(["data.column=body", "data.val_fraction=0.0005"], text)]
