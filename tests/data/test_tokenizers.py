import importlib.util
import random
import sys
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data import huggingface_tokenizer, tokenizers
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


AWKWARD = [
    *TRICKY,
    "a\u0301\u200d\u200b\ufeff\u0085\u2028\u1680 \u3000\x00\x1c\x7f",  # combining, joiners, spaces
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0010ffff \ue000 ½ Ⅷ ٣ क्षि",
    "'S 'LL 're'ves ''' --__  \n \n\t x",
    "<|endoftext", "<|endoftext|><|endoftext|> <|endoftext|>",
]  # fmt: skip


@pytest.fixture(scope="module", params=["bytes", "small", "gpt2"])
def pair(request, tmp_path_factory):
    try:
        ours = Tiktoken(SMALL) if request.param == "small" else tokenizers.load(request.param)
    except OSError:
        pytest.skip("GPT-2's vocabulary is neither cached nor downloadable")
    folder, named = tmp_path_factory.mktemp(request.param), {"end_of_text": ours.end_of_text_name}
    huggingface_tokenizer.write(ours.to_huggingface(), folder, **named, context=128)
    return ours, AutoTokenizer.from_pretrained(folder, split_special_tokens=True)


def agree(pair, text):
    ours, theirs = pair
    ids = ours.encode(text)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == ours.decode(ids) == text


@settings(max_examples=60)
@given(st.text(max_size=40) | st.text(alphabet="athe in\n<|>'s\u00a0", max_size=40))
def test_the_same_ids(pair, text):
    agree(pair, text)


def test_the_same_ids_of_awkward_text(pair):
    for text in AWKWARD:
        agree(pair, text)
    draw = random.Random(0)
    for _ in range(50):
        ids = [draw.randrange(pair[0].end_of_text) for _ in range(20)]
        agree(pair, pair[0].decode(ids))


def test_bytes_of_ids_and_half_a_character(pair):
    """Whatever the ids are cut at; an end of text has none."""
    ours, theirs = pair
    ids = np.array([*ours.encode("é\U0001f600 the"), ours.end_of_text], np.uint16)
    assert ours.count_bytes(ids) == 10
    assert ours.count_bytes(ids[:1]) in (1, 2)
    assert ours.count_bytes(ids[-1:]) == 0
    ids = ours.encode("é")[:1] if ours.name == "bytes" else [ours.encode("\U0001f600")[0]]
    assert theirs.decode(ids) == ours.decode(ids)


def test_end_of_text(pair):
    """By its name it is a token for whoever does not ask for text, as in GPT-2's own files."""
    ours, theirs = pair
    assert theirs.eos_token_id == theirs.bos_token_id == ours.end_of_text
    assert len(theirs) == ours.vocab_size
    theirs.split_special_tokens = False
    try:
        wanted = [*ours.encode("a"), ours.end_of_text, *ours.encode("b")]
        assert theirs("a<|endoftext|>b")["input_ids"] == wanted
        assert theirs.decode([ours.end_of_text], skip_special_tokens=True) == ""
        assert theirs.model_max_length == 128
    finally:
        theirs.split_special_tokens = True
