"""Tokenizers as files of Hugging Face's `tokenizers` library, which transformers and others read."""

import functools
import hashlib
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from common.files import write_text

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"  # of GPT-2 and of bytes


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json that can be used, and the token that ends a document."""

    path: Path
    tokenizer: tokenizers.Tokenizer  # without truncation and padding; what spells a special token is text
    sha256: str
    vocab_size: int  # the largest id and one
    end_of_text: str
    unknown: int  # the id of what has no other, -1 if there is none

    @property
    def identity(self) -> dict[str, str]:
        """What determines the ids of a text, as JSON."""
        return {"sha256": self.sha256, "end_of_text": self.end_of_text}


def read(path: Path) -> TokenizerFile:
    """The tokenizer.json at `path`, or in that folder.

    Its end-of-text is the eos_token of the tokenizer_config.json next to it, else its only special token.
    Raises ValueError, naming the fix, if a file is missing or damaged, or if it says no end-of-text.
    """
    file = path / TOKENIZER_FILE if path.is_dir() else path
    config = file.with_name(CONFIG_FILE)
    content = _read(file)
    return _described(file, content, _read(config) if config.exists() else "{}")


@functools.lru_cache(maxsize=4)
def _described(file: Path, content: str, config: str) -> TokenizerFile:
    try:
        loaded = tokenizers.Tokenizer.from_str(content)
    except BaseException as error:  # a panic of the library's Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(
            f"{file} is no file of Hugging Face's tokenizers library ({error}); give a tokenizer.json"
        ) from error
    vocabulary = loaded.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    end_of_text = _end_of_text(file, loaded, config)
    if end_of_text not in vocabulary:
        raise ValueError(f"{file} has no token {end_of_text!r}, the eos_token of {CONFIG_FILE}; correct that")
    loaded.no_truncation()
    loaded.no_padding()
    _take_special_tokens_for_text(loaded, end_of_text)
    model = json.loads(content)["model"]
    unknown = model.get("unk_id", vocabulary.get(model.get("unk_token")))
    if unknown in (None, vocabulary[end_of_text]):  # which no text may be encoded as
        unknown = -1
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    return TokenizerFile(file, loaded, sha256, size, end_of_text, unknown)


def _take_special_tokens_for_text(loaded: tokenizers.Tokenizer, end_of_text: str) -> None:
    """From now on a text that spells a special token is encoded as any other, by further tokens.

    Sentencepiece's models have special tokens among the tokens of text, and their library keeps apart what
    spells one. Here its first character is split from the others, so that the model does not see it whole.
    """
    loaded.add_special_tokens([end_of_text])
    loaded.encode_special_tokens = True
    special = [token.content for token in loaded.get_added_tokens_decoder().values() if token.special]
    spelled = [name for name in special if len(name) > 1 and loaded.model.token_to_id(name) is not None]
    if spelled:
        first = Regex("|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in spelled))
        split = pre_tokenizers.Split(first, "merged_with_previous")
        before = [loaded.pre_tokenizer] if loaded.pre_tokenizer else []
        loaded.pre_tokenizer = pre_tokenizers.Sequence([*before, split])


def _end_of_text(file: Path, loaded: tokenizers.Tokenizer, config: str) -> str:
    try:
        named: Any = json.loads(config).get("eos_token")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file.with_name(CONFIG_FILE)} is damaged ({error}); copy it again") from error
    if isinstance(named, dict):
        named = named.get("content")
    if isinstance(named, str):
        return named
    special = [token.content for token in loaded.get_added_tokens_decoder().values() if token.special]
    if len(special) == 1:
        return special[0]
    listed = ", ".join(special[:8]) + (", …" if len(special) > 8 else "") if special else "none"
    raise ValueError(
        f"{file} does not say which token ends a text (special tokens: {listed}); name it in "
        f'{file.with_name(CONFIG_FILE)}: {{"eos_token": "TOKEN"}}'
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); give a tokenizer.json or its folder") from error


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
