import dataclasses
import shlex
import shutil

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from common import files
from data import corpus, prepare
from data.corpus import open_corpus
from data.recipe import Recipe, read
from data.settings import DataSettings
from tests.cli import ROOT, flip


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("it was a dark and stormy night\n" * 300)
    return DataSettings(source="text", path=str(path), tokenizer="bytes", root=str(tmp_path / "datasets"))


def composed(*overrides):
    prepare.register()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return OmegaConf.to_object(compose("prepare", list(overrides))).data


def pasted(line):
    python, option, module, *overrides = shlex.split(line)
    assert (python, option, module) == ("python", "-m", "data.prepare")
    return composed(*overrides)


def test_a_small_text_is_prepared_on_first_use_and_only_then(settings, monkeypatch):
    first = open_corpus(settings)
    monkeypatch.setattr(corpus, "prepare", lambda _: pytest.fail("prepared again"))
    again = open_corpus(settings)
    assert len(first.train) + len(first.val) == 31 * 300 + 2
    assert len(again.train) == len(first.train)
    assert again.tokenizer.decode(again.train.window(0, 30)) == "it was a dark and stormy night"
    assert again.manifest.vocab_size == 257


def test_a_run_hashes_its_files_once(settings, monkeypatch):
    hashed, sha256 = [], files.sha256
    monkeypatch.setattr(files, "sha256", lambda file: hashed.append(file.name) or sha256(file))
    open_corpus(settings, read(settings))
    assert hashed == ["book.txt"]


def test_the_command_for_a_large_text_prepares_what_opens(settings, tmp_path):
    (tmp_path / "wiki.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    settings.val_fraction = 0.25
    settings.validation = {"wiki": {"path": str(tmp_path / "wiki.jsonl"), "column": "body"}}
    settings.mask_documents = True
    for _ in range(2):
        with pytest.raises(ValueError, match="is not prepared yet") as caught:
            open_corpus(settings, small=0)
        assert "mask_documents" not in str(caught.value)
        prepare.run(prepare.PrepareSettings(pasted(str(caught.value).splitlines()[-1])))
    assert len(open_corpus(settings).validation) == 2


NAMES = ["a b", "a,b", "k=v", "it's", "${oc.env:HOME}", "[x]", "ä", "back\\slash\\", "null", "1e3", "*.t"]


@pytest.mark.parametrize("names", [NAMES[i : i + 4] for i in (0, 4, 7)], ids=range(3))
def test_the_command_is_read_as_the_settings_by_the_shell_and_hydra(tmp_path, names):
    one, two, three, four = names
    settings = DataSettings(source="jsonl", path=one, column=two, root=f"{tmp_path}/{three}", folder=four)
    assert pasted(corpus.command(Recipe(settings))) == settings
    settings = DataSettings(source="huggingface", path=f"s3://{four}", name=three, config=two, folder=one)
    assert pasted(corpus.command(Recipe(settings))) == settings


def test_a_named_dataset_opens_where_its_text_is_not(settings, tmp_path):
    settings.folder = "mine"
    there = open_corpus(settings)
    (tmp_path / "book.txt").unlink()
    shutil.move(settings.root, tmp_path / "node")
    here = open_corpus(dataclasses.replace(settings, root=str(tmp_path / "node")))
    assert (here.train.window(0, 100) == there.train.window(0, 100)).all()
    with pytest.raises(ValueError, match=r"prepared with data.tokenizer=bytes, not gpt2"):
        open_corpus(dataclasses.replace(settings, root=str(tmp_path / "node"), tokenizer="gpt2"))


def test_small_datasets_are_checked_in_full_and_large_ones_by_size(settings, monkeypatch):
    (text,) = read(settings)
    prepare.prepare(text)
    shard = text.folder / "train_00000.bin"
    flip(shard, 7)
    with pytest.raises(ValueError, match=r"(?s)train_00000.bin has changed.*python -m data.prepare"):
        open_corpus(settings)
    monkeypatch.setattr(corpus, "FULL_CHECK_LIMIT", 100)
    open_corpus(settings)


def test_the_embedded_text_needs_nothing(datasets, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("used the network"))
    opened = open_corpus(composed("data=embedded", f"data.root={datasets}"))
    assert len(opened.train) > 2_000_000
    assert len(opened.val) > 100_000
