"""Which documents are validation text.

The rule is deterministic and uses positions only. It needs neither the content of the documents nor a second
pass, and does not depend on the number of processes.
"""

import numpy as np

from data.permutation import mix64

# A fraction that suits gigabytes would leave a small text too little validation text for one sequence.
SMALLEST_VALIDATION = 256 << 10  # bytes of text
LARGEST_SHARE = 0.1  # of a small text, even if that is less than SMALLEST_VALIDATION


def effective_fraction(val_fraction: float, text_bytes: int) -> float:
    """Validation part of a text of this size: `val_fraction`, or 256 KiB if more, but at most a tenth."""
    if text_bytes <= 0:
        return val_fraction
    return max(val_fraction, min(LARGEST_SHARE, SMALLEST_VALIDATION / text_bytes))


def in_validation(unit: int, first: int, count: int, fraction: float) -> np.ndarray:
    """Which of the documents first … first + count − 1 of a work unit are validation text; bool, (count,).

    Each is with probability `fraction`, by a hash of its position. The very first document always is, so that
    no split is empty.
    """
    positions = np.arange(first, first + count, dtype=np.uint64)
    hashes = mix64(positions ^ mix64(np.uint64(unit) + np.uint64(1)))
    chosen = hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if unit == 0 and first == 0 and count:
        chosen[0] = True
    return chosen
