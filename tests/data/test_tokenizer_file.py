import dataclasses
import json
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pytest
import tokenizers as huggingface
from tokenizers import models, pre_tokenizers, processors, trainers

from data import tokenizers
from data.corpus import open_corpus
from data.loader import BatchLoader, evaluation_batches
from data.prepare import PrepareSettings, run
from data.settings import DataSettings
from data.tokenizers import vocabulary_size
from tests.data.test_tokenizers import AWKWARD
from trainer.run import bytes_per_token


@pytest.fixture(scope="module")
def trained():
    """A byte-level tokenizer as its users train one: it adds tokens to a text, cuts and pads it."""
    made = huggingface.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = huggingface.decoders.ByteLevel()
    how = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], **how)
    made.train_from_iterator(["the thing in there, the other thing"] * 3, trainer)
    around = [("<s>", 0), ("</s>", 1)]
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=around)
    made.enable_truncation(4)
    made.enable_padding(length=9)
    return made


def word_level(file, words, unknown=None):
    """The path of a tokenizer whose tokens are these words, and the end of the text."""
    ids = {word: i for i, word in enumerate(words)}
    made = huggingface.Tokenizer(models.WordLevel(ids, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<end>"])
    made.save(str(file))
    return str(file)


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
    ids, lengths = loaded.encode_documents(pa.array(texts, pa.large_string()))
    ends = np.cumsum(lengths)
    assert (ids[ends - 1] == 1).all()
    assert (ids == 1).sum() == len(texts)
    parts = np.split(ids, ends[:-1])
    assert [loaded.decode(part[:-1]) for part in parts] == texts
    assert loaded.count_bytes(ids) == sum(len(text.encode()) for text in texts)
    assert [loaded.encode(text) for text in texts] == [part[:-1].tolist() for part in parts]
    plain = huggingface.Tokenizer(trained.model)
    plain.pre_tokenizer = trained.pre_tokenizer
    assert loaded.encode("the thing <s>") == plain.encode("the thing <s>").ids
    assert loaded.encode_documents(pa.array([], pa.large_string()))[0].size == 0


def test_the_dataset_is_known_by_the_content_of_the_file(folder, tmp_path):
    (tmp_path / "book.txt").write_text("the other thing in there\n" * 200)
    places = {"path": str(tmp_path / "book.txt"), "root": str(tmp_path / "tokens")}
    settings = DataSettings(source="text", tokenizer=str(folder), **places)
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


@pytest.mark.parametrize("kind", ["Unigram", "Bpe"])
def test_a_text_that_spells_a_special_token_is_text(tmp_path, kind):
    """Also where special tokens are among the model's, as in files converted from sentencepiece."""
    made = huggingface.Tokenizer(models.Unigram() if kind == "Unigram" else models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), huggingface.decoders.Metaspace()
    special = {"special_tokens": ["<s>", "</s>", "<unk>"], "show_progress": False}
    special |= {"unk_token": "<unk>"} if kind == "Unigram" else {}
    texts = ["<s>price</s> <unk>", "the price of a thing </s>"] * 9
    made.train_from_iterator(texts, getattr(trainers, f"{kind}Trainer")(**special))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    loaded = tokenizers.load(str(tmp_path))
    for text in ("<s>price</s>", "</s></s>", "the <unk> of </s>"):
        ids = loaded.encode(text)
        assert not {*ids} & {0, 1, 2}
        assert loaded.decode(ids) == text
    assert loaded.encode("the price of a thing") == made.encode("the price of a thing").ids
    assert loaded.unknown == loaded.encode("the 語")[-1] == 2


def test_what_ends_a_text(tmp_path):
    made = huggingface.Tokenizer(models.WordLevel({"a": 0, "end": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "end"}')  # a word, not a special token
    assert tokenizers.load(str(tmp_path)).encode("a end a") == [0, 2, 2, 0]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "?"}')
    with pytest.raises(ValueError, match=r"no tokens for a part of a text but \?, which ends a text"):
        tokenizers.load(str(tmp_path)).encode("b")
    made.add_special_tokens(["<end>"])  # the only one
    made.save(str(tmp_path / "mine.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    assert tokenizers.load(str(tmp_path / "mine.json")).end_of_text == 3


@pytest.mark.parametrize("unknown", [None, "?"])
def test_what_tokens_lose_is_said_and_a_text_without_any_is_refused(tmp_path, capsys, unknown):
    made = huggingface.Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token=unknown))
    made.decoder = huggingface.decoders.Fuse()
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "bpe.json"))
    text = tmp_path / "texts.jsonl"
    text.write_text('{"text": "aaa"}\n' * 19 + '{"text": "a語a"}\n')
    places = {"path": str(text), "tokenizer": str(tmp_path / "bpe.json"), "root": str(tmp_path / "tokens")}
    settings = PrepareSettings(DataSettings(source="jsonl", **places), verify=True)
    run(settings)
    told = capsys.readouterr().out
    assert "5.00% of the 20 texts looked at" in told
    assert ("1.25% of the tokens are unknown" in told) == bool(unknown)
    text.write_text('{"text": "\\n"}\n' + '{"text": "日本"}\n' * 20)
    lost = pytest.raises(ValueError, match="has no tokens for a text, which would be lost: '日本'")
    with nullcontext() if unknown else lost:
        run(settings)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer.json", b"{}", r"tokenizer\.json is no file of Hugging Face's tokenizers library"),
        ("tokenizer.json", b"\xff", r"tokenizer\.json cannot be read"),
        ("tokenizer.json", None, r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", b"{}", r"which token ends a text \(special tokens: <s>, </s>\)"),
        ("tokenizer_config.json", b'{"eos_token": "<x>"}', r"has no token '<x>'"),
        ("tokenizer_config.json", b"[", r"tokenizer_config\.json is damaged"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json is damaged"),
    ],
)
def test_what_is_no_tokenizer(folder, file, content, named):
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=named):
        vocabulary_size(str(folder))


@pytest.mark.parametrize(("size", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_ids_have_as_many_bits_as_the_vocabulary_needs(tmp_path, size, dtype):
    """From the text to the batches, with the largest ids of the vocabulary."""
    words = np.array([0, 255, 256, 65534, size - 2, 7, size - 2])
    for name, end in (("train.txt", ""), ("val.txt", "\n")):
        (tmp_path / name).write_text(" ".join(map(str, words)) + end)
    own = word_level(tmp_path / "words.json", map(str, range(size - 1)), "0")
    places = {"path": f"{tmp_path}/train.txt", "val_path": f"{tmp_path}/val.txt", "tokenizer": own}
    corpus = open_corpus(DataSettings(source="text", root=f"{tmp_path}/tokens", **places))
    stored = np.array([*words, size - 1])
    (folder,) = (tmp_path / "tokens").iterdir()
    for split, tokens in (("train", corpus.train), ("val", corpus.val)):
        (shard,) = folder.glob(f"{split}_*.bin")
        assert np.fromfile(shard, dtype).tolist() == stored.tolist()
        assert tokens.window(0, len(tokens)).dtype == dtype
        assert tokens.window(2, 6).tolist() == stored[2:].tolist()
    batches = {"context": 7, "micro_batch": 1}
    train = BatchLoader(corpus.train, sequences_per_step=1, seed=1, **batches).micro_batches(0)
    for inputs, targets in (*train, *evaluation_batches(corpus.val, sequences=1, **batches)):
        assert inputs.tolist() == [stored[:-1].tolist()]
        assert targets.tolist() == [stored[1:].tolist()]


def test_a_text_that_a_tokenizer_has_no_tokens_for_is_named(tmp_path):
    loaded = tokenizers.load(word_level(tmp_path / "words.json", "a"))
    assert loaded.encode("a") == [0]
    assert loaded.encode("") == []
    for encode in (loaded.encode, lambda text: loaded.encode_documents(pa.array([text], pa.large_string()))):
        with pytest.raises(ValueError, match=r"words.json cannot encode a text .*another tokenizer"):
            encode("b")


TEXTS = ["the", "the  thing\n in 日本語", "", "thing é thing", "the thing " * 30]


def bytes_predicted(tmp_path, tokenizer, tokens):
    """The source's bytes of tokens 1 … `tokens` of these texts, which bits per byte are counted over."""
    path = tmp_path / "val.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "train.jsonl").write_text('{"text": "more"}')
    places = {"path": str(tmp_path / "train.jsonl"), "val_path": str(path), "root": str(tmp_path / "tokens")}
    corpus = open_corpus(DataSettings(source="jsonl", tokenizer=str(tokenizer), **places))
    (value,) = bytes_per_token(corpus.validation, corpus.tokenizer, context=tokens, sequences=1)
    return value * tokens


def test_bytes_predicted_by_a_tokenizer_that_gives_texts_back_are_those_of_its_tokens(tmp_path):
    whole = b"\xff".join(text.encode() for text in TEXTS if text) + b"\xff"  # which ends a document
    for tokens in (1, 7, 12, 30, 31, 49, 100):
        assert bytes_predicted(tmp_path, "bytes", tokens) == tokens - whole[1 : tokens + 1].count(b"\xff")


def test_bytes_predicted_by_one_that_does_not_are_those_of_the_source(tmp_path):
    """A token is a word, or an unknown one, without its white space. Half a text has a space less."""
    made = word_level(tmp_path / "words.json", ["the", "thing", "?"], "?")
    sizes = [len(text.encode()) for text in TEXTS if text]
    for tokens, documents in ((1, 1), (6, 2), (10, 3), (71, 4), (40, 3.5)):
        wanted = sum(sizes[1 : int(documents)]) + documents % 1 * sizes[3]
        assert bytes_predicted(tmp_path, made, tokens) == pytest.approx(wanted, rel=0.01)
