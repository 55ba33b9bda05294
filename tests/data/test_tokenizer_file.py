"""A tokenizer.json of one's own: the ids of its library, end-of-text apart, and its faults named."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest
import tokenizers as huggingface
from tokenizers import models, pre_tokenizers, processors, trainers

from data import tokenizers
from data.corpus import open_corpus
from data.settings import DataSettings, check, vocabulary_size
from tests.data.test_huggingface_tokenizer import AWKWARD

SPECIAL = ["<s>", "</s>"]


@pytest.fixture(scope="module")
def trained():
    """A byte-level tokenizer as its users train one: it adds tokens to a text, cuts and pads it."""
    made = huggingface.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = huggingface.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the thing in there, the other thing"] * 3, trainer)
    made.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made.enable_truncation(4)
    made.enable_padding(length=9)
    return made


@pytest.fixture
def folder(trained, tmp_path):
    where = tmp_path / "My tokenizer"
    where.mkdir()
    trained.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return where


def test_ids_of_text(trained, folder):
    loaded = tokenizers.load(str(folder))
    assert loaded.end_of_text == 1
    assert loaded.vocab_size == vocabulary_size(str(folder / "tokenizer.json")) == trained.get_vocab_size()
    texts = [*AWKWARD, "<s> in there </s></s>"]
    documents = loaded.encode_documents(pa.array(texts, pa.large_string()))
    ends = np.cumsum(documents.lengths)
    assert (documents.ids[ends - 1] == 1).all()
    assert (documents.ids == 1).sum() == len(texts)
    parts = np.split(documents.ids, ends[:-1])
    assert [loaded.decode(part[:-1]) for part in parts] == texts
    assert loaded.count_bytes(documents.ids) == sum(len(text.encode()) for text in texts)
    assert [loaded.encode(text) for text in texts] == [part[:-1].tolist() for part in parts]
    plain = huggingface.Tokenizer(trained.model)
    plain.pre_tokenizer = trained.pre_tokenizer
    assert loaded.encode("the thing <s>") == plain.encode("the thing <s>").ids
    assert loaded.encode_documents(pa.array([], pa.large_string())).ids.size == 0


def test_the_dataset_is_known_by_the_content_of_the_file(folder, tmp_path):
    (tmp_path / "book.txt").write_text("the other thing in there\n" * 200)
    settings = DataSettings(
        source="text", path=str(tmp_path / "book.txt"), tokenizer=str(folder), root=str(tmp_path / "tokens")
    )
    corpus = open_corpus(settings)
    assert corpus.tokenizer.decode(corpus.train.window(0, 4)).startswith("the other thing")
    assert corpus.manifest.recipe["tokenizer"].keys() == {"sha256", "end_of_text"}
    moved = folder.rename(tmp_path / "elsewhere")
    settings = dataclasses.replace(settings, tokenizer=str(moved))
    assert open_corpus(settings).manifest.fingerprint == corpus.manifest.fingerprint
    (moved / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert open_corpus(settings).manifest.fingerprint != corpus.manifest.fingerprint
    names = sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "tokens").iterdir())
    assert names == ["book-elsewhere", "book-elsewhere", "book-my-tokenizer"]


def test_the_only_special_token_ends_a_text(tmp_path):
    made = huggingface.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "mine.json"))
    assert tokenizers.load(str(tmp_path / "mine.json")).end_of_text == 2


def test_text_that_would_end_itself_is_refused(tmp_path):
    """The end-of-text is a word of the vocabulary here, not a special token."""
    made = huggingface.Tokenizer(models.WordLevel({"a": 0, "end": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "end"}')
    with pytest.raises(ValueError, match=r"a text spells end, which .*tokenizer\.json takes for the end"):
        tokenizers.load(str(tmp_path)).encode("a end a")


@pytest.mark.parametrize(
    ("file", "config", "named"),
    [
        ("{}", None, r"tokenizer\.json is no file of Hugging Face's tokenizers library"),
        (None, "{}", r"does not say which token ends a text \(special tokens: <s>, </s>\); name it in "),
        (None, '{"eos_token": "<x>"}', r"has no token '<x>', the eos_token of tokenizer_config\.json"),
        (None, "[", r"tokenizer_config\.json is damaged"),
        (None, "[]", r"tokenizer_config\.json is damaged"),
        (b"\xff", None, r"tokenizer\.json cannot be read .*; give a tokenizer\.json or its folder"),
    ],
)  # fmt: skip
def test_what_is_no_tokenizer(folder, file, config, named):
    if file is not None:
        (folder / "tokenizer.json").write_bytes(file if isinstance(file, bytes) else file.encode())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=named):
        check(DataSettings(source="stdlib", tokenizer=str(folder)))


def test_a_vocabulary_beyond_16_bits_is_refused(tmp_path):
    made = huggingface.Tokenizer(models.WordLevel({str(i): i for i in range(65537)}, unk_token="0"))
    made.save(str(tmp_path / "large.json"))
    with pytest.raises(ValueError, match=r"large\.json has 65537 ids; .* 65536 is the limit"):
        vocabulary_size(str(tmp_path / "large.json"))
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read .*No such file"):
        vocabulary_size(str(tmp_path))
