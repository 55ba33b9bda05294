import contextlib
import gzip
import itertools
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from common.files import matching
from data import sources
from data.recipe import Recipe
from data.settings import DataSettings
from data.sources import jsonl, parquet, stdlib, text
from tests.cli import ROOT
from tests.data.test_tokenizers import GPT2_PATTERN

EXTENDING = ROOT / "docs" / "extending.md"

TEXTS = ["first", "", "second\nline", "dritte äöü", "四番目 \U0001f600", "last " * 50] * 7


@pytest.fixture
def tiny_pieces(monkeypatch):
    """Units and batches of a few dozen bytes, so that small files are cut as large ones are."""
    for module in (sources, jsonl, parquet, text):
        for name, size in (("UNIT_BYTES", 300), ("BATCH_BYTES", 40)):
            monkeypatch.setattr(module, name, size, raising=False)


def documents(units):
    """All documents of some units, the pieces of a cut one joined."""
    found, open_document = [], ""
    for batch in itertools.chain.from_iterable(unit.batches() for unit in units):
        pieces = batch.texts.to_pylist()
        pieces[0] = open_document + pieces[0]
        open_document = pieces.pop() if batch.continues else ""
        found += pieces
    assert open_document == ""
    return found


def load(source, path, **changed):
    return Recipe(DataSettings(source=source, path=str(path), **changed)).units


def write_parquet(path, texts, kind=None, **options):
    pq.write_table(pa.table({"id": range(len(texts)), "text": pa.array(texts, kind)}), path, **options)


def write_jsonl(path, texts):
    path.write_text("\n\n".join(json.dumps({"text": text, "id": 1}, ensure_ascii=False) for text in texts))


KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view()]


@pytest.mark.parametrize("kind", [*KINDS, pa.dictionary(pa.int32(), pa.string())], ids=str)
@pytest.mark.usefixtures("tiny_pieces")
def test_parquet(tmp_path, kind):
    texts = [text.encode() for text in TEXTS] if "binary" in str(kind) else TEXTS
    write_parquet(tmp_path / "b.parquet", texts, kind, row_group_size=4)
    write_parquet(tmp_path / "a.parquet", texts[:3], kind)
    units = load("parquet", tmp_path)
    assert len(units) > 3
    assert documents(units) == TEXTS[:3] + TEXTS


@pytest.mark.parametrize(("compression", "dictionary"), [("none", False), ("snappy", True)])
def test_a_flipped_byte_of_parquet_with_checksums_is_named_or_harmless(tmp_path, compression, dictionary):
    """Without the checks, most flips in the pages were read as other text, or as fewer rows."""
    path = tmp_path / "a.parquet"
    write_parquet(path, TEXTS, write_page_checksum=True, compression=compression, use_dictionary=dictionary)
    whole = path.read_bytes()
    pages = pq.read_metadata(path).row_group(0).column(1)
    start = pages.dictionary_page_offset or pages.data_page_offset
    faults = []
    for offset in range(start, start + pages.total_compressed_size, pages.total_compressed_size // 50):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 4]) + whole[offset + 1 :])
        try:
            assert documents(load("parquet", tmp_path)) == TEXTS
        except ValueError as error:
            faults.append(str(error))
    assert len(faults) > 30
    assert all(f"{path} cannot be read as parquet" in fault for fault in faults)


def test_jsonl_is_the_same_wherever_it_is_cut(tmp_path, monkeypatch):
    (tmp_path / "b.jsonl").write_text(r'{"text": "a\ud800b \ud83d\ude00"}')  # half a pair
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:9])
    for size in range(1, 60):
        monkeypatch.setattr(jsonl, "UNIT_BYTES", size)
        monkeypatch.setattr(sources, "UNIT_BYTES", size)
        units = load("jsonl", tmp_path)
        assert len(units) > 3
        assert documents(units) == [*TEXTS[:9], "a\ufffdb \U0001f600"]


@pytest.mark.usefixtures("tiny_pieces")
def test_compressed_jsonl(tmp_path):
    """Several compressed pieces in a file, as pigz and `cat a.gz b.gz` write them, are one text."""
    write_jsonl(tmp_path / "plain", TEXTS)
    content = (tmp_path / "plain").read_bytes()
    parts = content[:700], content[700:]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(map(pa.Codec("zstd").compress, parts)))
    (tmp_path / "c.jsonl.gz").write_bytes(b"")
    units = load("jsonl", tmp_path)
    assert len(units) == 2
    assert documents(units) == [*TEXTS, *TEXTS]

    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "fine"}\n' * 4 + b"[]"))
    with pytest.raises(ValueError, match=r"a.jsonl.gz, line 5 .* list"):
        documents(load("jsonl", path))
    for name in ("a.jsonl.gz", "b.jsonl.zst"):
        path = tmp_path / name
        for damaged in (path.read_bytes()[:-9], b"no such format", path.read_bytes()[:-9] + b"123456789"):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=rf"{name} cannot be read"):
                documents(load("jsonl", path))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "caf\xe9"}', "not JSON .*utf-8"),
        (b'{"text": "cut of', "not JSON"),
        (b'["text"]', "list"),
        (b'{"body": "x", "n": 1}', "'text'; it has 'body', 'n'"),
        (b'{"text": 3}', "int"),
        (b'{"text": "x", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON"),
        (b'{"text": "' + b"x" * 300_000 + b'"}', "more than 250,000 bytes"),
    ],
    ids=range(7),
)
@pytest.mark.usefixtures("tiny_pieces")
def test_jsonl_that_can_not_be_used_is_named_by_line(tmp_path, monkeypatch, line, complaint):
    monkeypatch.setattr(jsonl, "LONGEST_LINE", 250_000)
    fine = b'{"text": "fine", "id": ' + b"9" * 5000 + b"}\n"  # more digits than Python reads
    content = fine * 4 + line + b"\n" + fine
    for name, pack in (("a.jsonl", bytes), ("b.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(content))
        with pytest.raises(ValueError, match=rf"{name}, line 5 .*{complaint}"):
            documents(load("jsonl", tmp_path / name))


@pytest.mark.usefixtures("tiny_pieces")
def test_text_is_a_document_per_file(tmp_path):
    for name, content in (("b", "x y\n" * 400), ("a", "short"), ("c/d", "日本 語\n" * 90), ("b0", "")):
        path = tmp_path / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    (tmp_path / "val").write_text("held out")
    units = load("text", tmp_path, val_path=str(tmp_path / "val"))
    assert len(units) > 5
    train = [unit for unit in units if unit.split == "train"]
    assert documents(train) == ["short", "x y\n" * 400, "", "日本 語\n" * 90]
    assert documents(unit for unit in units if unit.split == "val") == ["held out"]


@example("a\t \u00a0b", 1)
@given(st.text(alphabet="aé \n\t.7\u00a0\u3000語\U0001f600", max_size=200), st.integers(1, 30))
def test_text_gives_gpt2_the_same_pieces_wherever_it_is_cut(tmp_path_factory, content, size):
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    path.write_text(content, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "UNIT_BYTES", 3 * size)
        patch.setattr(text, "BATCH_BYTES", size)
        units = text.units([path], DataSettings(), "train")
        pieces = [piece.as_py() for unit in units for batch in unit.batches() for piece in batch.texts]
    assert "".join(pieces) == content
    assert [part for piece in pieces for part in split_like_gpt2(piece)] == split_like_gpt2(content)


def split_like_gpt2(content):
    return regex.findall(GPT2_PATTERN, content)  # each is encoded by itself


def test_text_without_a_place_to_cut_is_cut_between_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "UNIT_BYTES", 50)
    for name, size in (("UNIT_BYTES", 50), ("BATCH_BYTES", 10), ("CUT_WINDOW", 8)):
        monkeypatch.setattr(text, name, size)
    for name, character in (("a", "語"), ("val", "文")):
        (tmp_path / f"{name}.txt").write_text(character * 100)
    units = load("text", tmp_path / "a.txt", val_path=str(tmp_path / "val.txt"))
    assert documents(unit for unit in units if unit.split == "train") == ["語" * 100]
    assert len(units) == 12


def test_text_holds_out_its_end(tmp_path):
    content = "".join(f"{number} bottles\n" for number in range(1000))
    for name, part in (("a", content[:5000]), ("b", content[5000:])):
        (tmp_path / f"{name}.txt").write_text(part)
    units = load("text", tmp_path, val_fraction=0.0005)  # a small text holds out a tenth all the same
    train = documents(unit for unit in units if unit.split == "train")
    val = documents(unit for unit in units if unit.split == "val")
    assert "".join(train + val) == content
    assert len("".join(val)) == pytest.approx(0.1 * len(content), abs=20)


def test_stdlib_is_some_megabytes_of_python_without_tests():
    files = stdlib.stdlib_files()
    assert 2e6 < sum(file.stat().st_size for file in files) <= stdlib.STDLIB_BYTES
    assert files == stdlib.stdlib_files()
    assert not any({"test", "site-packages", "__pycache__"} & set(file.parts) for file in files)
    units = Recipe(DataSettings(source="stdlib")).units
    assert len(documents(units)) == len(files) + 1  # one is cut into training text and validation text


def test_a_source_is_one_file_and_the_command_that_prepares_it_litters_nothing(tmp_path):
    """That of docs/extending.md, as it stands there."""
    for folder in ("common", "data"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "configs" / "prepare.yaml", tmp_path / "configs")
    shutil.copytree(ROOT / "configs" / "hydra", tmp_path / "configs" / "hydra")
    (module,) = re.findall(r'```python\n("""data/sources/sqlite.py.*?)```', EXTENDING.read_text(), re.DOTALL)
    (tmp_path / "data" / "sources" / "sqlite.py").write_text(module)
    with contextlib.closing(sqlite3.connect(tmp_path / "texts.sqlite")) as connection:
        connection.execute("CREATE TABLE documents (text TEXT)")
        connection.executemany("INSERT INTO documents VALUES (?)", [(text,) for text in TEXTS])
        connection.commit()
    before = {path.name for path in tmp_path.iterdir()}
    options = ("data=sqlite", "data.path=texts.sqlite", "data.tokenizer=bytes", "verify=true")
    words = [sys.executable, "-m", "data.prepare", *options]
    environment = os.environ | {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    train, val = map(int, re.search(r"verified (\d+) \+ (\d+)", done.stdout.replace(",", "")).groups())
    assert train + val == sum(len(text.encode()) + 1 for text in TEXTS if text)
    assert {path.name for path in tmp_path.iterdir()} == {*before, "tokens"}


@pytest.mark.parametrize("name", ["x(1).txt", "a b,c=v.txt", "[1].txt", "語.txt"])
def test_any_name_of_a_file_is_read_also_in_the_home_folder(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("once upon a time")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / name, f"~/{name}"):
        text = Recipe(DataSettings(source="text", path=str(path)))
        pieces = [piece.as_py() for unit in text.units for batch in unit.batches() for piece in batch.texts]
        assert "".join(pieces) == "once upon a time"
        assert text.folder.name.count("-gpt2-") == 1


@pytest.mark.parametrize("pattern", ["**/*.txt", "./**/*.txt", "**", "**/**/*.txt", "?/**/?.txt", "."])
def test_a_file_is_found_once_however_many_links_lead_to_it(tmp_path, monkeypatch, caplog, pattern):
    """Python's glob found each file hundreds of times, in training and validation text."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(f"text of {name}")
        (tmp_path / name / "up").symlink_to("..")
        (tmp_path / name / "again").symlink_to(".")
    os.link(tmp_path / "b" / "b.txt", tmp_path / "b" / "c.txt")
    monkeypatch.chdir(tmp_path)
    for where in (pattern, os.path.join(tmp_path, pattern)):
        assert [file.name for file in matching(where, (".txt",))] == ["a.txt", "b.txt"]
    assert "b/c.txt is" in caplog.text
    assert "under another name, and is left out" in caplog.text


def test_folders_behind_links_are_found_and_hidden_ones_are_not(tmp_path):
    for name in ("elsewhere [1]", "data/.hidden"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.txt").touch()
    (tmp_path / "data" / "part [2]").symlink_to(tmp_path / "elsewhere [1]")
    for pattern in ("**/*.txt", "*/*.txt", "**"):
        found = matching(str(tmp_path / "data" / pattern), (".txt",))
        assert found == [tmp_path / "data" / "part [2]" / "x.txt"]


def test_the_fingerprint_follows_the_content_not_the_place_or_time(tmp_path):
    def fingerprint(place):
        return Recipe(DataSettings(source="text", path=str(tmp_path / place))).fingerprint

    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "book.txt").write_text("the same words\n" * 10)
    os.utime(tmp_path / "there" / "book.txt", (0, 0))
    assert fingerprint("here") == fingerprint("there")
    (tmp_path / "there" / "book.txt").write_text("the same wordz\n" * 10)
    assert fingerprint("here") != fingerprint("there")


LATIN_1 = [b"fine"] * 33 + [b"caf\xe9", b"fine"]


def parquet_of(texts, kind=None, names=("text",), **options):
    """The content of a file, the same texts in each column."""
    table = pa.table([pa.array(texts, kind)] * len(names), names=names)
    pq.write_table(table, file := pa.BufferOutputStream(), **options)
    return file.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("source", "content", "complaint"),
    [
        ("text", b"", "a.text has no text"),
        ("jsonl", b"", "a.jsonl has no text"),
        ("parquet", parquet_of([], pa.string()), "a.parquet has no text"),
        ("text", b"fine \n" * 100 + b"caf\xe9\n" + b"fine \n" * 100, "a.text, line 101 is not valid UTF-8"),
        ("parquet", parquet_of(TEXTS)[:-20], "a.parquet cannot be read"),
        ("parquet", parquet_of(["x"], names=["id", "body"]), "no column 'text'; it has 'id', 'body'"),
        ("parquet", parquet_of(["x"], names=["text", "text"]), "2 columns"),
        ("parquet", parquet_of([1]), "int64"),
        ("parquet", parquet_of(LATIN_1, pa.binary(), row_group_size=7), "a.parquet, row 33 is not valid UTF"),
    ],
    ids=range(9),
)
@pytest.mark.usefixtures("tiny_pieces")
def test_files_that_cannot_be_used_are_named(tmp_path, source, content, complaint):
    (tmp_path / f"a.{source}").write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        documents(load(source, tmp_path / f"a.{source}"))
