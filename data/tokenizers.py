"""Text → token ids and back. Every document is followed by one end-of-text token."""

import base64
import importlib.util
import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import tiktoken
import tokenizers as huggingface

from data.huggingface_tokenizer import END_OF_TEXT, TokenizerFile, byte_pair_encoding, read

VOCABULARY_SIZES = {"gpt2": 50257, "bytes": 257}  # of the tokenizers that have a name

log = logging.getLogger(__name__)


def vocabulary_size(name: str) -> int:
    """Number of token ids of a tokenizer, end-of-text included. Raises ValueError as `load` does."""
    return VOCABULARY_SIZES.get(name) or _file(name).vocab_size


def tokenizer_identity(name: str) -> str | dict[str, str]:
    """What determines the ids of a text, as JSON: a tokenizer's name, or the content of its file.

    Raises ValueError as `load` does.
    """
    return name if name in VOCABULARY_SIZES else _file(name).identity


def id_dtype(vocab_size: int) -> np.dtype:
    """The dtype of token ids on disk and in memory: 16 bits, or 32 where the vocabulary needs them."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _file(name: str) -> TokenizerFile:
    if not Path(name).exists():
        raise ValueError(
            f"data.tokenizer={name} is unknown; choose one of {', '.join(VOCABULARY_SIZES)}, or the path of "
            "a tokenizer.json or of a folder with one"
        )
    return read(Path(name))


class Tokenizer(ABC):
    """A tokenizer. Its ids are stored in 16 bits, or 32 if there are more than 65,536."""

    name: str
    vocab_size: int
    end_of_text: int  # never the id of any text, not even of text that spells its name
    end_of_text_name: str = END_OF_TEXT
    unknown: int = -1  # the id of what has no other; -1: none, the tokenizer encodes any text

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end-of-text."""
        return self.encode_batch(pa.array([text], pa.large_string()))[0].tolist()

    @abstractmethod
    def encode_batch(self, texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of many texts, none of them null, without end-of-text.

        Returns all ids, concatenated, and the offset at which each text begins and the last one ends, (len +
        1,).
        """

    def encode_documents(self, texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of many documents, none of them null, each followed by end-of-text.

        Returns all ids, concatenated, uint16 or uint32 by the vocabulary, and the length of each document
        with its end-of-text, int64, (documents,).
        """
        ids, offsets = self.encode_batch(texts)
        lengths = np.diff(offsets) + 1
        ended = np.empty(lengths.sum(), id_dtype(self.vocab_size))
        ends = np.cumsum(lengths) - 1
        inside = np.ones(len(ended), bool)
        inside[ends] = False
        ended[inside], ended[ends] = ids[: offsets[-1]], self.end_of_text
        return ended, lengths

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of some ids; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""

    def count_bytes(self, ids: np.ndarray) -> int:
        """Bytes of UTF-8 that some ids stand for; end-of-text stands for none."""
        return len(self.decode(ids[ids != self.end_of_text]).encode("utf-8"))

    @abstractmethod
    def to_huggingface(self) -> huggingface.Tokenizer:
        """The same ids by Hugging Face's library, where `end_of_text_name` in a text is its id."""


def load(name: str, *, warn: bool = False) -> Tokenizer:
    """The tokenizer of that name: "gpt2", "bytes", or the path of a tokenizer.json or of a folder with one.

    GPT-2's is gigatoken if it is installed and works, else tiktoken, which gives the same ids. warn: log a
    line if gigatoken is installed but does not work. Raises ValueError for other names and files that cannot
    be used, OSError if GPT-2's vocabulary is neither cached nor downloadable.
    """
    if name == "bytes":
        return Bytes()
    if name != "gpt2":
        return FromFile(_file(name))
    encoding = _gpt2_encoding()
    if importlib.util.find_spec("gigatoken") is None:
        return Tiktoken(encoding)
    try:
        return Gigatoken(encoding)
    except ImportError as error:
        if warn:
            log.warning(
                "gigatoken is installed, but cannot be used (%s); tokenizing with tiktoken, which is 10 to "
                "20 times slower. Fix: pip install gigatoken awkward",
                error,
            )
        return Tiktoken(encoding)


class Bytes(Tokenizer):
    """UTF-8 bytes as ids 0 … 255, and 256 for end-of-text. Needs no vocabulary file."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256

    def encode_batch(self, texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
        return utf8(texts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return b"".join(
            bytes([int(i)]) if i != self.end_of_text else END_OF_TEXT.encode() for i in ids
        ).decode("utf-8", errors="replace")

    def count_bytes(self, ids: np.ndarray) -> int:
        return int((ids != self.end_of_text).sum())

    def to_huggingface(self) -> huggingface.Tokenizer:
        return byte_pair_encoding({bytes([byte]): byte for byte in range(256)}, words=False)


class Tiktoken(Tokenizer):
    """Byte-pair encoding by tiktoken, the tokenizer of record."""

    def __init__(self, encoding: tiktoken.Encoding):
        self.encoding = encoding
        self.name = encoding.name
        self.vocab_size = encoding.n_vocab
        self.end_of_text = encoding.eot_token

    def encode_batch(self, texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
        # As encode_ordinary (special tokens in the text are ordinary text), but without Python lists.
        documents = [self.encoding.encode_to_numpy(text, disallowed_special=()) for text in texts.to_pylist()]
        ends = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        ids = np.concatenate(documents) if documents else np.zeros(0, np.uint32)
        return ids, ends

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.encoding.decode([int(i) for i in ids], errors="replace")

    def count_bytes(self, ids: np.ndarray) -> int:
        return len(self.encoding.decode_bytes(ids[ids != self.end_of_text].tolist()))

    def to_huggingface(self) -> huggingface.Tokenizer:
        return byte_pair_encoding(self.encoding._mergeable_ranks, words=True)


class Gigatoken(Tiktoken):
    """The same ids by gigatoken, 10 to 20 times as fast. tiktoken decodes."""

    def __init__(self, encoding: tiktoken.Encoding):
        super().__init__(encoding)
        import awkward  # noqa: F401 - holds the ids; gigatoken may be installed without it
        import gigatoken

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "ranks.tiktoken")
            ranks = encoding._mergeable_ranks.items()
            path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks))
            # Without special tokens: with them, "<|endoftext|>" in a text would become the id of end-of-text.
            self._gigatoken = gigatoken.Tokenizer.from_tiktoken(path, pretokenizer="gpt2", special_tokens={})

    def encode_batch(self, texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
        documents = self._gigatoken.encode_batch(texts.to_pylist()).layout
        return documents.content.data, documents.offsets.data


class FromFile(Tokenizer):
    """A tokenizer of Hugging Face's library. It adds no token to a text, whatever its file says."""

    def __init__(self, file: TokenizerFile):
        self._tokenizer = file.tokenizer
        self.name = str(file.path)
        self.vocab_size = file.vocab_size
        self.end_of_text_name = file.end_of_text
        self.end_of_text = self._tokenizer.token_to_id(file.end_of_text)
        self.unknown = file.unknown

    def encode_batch(self, texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
        try:
            documents = self._tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
        except Exception as error:  # the library raises no other kind
            raise ValueError(f"{self.name} cannot encode a text ({error}); give another tokenizer") from error
        ids = [np.array(document.ids, np.uint32) for document in documents]
        ends = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        joined = np.concatenate(ids) if ids else np.zeros(0, np.uint32)
        if self.end_of_text in joined:
            raise ValueError(
                f"{self.name} has no tokens for a part of a text but {self.end_of_text_name}, which ends a "
                "text; remove that character from the text, or give another tokenizer or eos_token"
            )
        return joined, ends

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_huggingface(self) -> huggingface.Tokenizer:
        return self._tokenizer


def utf8(texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of all texts, uint8, and the offsets of their starts and the last end, int64 (len + 1,)."""
    if len(texts) == 0:
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
    _, offsets_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    return data[offsets[0] : offsets[-1]], offsets - offsets[0]


def _gpt2_encoding() -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:  # requests' errors are OSErrors too
        raise OSError(
            f"GPT-2's vocabulary could not be loaded ({type(error).__name__}). tiktoken downloads two files "
            "(1.5 MB) on first use: run once with a network connection, or copy tiktoken's cache from a "
            "machine that has it and set TIKTOKEN_CACHE_DIR to that folder. data.tokenizer=bytes needs no "
            "download"
        ) from error
