import csv
import dataclasses
import gc
import json
import os
import pickle
import warnings

import datasets
import fsspec
import pyarrow as pa
import pytest

from data import corpus, recipe
from data.corpus import open_corpus
from data.prepare import prepare
from data.recipe import Recipe
from data.settings import DataSettings
from data.sources import huggingface
from tests.data.test_corpus import composed
from tests.data.test_prepare import documents as prepared
from tests.data.test_sources import documents, write_parquet

pytestmark = pytest.mark.usefixtures("files")
CARD = """---
configs:
- config_name: small
  default: true
  data_files:
  - split: train
    path: small/train-*
  - split: test
    path: small/test.parquet
- config_name: large
  data_files: large/*
---
"""
TEXTS = [f"document {number}\n" + "wörd " * (number % 30) for number in range(250)]


@pytest.fixture(autouse=True)
def _files_left_open():
    """`datasets` leaves a file open that is not read to its end, and Python warns when it closes it."""
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        yield
        gc.collect()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The working folder: a dataset in the layout of the Hub, three files to train on; and a CSV file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for folder in ("set/small", "set/large"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "set" / "README.md").write_text(CARD)
    for index in range(3):
        write_parquet(f"set/small/train-{index}.parquet", TEXTS[80 * index :][:80], row_group_size=9)
    write_parquet("set/small/test.parquet", TEXTS[240:])
    write_parquet("set/large/0.parquet", ["another"])
    with open("corpus.csv", "w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(TEXTS)])
    return tmp_path


def dataset(name="set", **changed):
    return DataSettings(**{"source": "huggingface", "name": name, "tokenizer": "bytes"} | changed)


def prepared_texts(settings, split="train"):
    text = Recipe(settings)
    prepare(text)
    return prepared(text.folder, split)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_dataset_is_its_files_in_order(streaming, monkeypatch):
    monkeypatch.setattr(huggingface, "UNIT_BYTES", 5000)
    units = Recipe(dataset(config="small", streaming=streaming)).units
    assert len(units) == 3 if streaming else len(units) > 3
    sent = [pickle.dumps(unit) for unit in units]  # to processes, without their text
    assert max(map(len, sent)) < 20_000
    assert documents(map(pickle.loads, sent)) == TEXTS[:240]
    assert documents(Recipe(dataset(split="test", streaming=streaming)).units) == TEXTS[240:]
    assert documents(Recipe(dataset(config="large", streaming=streaming)).units) == ["another"]


def test_validation_text_in_a_split_of_its_own():
    settings = dataset(val_split="test")
    assert (prepared_texts(settings), prepared_texts(settings, "val")) == (TEXTS[:240], TEXTS[240:])
    opened = open_corpus(dataset(validation={"held": {"name": "set", "split": "test"}}, val_fraction=0.1))
    tokens = opened.validation[1].tokens
    text = opened.tokenizer.decode(tokens.window(0, len(tokens)))
    assert text == "".join(text + "<|endoftext|>" for text in TEXTS[240:])


def test_csv_is_prepared_on_first_use_and_again_when_it_changes():
    settings = composed("data=csv", "data.path=corpus.csv", "data.tokenizer=bytes", "data.val_fraction=0.1")
    opened = open_corpus(settings)
    assert len(opened.train) + len(opened.val) == sum(len(text.encode()) + 1 for text in TEXTS)
    with open("corpus.csv", "a") as file:
        file.write("1,more\n")
    assert open_corpus(settings).manifest.fingerprint != opened.manifest.fingerprint
    assert open_corpus(settings).manifest.documents("train") + opened.manifest.documents("val") >= 251


@pytest.fixture
def bucket():
    """write(i, texts) → memory://bucket/i.jsonl, which stands in for s3:// and hf://."""
    files = fsspec.filesystem("memory")

    def write(index, texts):
        with files.open(f"/bucket/{index}.jsonl", "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)

    yield write
    files.rm("/bucket", recursive=True)


def test_other_file_systems(files, bucket):
    for index in range(3):
        bucket(index, TEXTS[80 * index :][:80])
    settings = dataset("json", path="memory://bucket/*.jsonl", processes=1, val_fraction=0.1)
    with pytest.raises(ValueError, match=r"not here.*(?s:.)*data=huggingface .*memory://bucket"):
        open_corpus(settings)
    assert list(files.glob("tokens/*")) == []
    text = Recipe(settings)
    prepare(text)
    assert sorted(prepared(text.folder, "train") + prepared(text.folder, "val")) == sorted(TEXTS[:240])
    assert open_corpus(settings).manifest.fingerprint == text.fingerprint


def test_units_of_a_text_that_changed_in_between_are_made_anew(files):
    def write(index, word):
        (files / f"{index}.jsonl").write_text(json.dumps({"text": word}) + "\n" + '{"text": "same"}\n' * 20)

    for index in range(3):
        write(index, "old")
    settings = dataset("json", path=f"file://{files}/*.jsonl", processes=1, val_fraction=0.1)
    text = Recipe(settings)
    prepare(text)
    (text.folder / "manifest.json").unlink()  # as if it had been stopped
    write(2, "new")
    os.utime(files / "2.jsonl", (0, 0))
    assert "new" in prepared_texts(settings)
    write(1, "newer")
    assert "newer" not in prepared_texts(settings), "finished text is not looked up"


def test_each_setting_that_chooses_the_text_is_in_its_fingerprint():
    keys = ("name", "config", "split", "val_split", "revision", "column", "path", "val_path")
    same = {"streaming": True, "documents": 7, "root": "elsewhere", "processes": 3}
    plain = dataset("a/b")
    others = [dataclasses.replace(plain, **{key: "other/x"}) for key in keys]
    others += [dataclasses.replace(plain, streaming=False), dataset("set"), dataset("set", config="large")]
    prints = {Recipe(settings).fingerprint for settings in (plain, *others)}
    assert len(prints) == 1 + len(others)
    assert Recipe(dataclasses.replace(plain, **same)).fingerprint == Recipe(plain).fingerprint


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"config": "medium"}, "set: .*'medium' not found.*'small', 'large'"),
        ({"split": "val"}, "no split 'val'; it has train, test"),
        ({"name": "set/small", "split": "val"}, "no split 'val'; it has train, test"),  # without a card
        ({"column": "body"}, "no column 'body'; it has 'id', 'text'"),
        ({"column": "id"}, "'id' holds int64, not text"),
        ({"name": "csv"}, "csv: a format needs data.path=FILES"),
        ({"name": "csv", "path": "none.csv"}, "none.csv: no such file"),
        ({"name": "nobody/nothing"}, "nobody/nothing: .*nobody/nothing"),
        ({"name": "json", "path": "memory://none/*"}, "json .memory://none/.*: "),
        ({"name": "json", "path": "nowhere://x"}, "json .nowhere://x.*: .*nowhere"),
    ],
)
def test_what_is_not_there_is_named_before_a_folder_is_made(files, changed, complaint):
    with pytest.raises(ValueError, match=complaint):
        prepare(Recipe(dataset(**changed)))
    assert not (files / "tokens").exists()


@pytest.mark.parametrize(
    ("kind", "streaming"), [("csv", True), ("json", False), ("parquet", None), ("jsonl", None)]
)
def test_a_row_without_text_is_skipped_and_counted_in_each_source(files, kind, streaming):
    rows = ["", None, "NA", *[None] * 8, "two"]
    with open("rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(rows)])
    (files / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    write_parquet("rows.parquet", rows, row_group_size=2)
    path = "rows.jsonl" if kind == "json" else f"rows.{kind}"
    given = {"source": kind, "name": None} if streaming is None else {"name": kind, "streaming": streaming}
    text = Recipe(dataset(**given, path=path))
    manifest = prepare(text)
    assert sorted(prepared(text.folder, "train") + prepared(text.folder, "val")) == ["NA", "two"]
    assert list(manifest.losses()) == ["10 documents without text were skipped"]


def test_a_connection_that_is_lost_says_to_run_it_again(monkeypatch):
    units = Recipe(dataset()).units

    def lost(*_, **__):
        yield pa.table({"text": ["fine"]})
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets.IterableDataset, "iter", lost)
    message = r"set, file 2 of 3 could not be read .*no route to host.* run the same command again"

    with pytest.raises(OSError, match=message):
        documents(units[1:2])


def test_openwebtext_is_the_dataset_of_its_revision(monkeypatch):
    calls = []
    real = datasets.load_dataset_builder

    def load(name, config, **options):
        calls.append((name, config, options["revision"]))
        return real("set", "small")

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    settings = composed("data=openwebtext")
    assert documents(Recipe(settings).units) == TEXTS[:240]
    assert set(calls) == {("Skylion007/openwebtext", "plain_text", settings.revision)}


def test_the_hub_is_not_asked_for_the_names_of_tokens(monkeypatch, tmp_path):
    """On a cluster node without network, a run finds what was prepared."""
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: pytest.fail("asked the Hub"))
    for settings in (composed("data=openwebtext"), dataset("a/b"), dataset("csv", path="s3://x/*.csv")):
        settings.root = str(tmp_path)
        with pytest.raises(ValueError, match=r"its text is not here. Prepare it once"):
            open_corpus(settings)
    web = {"name": "a/b", "config": "c", "weight": 1}
    (text,) = recipe.training_texts(DataSettings(source="mixture", sources={"web": web}))
    assert corpus.command(text) == "python -m data.prepare data=huggingface data.name=a/b data.config=c"
