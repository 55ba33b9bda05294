import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data import huggingface_tokenizer, tokenizers
from data.tokenizers import Tiktoken
from tests.data.test_tokenizers import SMALL, TRICKY

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
