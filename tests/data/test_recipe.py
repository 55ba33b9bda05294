import dataclasses
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import mixture, recipe
from data.corpus import open_corpus
from data.prepare import PrepareSettings, run
from data.settings import DataSettings
from data.tokenizers import Bytes
from tests.data.test_corpus import composed

pytestmark = pytest.mark.usefixtures("files")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The working folder, with a text, JSON Lines, parquet and a folder of texts."""
    (tmp_path / "book.txt").write_text("it was a dark and stormy night\n" * 300)
    lines = [json.dumps({"text": f"article {i} " + "on nothing " * (i % 9)}) + "\n" for i in range(200)]
    (tmp_path / "wiki.jsonl").write_text("".join(lines))
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "body.parquet")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.txt").write_text("def f(x):\n    return x\n" * 100)
    (tmp_path / "code" / "b.py").write_text("import this\n" * 200)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def book(**changed):
    return DataSettings(**{"source": "text", "path": "book.txt", "tokenizer": "bytes"} | changed)


def mixed(**changed):
    sources = {"wiki": {"path": "wiki.jsonl", "weight": 0.75}, "book": {"path": "book.txt", "weight": 0.25}}
    return DataSettings(**{"source": "mixture", "tokenizer": "bytes", "sources": sources} | changed)


def text_of(tokens):
    return Bytes().decode(tokens.window(0, len(tokens)))


def test_prepared_tokens_stand_in_for_a_missing_text_alone():
    """In data.folder, on a cluster node: a mistake in another setting must not open them."""
    corpus = open_corpus(book(folder="mine"))
    os.rename("book.txt", "moved.txt")
    assert open_corpus(book(folder="mine")).manifest == corpus.manifest
    os.rename("moved.txt", "book.txt")
    mistakes = [book(val_path="typo.txt"), book(path=None), book(path="wiki.jsonl"), book(source="stdlib")]
    for settings in mistakes:
        with pytest.raises(ValueError, match=r"typo\.txt|needs data\.path|is not text|is not read"):
            open_corpus(dataclasses.replace(settings, folder="mine"))


def test_validation_sets_are_prepared_by_themselves():
    sets = {"wiki": "wiki.jsonl", "code": "code", "py": {"path": "code/*.py", "source": "text"}}
    plain, corpus = open_corpus(book()), open_corpus(book(validation=sets, folder="mine"))
    weights = [(one.name, one.weight) for one in corpus.validation]
    assert weights == [(None, 1.0), ("wiki", 0.0), ("code", 0.0), ("py", 0.0)]
    assert corpus.manifest == plain.manifest
    assert Path("tokens/mine").is_dir()  # the sets do not share its name
    held_out, wiki, code, py = (text_of(one.tokens) for one in corpus.validation)
    assert held_out == text_of(plain.val)
    lines = Path("wiki.jsonl").read_text().splitlines()
    assert wiki == "".join(json.loads(line)["text"] + "<|endoftext|>" for line in lines)
    assert code == Path("code/a.txt").read_text() + "<|endoftext|>"
    assert py == Path("code/b.py").read_text() + "<|endoftext|>"
    folders = {path.name.split("-")[0] for path in Path("tokens").iterdir()}
    assert folders == {"book", "mine", "wiki", "code", "text"}


def test_a_mixture_is_its_sources():
    corpus = open_corpus(mixed(validation={"code": "code"}))
    assert (corpus.train.names, corpus.train.weights) == (("book", "wiki"), (1, 3))
    weights = [(one.name, one.weight) for one in corpus.validation]
    assert weights == [("book", 0.25), ("wiki", 0.75), ("code", 0.0)]
    alone = [open_corpus(book()), open_corpus(book(source="jsonl", path="wiki.jsonl"))]
    for train, held_out, one in zip(corpus.train.texts, corpus.validation, alone, strict=False):
        assert text_of(train) == text_of(one.train)
        assert text_of(held_out.tokens) == text_of(one.val)
    assert text_of(corpus.val) == text_of(alone[1].val)  # of the larger weight
    assert corpus.manifest.tokens("train") == sum(len(one.train) for one in alone)
    assert len(list(Path("tokens").iterdir())) == 3  # shared with the runs that read one of them


def test_the_fingerprint_of_a_mixture_has_its_texts_and_weights(files):
    def fingerprint(**changed):
        settings = mixed()
        for name, values in changed.items():
            settings.sources[name] = settings.sources[name] | values
        return open_corpus(settings).manifest.fingerprint

    first = fingerprint()
    assert fingerprint(wiki={"weight": 3}, book={"weight": 1}) == first  # the same proportions
    assert fingerprint(wiki={"weight": 0.5}) != first
    assert fingerprint(wiki={"val_fraction": 0.3}) != first
    (files / "book.txt").write_text("another book\n" * 300)
    assert fingerprint() != first


def test_weights_are_taken_as_written():
    def whole(*weights):
        return [*mixture.whole_weights({f"s{i}": {"weight": w} for i, w in enumerate(weights)}).values()]

    assert whole(0.7, 0.2, 0.1) == [7, 2, 1]
    assert whole(0.1, 0.1, 0.1) == [1, 1, 1]
    assert whole(1, "2.5") == [2, 5]
    assert whole(10**6, 3 * 10**6) == [1, 3]
    with pytest.raises(ValueError, match=r"proportions of 3333333333:6666666667"):
        whole(0.3333333333, 0.6666666667)
    for no_weight in (0, -1, None, True, "x", float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"data.sources.s1.weight=NUMBER"):
            whole(1, no_weight)


def test_sources_of_openwebtext_are_those_of_its_group():
    sources = ["data.sources.web.source=openwebtext", "data.sources.web.weight=3", "data.tokenizer=bytes"]
    sources += ["data.sources.wiki.path=wiki.jsonl", "data.sources.wiki.weight=1"]
    settings = composed("data=mixture", *sources)
    web, wiki = (one.settings for one in recipe.training_texts(settings))
    assert web == composed("data=openwebtext", "data.tokenizer=bytes")
    alone = composed("data=jsonl", "data.path=wiki.jsonl", "data.tokenizer=bytes")
    assert wiki == alone


def test_the_command_line_takes_names_one_by_one_or_together():
    together = ("data.validation={wiki: wiki.jsonl, code: {path: 'code/*', source: text}}",)
    values = ("wiki=wiki.jsonl", "code.path='code/*'", "code.source=text", "code.folder=null")
    one_by_one = [f"data.validation.{value}" for value in values]
    texts = (recipe.read(composed("data=embedded", *words)) for words in (together, one_by_one))
    sets, same = ([one.settings for one in text[1:]] for text in texts)
    assert sets == same
    places = [(one.source, one.path, one.val_path) for one in sets]
    assert places == [("jsonl", None, "wiki.jsonl"), ("text", None, "code/*")]


FAULTS = [
    (book(source="pile"), "choose one of huggingface, jsonl, openwebtext, parquet, stdlib, text"),
    (book(tokenizer="gpt4"), "choose one of gpt2, bytes"),
    (book(val_fraction=0.0), "between 0 and 1"),
    (book(folder="a/b"), "data.folder"),
    (book(folder=".."), "data.folder"),
    (book(name="mine"), "data.name=mine is of data=huggingface.*leave it out"),
    (book(path="https://x.org/a.txt"), "data.path=https://x.org/a.txt is an address.* download it"),
    (book(source="jsonl", path="s3://a/*.jsonl"), "use data=huggingface data.name=json"),
    (book(source="huggingface"), "needs data.name=NAME"),
    (book(source="openwebtext", name="x"), "data.path=book.txt is not read"),
    (book(path=None), "data=text needs data.path=FILE"),
    (book(path="nowhere.txt"), "data.path=nowhere.txt"),
    (book(source="jsonl", path="code"), "data.path=code.* no .jsonl or"),
    (book(path="wiki.jsonl"), "use data=jsonl"),
    (book(val_path="book.txt"), "both data.path and data.val_path"),
    (book(sources={"wiki": {"path": "wiki.jsonl", "weight": 1}}), "use data=mixture"),
    (book(validation={"wiki": 5}), "data.validation.wiki.path=5"),
    (book(validation={"wiki": {"column": "text"}}), "data.validation.wiki.path=FILE"),
    (book(validation={"wiki": {"path": "wiki.jsonl", "weight": 1}}), "data.validation.wiki.weight"),
    (book(validation={"wiki": "gone.jsonl"}), "data.validation.wiki.path=gone.jsonl"),
    (book(validation={"py": "code/b.py"}), "add data.validation.py.source=text"),
    (book(validation={"same": "book.txt"}), "both data.path and data.validation.same.path"),
    (mixed(sources={}), "data.sources.NAME.path=FILE"),
    (mixed(path="book.txt"), "no data.path"),
    (mixed(sources={"a": {"path": "wiki.jsonl"}}), "data.sources.a.weight=NUMBER"),
    (mixed(sources={"a": {"source": "text", "weight": 1}}), "data.sources.a.path=FILE"),
    (mixed(sources={"a": {"source": "mixture", "weight": 1}}), "data.sources.a.source=mixture"),
    (mixed(sources={"a": {"path": "x", "weigth": 1}}), "did you mean data.sources.a.weight"),
    (mixed(validation={"wiki": "code"}), "the same name"),
    (mixed(sources={"a": {"path": "book.txt", "weight": 1, "val_fraction": "x"}}), "sources.a.val_fraction"),
    (
        mixed(sources={"a": {"path": "book.txt", "weight": 1}, "b": {"path": "*.txt", "weight": 1}}),
        "both data.sources.a.path and data.sources.b.path",
    ),
]


@pytest.mark.parametrize(("settings", "named"), FAULTS, ids=[named for _, named in FAULTS])
def test_settings_that_cannot_work_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        recipe.read(settings)


def test_training_text_is_not_validation_text_under_another_name(files):
    settings = mixed(validation={"code": "code"})
    recipe.read(settings)
    (files / "val.txt").symlink_to("book.txt")
    (files / "copy.txt").write_bytes((files / "book.txt").read_bytes())
    os.link("book.txt", "hard.txt")
    for name in ("val.txt", "copy.txt", "hard.txt"):
        settings.validation["more"] = name
        with pytest.raises(ValueError, match=rf"{name}, .* data.sources.book.path and data.validation.more"):
            recipe.read(settings)
        with pytest.raises(ValueError, match=f"{name}, the same text as book.txt, .* data.path and data.val"):
            recipe.read(book(val_path=name))


def test_the_command_prepares_all_texts(capsys):
    run(PrepareSettings(mixed(validation={"code": "code"}), verify=True))
    printed = [line.split("-")[0] for line in capsys.readouterr().out.splitlines() if "verified" in line]
    assert printed == ["tokens/book", "tokens/wiki", "tokens/code"]
