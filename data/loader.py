"""Which sequences make up a step. A pure function of (seed, step): resuming is exact and costs nothing.

The token array is cut into sequences of `context` tokens. Every epoch visits each of them once, in an order
of its own; of a mixture, every epoch of a source. The sequences of a step, and their order, are the same for
any number of ranks.
"""

import functools
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from data.mixture import MixedOrder, MixedTokens, Mixture
from data.tokens import TokenShards, count_sequences

log = logging.getLogger(__name__)

Batch = tuple[Tensor, ...]  # inputs, targets and, with a separator, the boundaries of documents


class BatchLoader:
    """The training batches of one rank."""

    def __init__(
        self,
        tokens: TokenShards | Mixture,
        *,
        context: int,
        sequences_per_step: int,
        micro_batch: int,
        seed: int,
        sequences: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        separator: int | None = None,
        pin_memory: bool = False,
    ):
        """`sequences_per_step` counts all ranks together; `micro_batch` is sequences per rank and pass.

        `sequences` uses the first so many of the text's sequences only; None: all, as for a mixture.
        `separator` is the token that ends a document: batches then say where documents lie.
        `pin_memory` gives page-locked tensors, which copy to a GPU asynchronously.
        `sequences_per_step` is a multiple of `micro_batch` · `ranks`.
        Raises ValueError if the data has fewer than `sequences`, or not one.
        """
        mixture = tokens if isinstance(tokens, Mixture) else Mixture((None,), (1,), (tokens,))
        counts = [count_sequences(text, context) for text in mixture.texts]
        if sequences is not None:
            if not 1 <= sequences <= counts[0]:
                raise ValueError(
                    f"train_sequences={sequences}, but {tokens.name} holds {counts[0]} sequences of "
                    f"context={context}; use 1 to {counts[0]}, or null for all"
                )
            counts = [sequences]
        self.tokens = MixedTokens(mixture.texts, counts, context)
        self.order = MixedOrder(mixture, counts, seed=seed)
        self.context = context
        self.sequences_per_step = sequences_per_step
        self.micro_batch = micro_batch
        self.rank = rank
        self.ranks = ranks
        self.separator = separator
        self.pin_memory = pin_memory
        self.sequences = self.order.sequences
        # A thread that pins memory would use the first GPU, and allocate memory there.
        gpu = (torch.cuda.set_device, (torch.cuda.current_device(),)) if pin_memory else (None, ())
        self._maker = ThreadPoolExecutor(1, "batches", *gpu)
        self._ahead: tuple[tuple[int, int], Future] | None = None  # (step, micro-step) and its batch

    def epoch_of(self, step: int) -> float:
        """Epochs done when `step` begins; of a mixture, of the source that is read most often."""
        return max(self.order.epochs_of_sources(step * self.sequences_per_step))

    def epochs(self, step: int) -> np.ndarray:
        """How often each sequence of a step was read before; int64, (sequences_per_step,)."""
        return self.order.epochs(self._samples(step))

    def sequence_indices(self, step: int) -> np.ndarray:
        """The sequences of a step, all ranks', in order; int64, (sequences_per_step,)."""
        return self.order.indices(self._samples(step))

    def _samples(self, step: int) -> np.ndarray:
        """The numbers of a step's sequences among those of the run."""
        return step * self.sequences_per_step + np.arange(self.sequences_per_step, dtype=np.int64)

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """This rank's batches of a step, as :func:`stack_sequences` makes them of micro_batch sequences.

        Row i of micro-step m is row (m · ranks + rank) · micro_batch + i of the step. A thread prepares the
        next batch meanwhile; after the last one, the first of the next step.
        """
        micro_steps = self.sequences_per_step // (self.micro_batch * self.ranks)
        for micro_step in range(micro_steps):
            batch = self._take(step, micro_step)
            following = (step, micro_step + 1) if micro_step + 1 < micro_steps else (step + 1, 0)
            self._ahead = following, self._maker.submit(self._make, *following)
            yield batch

    def _take(self, step: int, micro_step: int) -> Batch:
        if self._ahead is not None and self._ahead[0] == (step, micro_step):
            return self._ahead[1].result()
        return self._make(step, micro_step)

    def _make(self, step: int, micro_step: int) -> Batch:
        shares = self._indices(step).reshape(-1, self.ranks, self.micro_batch)
        indices = shares[micro_step, self.rank]
        how = {"separator": self.separator, "pin_memory": self.pin_memory}
        return stack_sequences(self.tokens, indices, self.context, **how)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - one loader lives as long as its run
    def _indices(self, step: int) -> np.ndarray:
        return self.sequence_indices(step)


def evaluation_batches(
    tokens: TokenShards,
    *,
    context: int,
    sequences: int,
    micro_batch: int,
    rank: int = 0,
    ranks: int = 1,
    separator: int | None = None,
) -> Iterator[Batch]:
    """The first `sequences` sequences of the validation text, or all of them, as micro_batches gives them.

    Batch j belongs to rank j mod ranks; the last one may be smaller, so weight by tokens.
    Raises ValueError when the text is shorter than one sequence.
    """
    available = count_sequences(tokens, context)
    if available < sequences:
        _warn_once(
            f"{tokens.name} holds {available} sequences of {context} tokens: validating on these instead of "
            f"{sequences}"
        )
    used = min(available, sequences)
    for first in range(rank * micro_batch, used, ranks * micro_batch):
        indices = np.arange(first, min(first + micro_batch, used))
        yield stack_sequences(tokens, indices, context, separator=separator)


def stack_sequences(
    tokens: TokenShards | MixedTokens,
    indices: np.ndarray,
    context: int,
    *,
    separator: int | None = None,
    pin_memory: bool = False,
) -> Batch:
    """(inputs, targets) of some sequences, int64 on the CPU, each (len(indices), context).

    Targets are a token ahead. With a `separator`, also the :func:`document_boundaries` of the inputs. The
    target of a separator is the next document's first token: it counts in the loss as any other.
    """
    inputs = torch.empty(len(indices), context, dtype=torch.int64, pin_memory=pin_memory)
    targets = torch.empty_like(inputs, pin_memory=pin_memory)
    for row, index in enumerate(indices):
        window = tokens.window(int(index) * context, context + 1)
        inputs.numpy()[row] = window[:-1]
        targets.numpy()[row] = window[1:]
    if separator is None:
        return inputs, targets
    boundaries = torch.from_numpy(document_boundaries(inputs.numpy(), separator))
    return inputs, targets, boundaries.pin_memory() if pin_memory else boundaries


def document_boundaries(inputs: np.ndarray, separator: int) -> np.ndarray:
    """Where documents begin in sequences (B, N) that lie end to end: cu_seqlens, int32, (documents + 1,).

    A document ends with its separator, or with its sequence: the next one continues it as a new document.
    Behind the last there are documents without tokens, up to a power of two that has room for a document in
    1024 tokens and one more for each sequence. So the shape hardly ever changes, and torch.compile compiles
    once for each that there is.
    """
    begins = np.ones(inputs.shape, bool)
    begins[:, 1:] = inputs[:, :-1] == separator
    starts = np.flatnonzero(begins)
    room = max(len(starts), len(inputs) + -(-inputs.size // 1024))
    boundaries = np.full((1 << (room - 1).bit_length()) + 1, inputs.size, np.int32)
    boundaries[: len(starts)] = starts
    return boundaries


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)
