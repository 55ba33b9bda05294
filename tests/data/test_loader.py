import itertools
import queue
import threading

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.loader import BatchLoader, document_boundaries, evaluation_batches, stack_sequences
from data.mixture import Mixture, Schedule
from data.order import Permutation, shuffled
from data.tokens import TokenShards


def tokens_of(count: int, shards: tuple[int, ...] = ()) -> TokenShards:
    """0, 1, 2, … cut into shards at the given places."""
    return TokenShards(np.split(np.arange(count, dtype=np.uint16), shards))


def loader(count=1000, **changed) -> BatchLoader:
    arguments = {"context": 7, "sequences_per_step": 12, "micro_batch": 3, "seed": 5} | changed
    return BatchLoader(tokens_of(count, (333, 341, 500)), **arguments)


def test_rows_are_the_announced_sequences_and_targets_are_one_ahead():
    batches = list(loader().micro_batches(4))
    inputs = torch.cat([inputs for inputs, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    starts = torch.from_numpy(loader().sequence_indices(4) * 7)
    assert all(x.dtype == torch.int64 and x.is_contiguous() for x in (inputs, targets))
    assert torch.equal(inputs, starts[:, None] + torch.arange(7))
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("count", [8, 85, 1000])  # 1, 12 and 142 sequences; a step takes 12
def test_every_epoch_visits_every_sequence_once(count):
    batches = loader(count)
    steps = 3 * batches.sequences  # enough for several whole epochs
    indices = np.concatenate([batches.sequence_indices(step) for step in range(steps)])
    epochs = indices[: len(indices) // batches.sequences * batches.sequences].reshape(-1, batches.sequences)
    assert (np.sort(epochs, axis=1) == np.arange(batches.sequences)).all()
    if count == 1000:
        assert not (epochs[0] == epochs[1]).all()


def test_depends_on_seed_and_step_only():
    assert loader().epoch_of(71) == pytest.approx(71 * 12 / 142)
    asked_before = loader()
    for step in (9, 0, 3):
        asked_before.sequence_indices(step)
    assert (asked_before.sequence_indices(7) == loader().sequence_indices(7)).all()
    assert (loader(seed=6).sequence_indices(7) != loader().sequence_indices(7)).any()


def test_batches_made_ahead_are_those_asked_for():
    """Steps in order, repeated, left in the middle and out of order: as from a loader that only makes one."""
    asked = loader()
    for step in (0, 1, 1, 2, 9, 10, 3):
        wanted = list(loader().micro_batches(step))
        found = list(itertools.islice(asked.micro_batches(step), 2 if step == 2 else None))
        for one, other in zip(found, wanted, strict=step != 2):
            assert all(map(torch.equal, one, other))


def test_the_next_batch_is_made_while_one_is_used(monkeypatch):
    made, batches, here = queue.Queue(), loader(), threading.current_thread()

    def make(tokens, indices, *arguments, **options):
        if tokens is batches.tokens:  # not what a loader of another test still makes
            made.put((threading.current_thread() is here, indices[0]))
        return stack_sequences(tokens, indices, *arguments, **options)

    monkeypatch.setattr("data.loader.stack_sequences", make)
    for step in range(2):
        for micro_step, _ in enumerate(batches.micro_batches(step)):
            if (step, micro_step) == (0, 0):
                assert made.get(timeout=10) == (True, batches.sequence_indices(0)[0])
            following = 12 * step + 3 * (micro_step + 1)
            next_step, row = divmod(following, 12)
            assert made.get(timeout=10) == (False, batches.sequence_indices(next_step)[row])


def test_an_error_while_a_batch_is_made_ahead_reaches_who_asks_for_it(monkeypatch):
    def fail(*_, **__):
        raise OSError("the disk is gone")

    batches = loader().micro_batches(0)
    next(batches)
    monkeypatch.setattr("data.loader.stack_sequences", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        list(batches)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 50), st.integers(1, 9))
def test_ranks_share_a_step_without_overlap(ranks, micro_batch, micro_steps, step, context):
    shared = {"context": context, "sequences_per_step": ranks * micro_batch * micro_steps, "seed": 1}
    per_rank = [
        list(loader(micro_batch=micro_batch, rank=rank, ranks=ranks, **shared).micro_batches(step))
        for rank in range(ranks)
    ]
    # One process with a micro-batch as large as all ranks' together sees the same rows in the same passes.
    alone = loader(micro_batch=micro_batch * ranks, **shared).micro_batches(step)
    for micro_step, (inputs, targets) in enumerate(alone):
        assert torch.equal(torch.cat([batches[micro_step][0] for batches in per_rank]), inputs)
        assert torch.equal(torch.cat([batches[micro_step][1] for batches in per_rank]), targets)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_covers_the_first_sequences_in_order(ranks):
    options = {"context": 9, "sequences": 11, "micro_batch": 4, "ranks": ranks}
    per_rank = [list(evaluation_batches(tokens_of(200), rank=rank, **options)) for rank in range(ranks)]
    assert sorted(len(inputs) for batches in per_rank for inputs, _ in batches) == [3, 4, 4]
    in_order = [per_rank[j % ranks][j // ranks] for j in range(3)]
    inputs = torch.cat([inputs for inputs, _ in in_order])
    assert torch.equal(inputs, torch.arange(99).reshape(11, 9))
    assert torch.equal(torch.cat([targets for _, targets in in_order]), inputs + 1)


def test_sequences_are_all_that_have_a_token_to_predict_or_as_many_as_asked_for(caplog):
    assert loader(7 * 5).sequences == 4
    assert loader(7 * 5 + 1).sequences == 5
    orders = [loader(sequences=12).sequence_indices(step) for step in range(4)]
    assert all((np.sort(order) == np.arange(12)).all() for order in orders)
    assert (orders[0] != orders[1]).any()
    batches = list(evaluation_batches(tokens_of(101), context=10, sequences=500, micro_batch=4))
    assert sum(len(inputs) for inputs, _ in batches) == 10
    assert "holds 10 sequences of 10 tokens: validating on these instead of 500" in caplog.text


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: loader(7), r"7 tokens, too few .* context=7 .* use context=6 or less"),
        (lambda: list(evaluation_batches(tokens_of(7), context=7, sequences=1, micro_batch=1)), "context=6"),
        (lambda: loader(sequences=0), "train_sequences=0, but .* use 1 to 142"),
        (lambda: loader(sequences=143), "train_sequences=143, but .* 142 sequences"),
    ],
    ids=range(4),
)
def test_a_text_that_is_too_short_is_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(st.sampled_from([1, 2, 9]), min_size=5, max_size=5), min_size=1, max_size=4))
def test_a_document_ends_with_its_separator_or_its_sequence(rows):
    starts = [5 * r + i for r, row in enumerate(rows) for i in range(5) if i == 0 or row[i - 1] == 9]
    found = document_boundaries(np.array(rows), separator=9).tolist()
    assert found[: len(starts)] == starts
    assert set(found[len(starts) :]) == {5 * len(rows)}


def test_batches_say_where_documents_begin():
    """Separators are 6 modulo 7: the last token of every sequence, whatever sequences a batch has."""
    tokens = TokenShards([np.arange(1000, dtype=np.uint16) % 7])
    common = {"context": 14, "micro_batch": 3, "separator": 6}
    training = BatchLoader(tokens, sequences_per_step=6, seed=1, **common).micro_batches(0)
    for *_, boundaries in (*training, *evaluation_batches(tokens, sequences=6, **common)):
        assert boundaries.dtype == torch.int32
        assert boundaries.unique().tolist() == [0, 7, 14, 21, 28, 35, 42]
    assert len(next(loader().micro_batches(0))) == 2


def test_the_shape_of_boundaries_stays_unless_documents_are_short():
    generator = np.random.default_rng(6)
    shapes = {document_boundaries(generator.integers(0, 1100, (16, 4096)), 7).shape for _ in range(20)}
    assert shapes == {(129,)}
    assert document_boundaries(np.full((16, 4096), 7), 7).shape == (16 * 4096 + 1,)


@pytest.mark.parametrize("seed", [0, 2**63])
def test_every_small_size_is_permuted(seed):
    for n in range(1, 201):
        image = Permutation(n, seed=seed, epoch=3)(np.arange(n))
        assert sorted(image) == list(range(n))


def test_samples_of_a_huge_size_are_distinct_and_inside():
    n = 9_040_017_095
    positions = np.random.default_rng(0).choice(n, 100_000, replace=False)
    image = Permutation(n, seed=7)(positions)
    assert len(np.unique(image)) == len(np.unique(positions))
    assert image.min() >= 0
    assert image.max() < n


def test_each_element_reaches_each_place_equally_often():
    n, epochs = 6, 1000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), Permutation(n, seed=0, epoch=epoch)(np.arange(n))] += 1
    expected = epochs / n
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 60  # 25 degrees of freedom: exceeded once in ten thousand uniform tables


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 40), min_size=1, max_size=8))
@example(weights=[1] * 11 + [60])
@example(weights=[499, 251, 250])
@example(weights=[20_000, 1, 333, 7])
def test_each_source_is_within_one_of_its_share_after_every_sample(weights):
    period = sum(weights)
    samples = np.arange(1, 2 * period + 4)[:, None]
    sources, _ = Schedule(weights)(samples[:, 0] - 1)
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    assert (np.abs(counts * period - samples * np.array(weights)) < period).all()  # in whole numbers
    assert (counts[period - 1] == weights).all()


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


def mixed(weights=(3, 5, 1)):
    """The tokens of each source begin at a thousand of its own."""
    texts = [np.arange(size, dtype=np.uint16) + 2000 * i for i, size in enumerate(SIZES)]
    return Mixture(NAMES, weights, tuple(TokenShards(np.split(text, [20])) for text in texts))


def mixed_loader(**changed):
    arguments = {"context": 7, "sequences_per_step": 12, "micro_batch": 3, "seed": 5} | changed
    return BatchLoader(mixed(), **arguments)


def test_every_source_is_read_in_epochs_of_its_own():
    batches = mixed_loader()
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
    batches = mixed_loader()
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
