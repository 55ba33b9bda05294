"""How token ids are stored: 16 bits each, or 32 where the vocabulary needs them."""

import numpy as np

LARGEST_16_BIT_VOCABULARY = 1 << 16


def id_dtype(vocab_size: int) -> np.dtype:
    """The dtype of token ids on disk and in memory, little-endian. Raises ValueError beyond 32 bits."""
    if vocab_size > 1 << 32:
        raise ValueError(f"a vocabulary of {vocab_size} ids does not fit into 32 bits; use a smaller one")
    return np.dtype("<u2" if vocab_size <= LARGEST_16_BIT_VOCABULARY else "<u4")


def description(ids: np.dtype) -> str:
    """The dtype in words, as manifests have it."""
    return f"unsigned {8 * ids.itemsize}-bit integers, little-endian"
