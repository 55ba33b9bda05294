"""In which order the sequences of a text are read: epoch after epoch, each once an epoch."""

import numpy as np

ROUNDS = 8  # 4 suffice for Luby–Rackoff's security; small halves mix better with more


def mix64(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: a bijection on uint64; an input bit flips half the output bits."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant; numpy warns about it on scalars
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Permutation:
    """A pseudo-random permutation of 0 … n−1, a function of (seed, epoch), computed on demand, never stored.

    A Feistel network is a bijection for any round function. Its domain here is the smallest power of four
    that holds n values. Applying it again until the result is below n ("cycle walking") makes it a
    permutation of exactly n.
    """

    def __init__(self, n: int, *, seed: int, epoch: int = 0):
        self.n = n
        half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half_bits = np.uint64(half_bits)
        self._half_mask = np.uint64((1 << half_bits) - 1)
        key = mix64(mix64(np.uint64(seed % 2**64)) ^ np.uint64(epoch))
        self._round_keys = mix64(key ^ np.arange(ROUNDS, dtype=np.uint64))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Map positions (any shape, each in 0 … n−1) to their images, int64."""
        values = np.array(positions, dtype=np.uint64, ndmin=1)
        values = self._feistel(values)
        while (outside := values >= self.n).any():
            values[outside] = self._feistel(values[outside])
        return values.astype(np.int64).reshape(np.shape(positions))

    def _feistel(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (mix64(right ^ key) & self._half_mask)
        return left << self._half_bits | right


def shuffled(samples: np.ndarray, sequences: int, *, seed: int) -> np.ndarray:
    """Which of the sequences of a text each sample is, 0 … sequences − 1; int64, (N,).

    Sample k is the k-th that is read of the text, counted from 0.
    """
    epochs, positions = np.divmod(samples, sequences)
    indices = np.empty_like(samples)
    for epoch in np.unique(epochs):  # samples may reach into the next epoch
        there = epochs == epoch
        indices[there] = Permutation(sequences, seed=seed, epoch=int(epoch))(positions[there])
    return indices
