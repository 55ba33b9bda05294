import numpy as np
import pytest

from data.order import Permutation, mix64


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


def test_is_a_function_of_seed_and_epoch():
    positions = np.arange(1000)

    def order(seed, epoch):
        return Permutation(1000, seed=seed, epoch=epoch)(positions)

    assert (order(1, 2) == order(1, 2)).all()
    for other in (order(1, 3), order(2, 2), order(2, 1)):
        assert (order(1, 2) == other).mean() < 0.02  # one in a thousand agrees by chance


def test_each_element_reaches_each_place_equally_often():
    n, epochs = 6, 1000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), Permutation(n, seed=0, epoch=epoch)(np.arange(n))] += 1
    expected = epochs / n
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 60  # 25 degrees of freedom: exceeded once in ten thousand uniform tables


def test_mix64_equals_splitmix64():
    # The first outputs of the published generator from state 0, which adds the constant that mix64 adds.
    states = (np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(value) for value in mix64(states)] == expected
