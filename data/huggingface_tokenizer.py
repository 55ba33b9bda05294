"""Tokenizers as files of Hugging Face's `tokenizers` library, which transformers and others read."""

import itertools
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from data.files import write_text

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"  # of GPT-2 and of bytes


def byte_pair_encoding(ranks: dict[bytes, int], *, words: bool) -> tokenizers.Tokenizer:
    """Byte-level byte-pair encoding with the ids of tiktoken, and END_OF_TEXT behind them.

    ranks: the ids 0 … len − 1 of the tokens, all 256 bytes among them; a token of a lower id is merged first.
    words: whether GPT-2's pattern splits the text into words before.
    """
    vocabulary = {_spelled(token): rank for token, rank in ranks.items()}
    longer = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    merges = [tuple(map(_spelled, _merged_from(token, ranks))) for token in longer]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return made


def write(tokenizer: tokenizers.Tokenizer, folder: Path, *, end_of_text: str, context: int) -> None:
    """Write what transformers' AutoTokenizer reads. context: the longest input of the model, in tokens.

    The files add no token to a text, as in training. Each is replaced atomically.
    """
    content = json.loads(tokenizer.to_str())
    content |= {"post_processor": None, "truncation": None, "padding": None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": end_of_text,
        "eos_token": end_of_text,
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / TOKENIZER_FILE, json.dumps(content, ensure_ascii=False))
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _merged_from(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that are merged last into this one: its encoding by the tokens of lower ids."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in itertools.pairwise(parts)]
        first = joined.index(min(joined))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts


def _characters() -> list[str]:
    """The printable character by which byte-level vocabularies spell each byte, as GPT-2's does."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


CHARACTERS = _characters()


def _spelled(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)
