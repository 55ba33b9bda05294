import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.loader import BatchLoader
from data.mixture import Mixture, Schedule
from data.order import shuffled
from data.tokens import TokenShards


def counts_of(weights, samples):
    """(samples, sources): how many of the samples up to and with each one are from each source."""
    sources, _ = Schedule(weights)(np.arange(samples))
    return np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)


def assert_within_one(weights, counts):
    """In whole numbers: less than one sample from the share, after every sample."""
    samples, period = np.arange(1, len(counts) + 1)[:, None], sum(weights)
    assert (np.abs(counts * period - samples * np.array(weights)) < period).all()


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 40), min_size=1, max_size=8))
@example(weights=[1] * 11 + [60])
@example(weights=[499, 251, 250])
@example(weights=[20_000, 1, 333, 7])
def test_each_source_is_within_one_of_its_share_after_every_sample(weights):
    counts = counts_of(weights, 2 * sum(weights) + 3)
    assert_within_one(weights, counts)
    assert (counts[sum(weights) - 1] == weights).all()


def test_any_sample_is_found_without_those_before():
    schedule = Schedule([5, 3, 2])
    sources, before = schedule(np.arange(95))
    own = [0, 0, 0]
    for sample, source in enumerate(sources):
        assert before[sample] == own[source]
        own[source] += 1
        assert schedule.counts(sample + 1).tolist() == own
    far = 10**12 + np.arange(37, 95)  # a multiple of the period later: the same sources
    assert (schedule(far)[0] == sources[37:95]).all()
    assert (schedule(far)[1] == before[37:95] + 10**11 * np.array([5, 3, 2])[sources[37:95]]).all()


NAMES = ("a", "b", "c")
SIZES = (85, 1000, 30)  # tokens: 12, 142 and 4 sequences of 7


def mixture(weights=(3, 5, 1)):
    """The tokens of each source begin at a thousand of its own."""
    texts = [np.arange(size, dtype=np.uint16) + 2000 * i for i, size in enumerate(SIZES)]
    return Mixture(NAMES, weights, tuple(TokenShards(np.split(text, [20])) for text in texts))


def loader(**changed):
    arguments = {"context": 7, "sequences_per_step": 12, "micro_batch": 3, "seed": 5} | changed
    return BatchLoader(mixture(), **arguments)


def test_every_source_is_read_in_epochs_of_its_own():
    batches = loader()
    read = np.concatenate([batches.sequence_indices(step) for step in range(40)])
    epochs = np.concatenate([batches.epochs(step) for step in range(40)])
    assert batches.sequences == 12 + 142 + 4
    first = 0
    for name, count, share in zip(NAMES, (12, 142, 4), (3, 5, 1), strict=True):
        mine = (first <= read) & (read < first + count)
        assert {batches.order.text_of(index) for index in read[mine].tolist()} == {name}
        assert abs(mine.sum() * 9 - 480 * share) < 9
        alone = np.arange(mine.sum())
        in_order = shuffled(alone, count, seed=batches.order.seeds[NAMES.index(name)])
        assert (read[mine] - first == in_order).all()
        assert (epochs[mine] == alone // count).all()
        whole = read[mine][: mine.sum() // count * count].reshape(-1, count)
        assert (np.sort(whole, axis=1) == np.arange(first, first + count)).all()
        first += count
    assert batches.epoch_of(40) == pytest.approx(160 / 12, abs=0.1)  # "a" starts over most often
    assert len({*batches.order.seeds}) == 3


def test_rows_are_whole_sequences_of_one_source():
    """The last sequence of a source, too, whose last target is the last token that is used of it."""
    batches = loader()
    for step in range(30):
        indices = batches.sequence_indices(step)
        rows = [torch.cat(part) for part in zip(*batches.micro_batches(step), strict=True)]
        starts = [
            2000 * source + 7 * (index - first)
            for index in indices.tolist()
            for source, first, end in ((0, 0, 12), (1, 12, 154), (2, 154, 158))
            if first <= index < end
        ]
        assert torch.equal(rows[0], torch.tensor(starts)[:, None] + torch.arange(7))
        assert torch.equal(rows[1], rows[0] + 1)
