import importlib.util
import sys
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizers
from data.tokenizers import Bytes, Gigatoken, Tiktoken, utf8

# GPT-2's pattern and special token, with its 256 bytes and a few merges in place of its vocabulary file.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
MERGES = [b"th", b" t", b" th", b"the", b" the", b"in", b"er", b"\n\n", b"ing", b"<|", b"|>"]
SMALL = tiktoken.Encoding(
    "small",
    pat_str=GPT2_PATTERN,
    mergeable_ranks={bytes([byte]): byte for byte in range(256)} | {m: 256 + i for i, m in enumerate(MERGES)},
    special_tokens={"<|endoftext|>": 256 + len(MERGES)},
)

TRICKY = [
    "",
    "the thing\n\n\nin there",
    "<|endoftext|>",
    "a<|endoftext|>b",
    " \t\r\n\u00a0\u3000 x ",
    "héllo wörld, 日本語 \U0001f600",
    "don't they'll 12345 ++--==",
    "x" * 5000,
]


def large_strings(texts):
    return pa.array(texts, pa.large_string())


def documents(tokenizer, texts):
    ids, lengths = tokenizer.encode_documents(large_strings(texts))
    assert ids.dtype == np.dtype("<u2")
    assert lengths.sum() == len(ids)
    parts = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(texts) else []
    assert all(part[-1] == tokenizer.end_of_text for part in parts)
    return [part[:-1] for part in parts]


@given(st.lists(st.text(), max_size=5))
def test_bytes_are_utf8(texts):
    texts = [*TRICKY, *texts]
    assert documents(Bytes(), texts) == [list(text.encode()) for text in texts]
    assert [Bytes().decode(Bytes().encode(text)) for text in texts] == texts
    assert Bytes().decode(np.array([97, 256, 0xC3], np.uint16)) == "a<|endoftext|>\ufffd"


@given(st.lists(st.text(alphabet="the in\n<|>", max_size=20), max_size=5))
def test_tiktoken_documents_are_encode_ordinary(texts):
    tokenizer = Tiktoken(SMALL)
    texts = [*TRICKY, *texts]
    assert documents(tokenizer, texts) == [SMALL.encode_ordinary(text) for text in texts]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


@pytest.mark.parametrize("tokenizer", [Bytes(), Tiktoken(SMALL)], ids=["bytes", "tiktoken"])
def test_end_of_text_and_slices_of_arrow_arrays(tokenizer):
    assert all(tokenizer.end_of_text not in ids for ids in documents(tokenizer, TRICKY))
    assert tokenizer.end_of_text == tokenizer.vocab_size - 1
    assert documents(tokenizer, []) == []
    ids, lengths = tokenizer.encode_documents(large_strings(TRICKY)[3:6])
    assert (ids == tokenizer.encode_documents(large_strings(TRICKY[3:6]))[0]).all()
    assert len(lengths) == 3
    data, offsets = utf8(large_strings(TRICKY)[3:6])
    assert bytes(data) == "".join(TRICKY[3:6]).encode()
    assert offsets.tolist() == [0, *np.cumsum([len(text.encode()) for text in TRICKY[3:6]])]


@settings(max_examples=60)
@given(st.lists(st.text(max_size=30), max_size=5))
def test_gigatoken_makes_the_same_ids(texts):
    pytest.importorskip("gigatoken")
    texts = [*TRICKY, *texts]
    assert documents(Gigatoken(SMALL), texts) == documents(Tiktoken(SMALL), texts)


@pytest.mark.parametrize("missing", ["awkward", "gigatoken"])
def test_gigatoken_that_does_not_import_gives_way_to_tiktoken(monkeypatch, caplog, missing):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: SMALL)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # installed …
    monkeypatch.setitem(sys.modules, "awkward", ModuleType("awkward"))
    monkeypatch.setitem(sys.modules, missing, None)  # … but not this one
    assert type(tokenizers.load("gpt2")) is Tiktoken
    assert not caplog.text
    assert type(tokenizers.load("gpt2", warn=True)) is Tiktoken
    (line,) = caplog.text.splitlines()
    assert missing in line
    assert "tokenizing with tiktoken" in line
    assert "pip install gigatoken awkward" in line


def test_gpt2_without_its_vocabulary_names_the_way_out(monkeypatch):
    def no_network(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(OSError, match=r"ConnectionError.*TIKTOKEN_CACHE_DIR.*data.tokenizer=bytes"):
        tokenizers.load("gpt2")
