"""Bits per byte count the source's bytes of the tokens that a validation predicts, and of no other."""

import json

import pytest
import tokenizers as huggingface
from tokenizers import models, pre_tokenizers

from data.corpus import open_corpus
from data.settings import DataSettings
from trainer.run import bytes_per_token

TEXTS = ["the", "the  thing\n in 日本語", "", "thing é thing", "the thing " * 30]


def found(tmp_path, tokenizer, tokens):
    """Source bytes of tokens 1 … `tokens` of these texts."""
    path = tmp_path / "val.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "train.jsonl").write_text('{"text": "more"}')
    places = {"path": str(tmp_path / "train.jsonl"), "val_path": str(path), "root": str(tmp_path / "tokens")}
    corpus = open_corpus(DataSettings(source="jsonl", tokenizer=str(tokenizer), **places))
    (value,) = bytes_per_token(corpus.validation, corpus.tokenizer, context=tokens, sequences=1)
    return value * tokens


@pytest.mark.parametrize("tokens", [1, 7, 12, 30, 31, 49, 100])
def test_of_a_tokenizer_that_gives_texts_back_they_are_those_of_its_tokens(tmp_path, tokens):
    whole = b"\xff".join(text.encode() for text in TEXTS if text) + b"\xff"  # which ends a document
    assert found(tmp_path, "bytes", tokens) == tokens - whole[1 : tokens + 1].count(b"\xff")


@pytest.mark.parametrize(("tokens", "documents"), [(1, 1), (6, 2), (10, 3), (71, 4), (40, 3.5)])
def test_of_one_that_does_not_they_are_those_of_the_source(tmp_path, tokens, documents):
    """A token is a word, or an unknown one, without its white space. Half a text has a space less."""
    made = huggingface.Tokenizer(models.WordLevel({"the": 0, "thing": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "words.json"))
    sizes = [len(text.encode()) for text in TEXTS if text]
    wanted = sum(sizes[1 : int(documents)]) + documents % 1 * sizes[3]
    assert found(tmp_path, tmp_path / "words.json", tokens) == pytest.approx(wanted, rel=0.01)
