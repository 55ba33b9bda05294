import dataclasses
import fcntl
import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from common import files
from data import sources, workers
from data.prepare import PrepareSettings, run, tasks
from data.prepare import prepare as prepare_recipe
from data.recipe import Recipe
from data.settings import DataSettings
from data.shards import Manifest, UnitRecord
from data.sources import effective_fraction, in_validation, jsonl
from data.tokenizers import Bytes
from data.tokens import TokenShards
from data.workers import Task
from tests import cli, warm
from tests.cli import flip
from tests.processes import wait_until

TEXTS = [f"document {number} " + "word " * (number % 40) for number in range(600)]  # 70 kB


@pytest.fixture
def settings(tmp_path, monkeypatch):
    for module in (sources, jsonl):
        monkeypatch.setattr(module, "UNIT_BYTES", 8000)
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    root = str(tmp_path / "one")
    return DataSettings(source="jsonl", path=str(path), tokenizer="bytes", processes=1, root=root)


def prepare(settings):
    text = Recipe(settings)
    prepare_recipe(text)
    return text.folder


def elsewhere(settings, tmp_path, **changed):
    return dataclasses.replace(settings, root=str(tmp_path / "two"), **changed)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def documents(folder, split):
    tokens = TokenShards.open(folder, Manifest.read(folder), split, full=True)
    *texts, end = Bytes().decode(tokens.window(0, len(tokens))).split("<|endoftext|>")
    assert end == ""
    return texts


def test_every_document_is_in_one_split_in_order(settings):
    folder = prepare(settings)
    train, val = documents(folder, "train"), documents(folder, "val")
    assert sorted(train + val) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in set(train)]
    assert val == [text for text in TEXTS if text in set(val)]
    assert 20 < len(val) < 120  # a tenth, the data being small
    manifest = Manifest.read(folder)
    assert [manifest.documents(split) for split in ("train", "val")] == [len(train), len(val)]
    assert (len(manifest.shards["train"]), manifest.vocab_size) == (10, 257)


def test_any_number_of_processes_makes_the_same_bytes_once(settings, tmp_path, monkeypatch):
    one = prepare(settings)
    two = prepare(elsewhere(settings, tmp_path, processes=2))
    assert one.name == two.name
    monkeypatch.setattr(sources, "BATCH_BYTES", 500)
    three = prepare(dataclasses.replace(settings, root=str(tmp_path / "three")))
    assert contents(one) == contents(two) == contents(three)
    monkeypatch.setattr(workers, "run", lambda *_: pytest.fail("worked again"))
    prepare(settings)


def prepare_slowly(settings):
    sources.UNIT_BYTES = jsonl.UNIT_BYTES = 8000
    encode_batch = Bytes.encode_batch
    Bytes.encode_batch = lambda self, texts: time.sleep(0.1) or encode_batch(self, texts)
    prepare(settings)


def test_a_killed_preparation_continues_and_makes_the_same_bytes(settings, tmp_path):
    process = warm.SERVER.Process(target=prepare_slowly, args=(settings,))
    process.start()
    begun = ("*/unit_00003.json", "*/*.bin.*.tmp")  # the fourth unit is done, the fifth half written
    assert wait_until(lambda: all([*Path(settings.root).glob(name)] for name in begun), 30)
    process.kill()
    process.join()
    (folder,) = Path(settings.root).iterdir()
    assert not (folder / "manifest.json").exists()
    assert list(folder.glob("*.tmp")), "killed between units; nothing was half written"
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("*_0000[0-3].[bj]*[!p]")}
    assert prepare(settings) == folder
    undisturbed = prepare(elsewhere(settings, tmp_path))
    assert contents(folder) == contents(undisturbed)
    assert len(before) >= 8
    assert before == {name: (folder / name).stat().st_mtime_ns for name in before}


def test_spoilt_shards_and_records_alone_are_made_anew(settings):
    folder = prepare(settings)
    whole = contents(folder)
    modified = (folder / "train_00005.bin").stat().st_mtime_ns
    (folder / "train_00004.bin").unlink()
    os.truncate(folder / "train_00006.bin", 10)
    prepare(settings)
    assert contents(folder) == whole
    assert (folder / "train_00005.bin").stat().st_mtime_ns == modified

    (folder / "manifest.json").unlink()
    shards = '{"fingerprint": "0", "shards": {"train": %s, "val": null}}'
    for content in ('{"fingerprint": ', "[]", shards % 7, shards % '{"name": "a", "tokens": "many"}'):
        (folder / "unit_00003.json").write_text(content)
        with pytest.raises(ValueError, match=r"unit_00003.json is damaged .*; delete it"):
            prepare(settings)
    (folder / "unit_00003.json").unlink()
    prepare(settings)
    assert contents(folder) == whole


def test_a_name_that_is_taken_by_other_data_is_refused(settings):
    named = dataclasses.replace(settings, folder="mine")
    whole = contents(prepare(named))
    with pytest.raises(ValueError, match=r"mine holds .* \(different held_out\)"):
        prepare(dataclasses.replace(named, val_fraction=0.3))
    assert contents(Path(settings.root) / "mine") == whole


def test_waits_for_another_preparation_of_the_same_folder(settings, caplog):
    caplog.set_level("INFO")
    folder = Path(settings.root) / "mine"
    folder.mkdir(parents=True)
    thread = threading.Thread(target=prepare, args=(dataclasses.replace(settings, folder="mine"),))
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert not (folder / "manifest.json").exists()
        assert "another process is preparing" in caplog.text
    thread.join(30)
    assert (folder / "manifest.json").exists()


def test_unusable_text_is_named_and_nothing_passes_for_prepared(settings):
    settings.processes = 2
    with Path(settings.path).open("a") as file:
        file.write('{"body": "x"}\n')
    with pytest.raises(ValueError, match=r"texts.jsonl, line 601 has no key 'text'"):
        prepare(settings)
    (folder,) = Path(settings.root).iterdir()
    assert not (folder / "manifest.json").exists()
    assert not list(folder.glob("*.tmp"))
    assert not list(folder.glob("*_00009.*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_named_and_leaves_nothing_half_written(settings, tmp_path):
    (tmp_path / f"train_00000.bin.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"{tmp_path}: No space left on device.*data.root.* again"):
        dataclasses.replace(tasks(Recipe(settings))[0], folder=tmp_path).run(lambda *_: None)
    assert [file.name for file in tmp_path.iterdir()] == ["texts.jsonl"]


def test_a_wrong_number_of_documents_is_refused(settings):
    with pytest.raises(ValueError, match=r"has 600 documents instead of data.documents=601"):
        prepare(dataclasses.replace(settings, documents=601))
    prepare(dataclasses.replace(settings, documents=600))
    Path(settings.path).write_text('{"text": "alone"}\n')
    with pytest.raises(ValueError, match=r"no text is left for the train split"):
        prepare(settings)


def test_verify_reads_every_shard(settings, capsys):
    run(PrepareSettings(settings, verify=True))
    assert "verified, 59,106 + 7,684 tokens" in capsys.readouterr().out
    shard = next(Path(settings.root).glob("*/val_00002.bin"))
    flip(shard, 0)
    run(PrepareSettings(settings, verify=False))
    with pytest.raises(OSError, match=r"val_00002.bin has changed since it was written"):
        run(PrepareSettings(settings, verify=True))


def test_verify_reads_source_files_that_are_too_large_to_read_each_time(settings, monkeypatch):
    """Their identity is that of both ends; a byte in between is found by the checksum of the preparation."""
    monkeypatch.setattr(files, "FULL_HASH_LIMIT", 0)
    monkeypatch.setattr(files, "SAMPLE", 100)
    run(PrepareSettings(settings, verify=True))
    text = Path(settings.path)
    status, whole = text.stat(), text.read_bytes()

    def change(byte):
        text.write_bytes(whole)
        flip(text, byte)
        os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))

    manifest = Manifest.read(next(Path(settings.root).iterdir()))
    source = {"name": text.name, "bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    assert manifest.source_files == [source]
    change(len(whole) // 2)
    run(PrepareSettings(settings, verify=False))
    with pytest.raises(ValueError, match=r"texts.jsonl is not what .* was made from"):
        run(PrepareSettings(settings, verify=True))
    for end in (10, -10):
        change(end)
        assert Recipe(settings).fingerprint != manifest.fingerprint


def test_the_command_ends_with_a_message_and_without_a_traceback():
    for argument, answer in {
        "data=text": "data.prepare: data=text needs data.path=FILE",
        "dat=text": "dat=text: there is no setting 'dat'; did you mean data?",
    }.items():
        printed = cli.run([sys.executable, "data/prepare.py", argument], code=1)
        assert printed.startswith(answer)
        assert "Traceback" not in printed


def written(folder, batches, split=None):
    """The record of a unit of these batches, [(texts, whether the last goes on), ...]; its shards' bytes."""
    folder.mkdir()
    read = [SimpleNamespace(texts=pa.array(texts, pa.large_string()), continues=on) for texts, on in batches]
    unit = SimpleNamespace(split=split, batches=lambda: read, text_bytes=0)
    Task(folder, 0, unit, "bytes", 0.1, "f").run(lambda text_bytes: None)
    record = UnitRecord.read(folder, 0)
    shards = [shard for shard in record.shards.values() if shard]
    texts = sum(len(texts) - on for texts, on in batches)
    assert texts == sum(shard.documents for shard in shards) + record.counts["skipped"]
    return record, {file.name: file.read_bytes() for file in folder.glob("*.bin")}


def test_a_document_cut_over_batches_is_one_and_may_end_with_an_empty_piece(tmp_path):
    batches = [(["one", "two"], True), ([" goes"], True), ([" on", "three"], True), (["", "four"], False)]
    whole = [(["one", "two goes on", "three", "four"], False)]
    found = written(tmp_path / "cut", batches, "train")
    assert found == written(tmp_path / "whole", whole, "train")
    assert found[0].shards["train"].documents == 4


def test_a_document_without_text_is_skipped_and_counted(tmp_path):
    """Null, empty, or every one of a batch; not a part of a document that goes on, nor white space."""
    batches = [([None, "one", "", " "], False), ([None], False), (["two", "ano"], True), ([""], True)]
    record, shards = written(tmp_path / "gaps", [*batches, (["ther", None], False)])
    assert shards == written(tmp_path / "whole", [(["one", " ", "two", "another"], False)])[1]
    assert record.counts["skipped"] == 4


def test_the_validation_documents_are_the_requested_share_chosen_by_position_alone_and_never_none():
    def chosen(unit, first, count, fraction):
        return in_validation(unit=unit, first=first, count=count, fraction=fraction)

    assert chosen(3, 0, 1_000_000, 0.01).sum() == pytest.approx(10_000, abs=500)  # five standard deviations
    one, two = (chosen(unit, 0, 100_000, 0.5) for unit in (1, 2))
    assert (one == two).mean() == pytest.approx(0.5, abs=0.01)  # units choose independently
    assert chosen(0, 0, 3, 1e-12).tolist() == [True, False, False]
    assert chosen(0, 3, 3, 1e-12).tolist() == [False] * 3
    assert len(chosen(0, 0, 0, 0.5)) == 0


def test_small_texts_hold_out_more():
    assert effective_fraction(0.0005, 40_000_000_000) == 0.0005
    assert effective_fraction(0.0005, 100 << 20) == pytest.approx(256 / (100 << 10))
    assert effective_fraction(0.0005, 1 << 20) == 0.1
    assert effective_fraction(0.25, 1 << 20) == 0.25
