from types import SimpleNamespace

import pyarrow as pa
import pytest

from data.shards import UnitRecord
from data.sources import effective_fraction, in_validation
from data.workers import Task

TEXTS = [f"document {number} " + "word " * (number % 9) for number in range(200)]


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


@pytest.mark.parametrize("size", [1, 7])
def test_a_document_is_in_the_same_split_in_batches_of_any_size(tmp_path, size):
    batches = [(TEXTS[start : start + size], False) for start in range(0, len(TEXTS), size)]
    assert written(tmp_path / "few", batches) == written(tmp_path / "all", [(TEXTS, False)])


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
