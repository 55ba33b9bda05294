"""Which documents are held out for evaluation.

The rule is deterministic and looks at positions only, so it needs neither the documents' contents nor a
second pass, and does not depend on how many processes share the work.
"""

import numpy as np

from data.permutation import mix64

# A fraction that suits gigabytes would leave a small text a held-out part too short for one sequence.
SMALLEST_HELD_OUT = 256 << 10  # bytes of text
LARGEST_SHARE = 0.1  # of a small text, whatever SMALLEST_HELD_OUT says


def effective_fraction(val_fraction: float, text_bytes: int) -> float:
    """The held-out part of a text of this size: `val_fraction`, or if more 256 KiB, at most a tenth."""
    if text_bytes <= 0:
        return val_fraction
    return max(val_fraction, min(LARGEST_SHARE, SMALLEST_HELD_OUT / text_bytes))


def held_out(unit: int, first: int, count: int, fraction: float) -> np.ndarray:
    """Which of the documents first … first + count − 1 of a work unit are held out; bool, (count,).

    Each is with probability `fraction`, by a hash of its position. The very first document of all always is,
    so that no split comes out empty.
    """
    positions = np.arange(first, first + count, dtype=np.uint64)
    hashes = mix64(positions ^ mix64(np.uint64(unit) + np.uint64(1)))
    chosen = hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if unit == 0 and first == 0 and count:
        chosen[0] = True
    return chosen
