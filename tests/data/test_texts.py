"""Texts that have a name: sources of a mixture and validation sets."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from data import texts
from data.checks import check
from data.corpus import open_corpus
from data.manifest import Manifest
from data.prepare import PrepareSettings, run
from data.settings import DataSettings
from tests.data.test_corpus import composed


@pytest.fixture
def files(tmp_path):
    """A text, JSON Lines and a folder of texts, of some thousand bytes each."""
    (tmp_path / "book.txt").write_text("it was a dark and stormy night\n" * 300)
    lines = [json.dumps({"text": f"article {i} " + "on nothing " * (i % 9)}) + "\n" for i in range(200)]
    (tmp_path / "wiki.jsonl").write_text("".join(lines))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.txt").write_text("def f(x):\n    return x\n" * 100)
    (tmp_path / "code" / "b.py").write_text("import this\n" * 200)
    return tmp_path


def book(files, **changed):
    given = {
        "source": "text",
        "path": str(files / "book.txt"),
        "tokenizer": "bytes",
        "root": str(files / "t"),
    }
    return DataSettings(**given | changed)


def mixture(files, **changed):
    sources = {
        "wiki": {"path": str(files / "wiki.jsonl"), "weight": 0.75},
        "book": {"path": str(files / "book.txt"), "weight": 0.25},
    }
    given = {"source": "mixture", "tokenizer": "bytes", "root": str(files / "t"), "sources": sources}
    return DataSettings(**given | changed)


def text_of(corpus, tokens):
    return corpus.tokenizer.decode(tokens.window(0, len(tokens)))


def test_validation_sets_are_prepared_by_themselves(files):
    sets = {"wiki": f"{files}/wiki.jsonl", "code": f"{files}/code", "py": {"path": f"{files}/code/*.py"}}
    sets["py"]["source"] = "text"
    plain, corpus = open_corpus(book(files)), open_corpus(book(files, validation=sets))
    assert [(one.name, one.weight) for one in corpus.validation] == [
        (None, 1.0), ("wiki", 0.0), ("code", 0.0), ("py", 0.0)
    ]  # fmt: skip
    assert corpus.manifest == plain.manifest
    assert text_of(corpus, corpus.validation[0].tokens) == text_of(plain, plain.val)
    wiki, code, py = (text_of(corpus, one.tokens) for one in corpus.validation[1:])
    lines = (files / "wiki.jsonl").read_text().splitlines()
    assert wiki == "".join(json.loads(line)["text"] + "<|endoftext|>" for line in lines)
    assert code == (files / "code" / "a.txt").read_text() + "<|endoftext|>"
    assert py == (files / "code" / "b.py").read_text() + "<|endoftext|>"
    folders = {path.name.split("-")[0]: path for path in (files / "t").iterdir()}
    assert folders.keys() == {"book", "wiki", "code", "text"}
    assert Manifest.read(folders["wiki"]).tokens("train") == 0


def test_a_large_validation_set_names_its_command(files):
    validation = {"wiki": f"{files}/wiki.jsonl"}
    settings = book(files, validation=validation)
    open_corpus(book(files))
    with pytest.raises(ValueError, match=r"^data.validation.wiki: .* is not prepared yet") as caught:
        open_corpus(dataclasses.replace(settings, prepare_on_first_use_mb=0))
    line = str(caught.value).splitlines()[-1]
    named = f"data=jsonl data.val_path={files}/wiki.jsonl data.tokenizer=bytes data.root={files}/t"
    assert line.strip() == f"python -m data.prepare {named}"
    run(PrepareSettings(composed(*named.split())))
    open_corpus(dataclasses.replace(settings, prepare_on_first_use_mb=0))


def test_a_mixture_is_its_sources(files):
    corpus = open_corpus(mixture(files, validation={"code": f"{files}/code"}))
    assert (corpus.train.names, corpus.train.weights) == (("book", "wiki"), (1, 3))
    assert [(one.name, one.weight) for one in corpus.validation] == [
        ("book", 0.25), ("wiki", 0.75), ("code", 0.0)
    ]  # fmt: skip
    alone = [
        open_corpus(book(files)),
        open_corpus(book(files, source="jsonl", path=f"{files}/wiki.jsonl")),
    ]
    for train, held_out, one in zip(corpus.train.texts, corpus.validation, alone, strict=False):
        assert text_of(corpus, train) == text_of(one, one.train)
        assert text_of(corpus, held_out.tokens) == text_of(one, one.val)
    assert text_of(corpus, corpus.val) == text_of(alone[1], alone[1].val)  # of the larger weight
    assert corpus.manifest.tokens("train") == sum(len(one.train) for one in alone)
    assert len(list((files / "t").iterdir())) == 3  # shared with the runs that read one of them


def test_the_fingerprint_of_a_mixture_has_its_texts_and_weights(files):
    def fingerprint(**changed):
        settings = mixture(files)
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
        sources = {f"s{i}": {"path": "x.txt", "weight": weight} for i, weight in enumerate(weights)}
        return list(texts.whole_weights(DataSettings(sources=sources)).values())

    assert whole(0.7, 0.2, 0.1) == [7, 2, 1]
    assert whole(0.1, 0.1, 0.1) == [1, 1, 1]
    assert whole(1, 2.5) == [2, 5]
    assert whole(1e-3, 1) == [1, 1000]
    assert whole(10**6, 3 * 10**6) == [1, 3]
    with pytest.raises(
        ValueError, match=r"proportions of 3333333333:6666666667, .*1,000,000 seq.* fewer dig"
    ):
        whole(0.3333333333, 0.6666666667)


def test_sources_of_openwebtext_are_those_of_its_group():
    sources = ["data.sources.web.source=openwebtext", "data.sources.web.weight=3"]
    sources += ["data.sources.wiki.path=wiki.jsonl", "data.sources.wiki.weight=1", "data.tokenizer=bytes"]
    settings = composed("data=mixture", *sources)
    web, wiki = texts.sources_of(settings).values()
    assert web == composed("data=openwebtext", "data.tokenizer=bytes")
    assert wiki == dataclasses.replace(
        composed("data=jsonl", "data.path=wiki.jsonl", "data.tokenizer=bytes"), revision=settings.revision
    )


def test_the_command_line_takes_names_one_by_one_or_together():
    together = composed(
        "data=embedded", "data.validation={wiki: a.jsonl, code: {path: 'x/*.py', source: text}}"
    )
    one_by_one = composed(
        "data=embedded", "data.validation.wiki=a.jsonl", "data.validation.code.path='x/*.py'",
        "data.validation.code.source=text", "data.validation.code.name=null",
    )  # fmt: skip
    sets = texts.validation_sets(together)
    assert sets == texts.validation_sets(one_by_one)
    assert [(one.source, one.path, one.val_path) for one in sets.values()] == [
        ("jsonl", None, "a.jsonl"), ("text", None, "x/*.py")
    ]  # fmt: skip


FAULTS = [
    ({"validation": {"a.b": "wiki.jsonl"}}, r"data.validation.a.b: a name has at most 40 letters, digits"),
    ({"validation": {"": "wiki.jsonl"}}, r"a name has at most 40"),
    ({"validation": {"wiki": 5}}, r"data.validation.wiki=5 must be a path, or have source, path, column"),
    ({"validation": {"wiki": {"column": "text"}}}, r"needs data.validation.wiki.path=FILE"),
    ({"validation": {"wiki": {"path": "wiki.jsonl", "weight": 1}}}, r"wiki.weight is unknown; choose from"),
    ({"validation": {"wiki": "gone.jsonl"}}, r"^data.validation.wiki.path=gone.jsonl: no such file"),
    ({"validation": {"py": "code/b.py"}}, r"data.validation.py: the name code/b.py does not say .*source=te"),
    ({"validation": {"wiki": {"path": "x.txt", "source": "stdlib"}}}, r"source=stdlib is unknown here"),
    ({"validation": {"same": "book.txt"}}, r"book.txt matches both data.path and data.validation.same; kee"),
    ({"sources": {"wiki": {"path": "wiki.jsonl", "weight": 1}}}, r"no effect with data.source=text; use dat"),
    ({"validation": {"a": {"path": "code", "column": "x"}}}, r"data.validation.a.column=x has no effect"),
    ({"path": None, "val_path": "nowhere.txt"}, r"data.val_path=nowhere.txt: no such file"),
]  # fmt: skip
MIXTURE_FAULTS = [
    ({"sources": {}}, r"data=mixture needs sources, each with data.sources.NAME.path=FILE data.so"),
    ({"sources": {"a": {"path": "wiki.jsonl"}}}, r"data.sources.a needs data.sources.a.weight=NUMBER"),
    ({"sources": {"a": "wiki.jsonl"}}, r"data.sources.a needs data.sources.a.weight=NUMBER"),
    ({"sources": {"a": {"path": "wiki.jsonl", "weight": 0}}}, r"a.weight=0 must be greater than zero; leave"),
    ({"sources": {"a": {"path": "wiki.jsonl", "weight": "2"}}}, r"a.weight=2 must be a number"),
    ({"sources": {"a": {"path": "wiki.jsonl", "weight": True}}}, r"a.weight=True must be a number"),
    ({"sources": {"a": {"weight": 1}}}, r"data.sources.a needs data.sources.a.path=FILE"),
    ({"sources": {"a": {"path": 3, "weight": 1}}}, r"data.sources.a.path=3 must be text"),
    ({"sources": {"a": {"source": "mixture", "weight": 1}}}, r"a.source=mixture is unknown here; choose one"),
    ({"sources": {"a": {"path": "x", "weigth": 1, "weight": 1}}}, r"a.weigth is unknown; choose from source"),
    ({"path": "book.txt"}, r"data.path=book.txt has no effect with data=mixture; use data.sources.NAME.path"),
    ({"name": "mine"}, r"data.name=mine has no effect with data=mixture; use data.sources.NAME.name"),
    ({"validation": {"wiki": "code"}}, r"data.sources.wiki and data.validation.wiki have the same name"),
    (
        {"sources": {"a": {"path": "book.txt", "weight": 1}, "b": {"path": "*.txt", "weight": 1}}},
        r"book.txt matches both data.sources.a.path and data.sources.b.path; keep it out of one",
    ),
    (
        {"sources": {"a": {"path": "book.txt", "weight": 1, "val_fraction": 2.0}}},
        r"data.sources.a.val_fraction=2.0 must lie between 0 and 1",
    ),
    (
        {"sources": {"a": {"path": "book.txt", "weight": 1, "val_path": "code", "val_fraction": 0.1}}},
        r"data.sources.a.val_fraction=0.1 has no effect with data.sources.a.val_path=code; leave out one",
    ),
    (
        {"sources": {"a": {"source": "stdlib", "weight": 1, "column": "body"}}},
        r"data.sources.a.column=body has no effect with data.sources.a.source=stdlib, which has no columns; "
        r"leave it out, or use data.sources.a.source=parquet or",
    ),
    ({"processes": 0}, r"^data.processes=0 must be at least 1; null uses every core$"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "changed", "message"), [
    *((book, *fault) for fault in FAULTS), *((mixture, *fault) for fault in MIXTURE_FAULTS)
])  # fmt: skip
def test_what_cannot_work_is_named(files, monkeypatch, made, changed, message):
    monkeypatch.chdir(files)
    with pytest.raises(ValueError, match=message):
        check(made(Path(), **changed))


def test_training_text_of_one_source_is_not_held_out_by_another(files):
    settings = mixture(files)
    settings.sources["book"]["val_path"] = str(files / "code" / "a.txt")
    check(settings)
    settings.sources["more"] = {"path": f"{files}/code", "weight": 1}
    message = r"a.txt matches both data.sources.more.path and data.sources.book.val_path; keep it out"
    with pytest.raises(ValueError, match=message):
        check(settings)


def test_the_command_prepares_all_texts(files, capsys):
    settings = mixture(files, validation={"code": str(files / "code")})
    run(PrepareSettings(settings, verify=True))
    printed = capsys.readouterr().out.splitlines()
    assert [re.sub(r".*/(\w+)-bytes-\w+:", r"\1", line).split(",")[0] for line in printed] == [
        "book verified", "wiki verified", "code verified"
    ]  # fmt: skip
    (files / "wiki.jsonl").write_text('{"body": "no text"}\n')
    with pytest.raises(ValueError, match=r"^data.sources.wiki: .*line 1 has no key data.column='text'"):
        run(PrepareSettings(settings))


def test_a_validation_set_of_a_name_opens_where_its_text_is_not(files):
    validation = {"wiki": {"path": str(files / "wiki.jsonl"), "name": "mine"}}
    there = open_corpus(book(files, validation=validation))
    (files / "wiki.jsonl").unlink()
    here = open_corpus(book(files, validation=validation))
    tokens = [corpus.validation[1].tokens for corpus in (there, here)]
    np.testing.assert_array_equal(*(one.window(0, len(one)) for one in tokens))
