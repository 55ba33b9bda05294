import dataclasses
import itertools
import os
import zlib
from contextlib import nullcontext

import numpy as np
import pytest

from data.loader import BatchLoader
from data.prepare import prepare
from data.recipe import Recipe
from data.settings import DataSettings
from data.shards import Manifest, chunk_checksums
from data.tokens import TokenShards
from tests.cli import flip


@pytest.fixture
def folder(tmp_path):
    return prepared(tmp_path)


def prepared(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{number} bottles on the wall\n" for number in range(500)))
    made = Recipe(DataSettings(source="text", path=str(path), tokenizer="bytes", root=str(tmp_path / "t")))
    prepare(made)
    return made.folder


def opened(folder, split="train", **options):
    return TokenShards.open(folder, Manifest.read(folder), split, **options)


def test_windows_are_slices_of_the_whole_and_none_reach_outside():
    whole = np.arange(15, dtype=np.uint16)
    tokens = TokenShards(np.split(whole, [5, 6, 13]))
    assert len(tokens) == 15
    for start in range(16):
        for length in range(16 - start):
            assert tokens.window(start, length).tolist() == whole[start : start + length].tolist()
    for start, length in ((-1, 2), (0, 16), (15, 1), (3, -1)):
        with pytest.raises(IndexError, match="which has 15"):
            tokens.window(start, length)


@pytest.fixture
def small_chunks(monkeypatch):
    for module in ("shards", "tokens"):
        monkeypatch.setattr(f"data.{module}.CHUNK", 64)


@pytest.mark.parametrize("byte", [0, 63, 64, -1])
def test_a_flipped_bit_is_found_where_it_is_read_first_and_nowhere_else(tmp_path, small_chunks, byte):
    folder = prepared(tmp_path)
    shard = folder / "train_00000.bin"
    size = shard.stat().st_size
    assert size % 64  # the last chunk is a part of one
    whole = opened(folder).window(0, size // 2)
    flip(shard, byte, 4)
    damaged = range(byte % size // 64 * 32, byte % size // 64 * 32 + 32)  # tokens of that chunk
    near = range(max(0, damaged.start - 34), min(size // 2, damaged.stop + 2))
    for length in (1, 2, 31, 33):
        for start in (0, 500, *near):
            length = min(length, size // 2 - start)
            text = opened(folder)  # by size
            if start < damaged.stop and start + length > damaged.start:
                told = rf"has changed .* bytes {2 * damaged.start} to .*delete"
                for _ in range(2):
                    with pytest.raises(OSError, match=told):
                        text.window(start, length)
            else:
                assert (text.window(start, length) == whole[start : start + length]).all()


def test_a_chunk_is_verified_once(tmp_path, small_chunks, monkeypatch):
    text = opened(prepared(tmp_path))
    checked, crc32 = [], zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda content: checked.append(len(content)) or crc32(content))
    for _ in range(2):
        text.window(40, 60)  # bytes 80 to 200
    assert checked == [64, 64, 64]
    text.window(0, 100)
    assert checked == [64, 64, 64, 64]


@pytest.mark.parametrize("found", [257, 65535])
def test_an_id_beyond_the_vocabulary_is_found_before_it_is_used(folder, found):
    shard = folder / "train_00000.bin"
    ids = np.fromfile(shard, "<u2")
    ids[777] = found
    ids.tofile(shard)
    manifest = Manifest.read(folder)
    chunks = chunk_checksums(shard)
    manifest.shards["train"][0] = dataclasses.replace(manifest.shards["train"][0], chunks=chunks)
    manifest.write(folder)
    loader = BatchLoader(opened(folder), context=64, sequences_per_step=4, micro_batch=2, seed=1)
    steps = itertools.chain.from_iterable(map(loader.micro_batches, range(50)))
    with pytest.raises(OSError, match=rf"00000.bin holds the id {found}, and the vocabulary has 257; delete"):
        list(steps)


def test_a_shard_that_is_cut_short_while_in_use_is_named(folder):
    """A memory map ended the process with SIGBUS."""
    tokens = opened(folder)
    shard = folder / "train_00000.bin"
    size = shard.stat().st_size
    whole = tokens.window(0, len(tokens))
    os.truncate(shard, 4097)
    assert (tokens.window(0, 2048) == whole[:2048]).all()
    for start, length in ((2048, 1), (2000, 100), (len(tokens) - 1, 1)):
        with pytest.raises(OSError, match=rf"train_00000.bin was cut short .*from {size} to 4097 bytes"):
            tokens.window(start, length)


@pytest.mark.parametrize(
    ("file", "damage", "full", "named"),
    [
        ("train_00000.bin", lambda whole: whole[:1001] + b"?" + whole[1002:], True, "has changed since"),
        ("train_00000.bin", lambda whole: whole[:1001] + b"?" + whole[1002:], False, None),  # by size
        ("train_00000.bin", lambda whole: whole[:-2], False, r"has not its \d+ bytes"),
        ("train_00000.bin", None, False, "train_00000.bin is missing"),
        ("val_00001.bin", None, False, None),  # of the other split
        ("manifest.json", lambda _: b'{"shards": []}', False, "not written by this version"),
        ("manifest.json", lambda _: b'{"shards": [', False, "damaged .* delete it"),
    ],
    ids=range(7),
)
def test_what_is_damaged_is_named_when_it_is_opened(folder, file, damage, full, named):
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(damage(whole)) if damage else (folder / file).unlink()
    with pytest.raises((OSError, ValueError), match=named) if named else nullcontext():
        opened(folder, full=full)
