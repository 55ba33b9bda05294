"""In which order the sequences of a text are read: epoch after epoch, each once an epoch."""

import numpy as np

from data.permutation import Permutation


class EpochOrder:
    """The order of `sequences` sequences. Sample k of a run is its k-th sequence, counted from 0."""

    def __init__(self, sequences: int, *, seed: int):
        self.sequences = sequences
        self.seed = seed

    def indices(self, samples: np.ndarray) -> np.ndarray:
        """Which sequence each sample is, 0 … sequences − 1; int64, the shape of `samples`, (N,)."""
        epochs, positions = np.divmod(samples, self.sequences)
        indices = np.empty_like(samples)
        for epoch in np.unique(epochs):  # samples may reach into the next epoch
            there = epochs == epoch
            permutation = Permutation(self.sequences, seed=self.seed, epoch=int(epoch))
            indices[there] = permutation(positions[there])
        return indices

    def epochs(self, samples: np.ndarray) -> np.ndarray:
        """How often each sample's sequence was read before."""
        return samples // self.sequences

    def epochs_done(self, samples: int) -> float:
        """Epochs after so many samples."""
        return samples / self.sequences

    def text_of(self, index: int) -> str | None:
        """The name of the source of a sequence, if there are several."""
        return None

    def description(self, samples: int, *, context: int) -> list[str]:
        """What so many samples read of each source, if there are several: a line for each."""
        return []
