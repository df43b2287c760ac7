"""The order is a real permutation, computed from its key."""

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxlm.data.order import key, permute


def order(size, seed=0, epoch=0):
    return permute(np.arange(size), size, np.repeat(key(seed, np.array([epoch]), "order"), size))


@hypothesis.given(st.integers(1, 5000), st.integers(0, 2 ** 70), st.integers(0, 2 ** 40))
def test_every_number_comes_once(size, seed, epoch):
    assert np.array_equal(np.sort(order(size, seed, epoch)), np.arange(size))


@hypothesis.given(st.integers(1, 2 ** 61), st.data())
def test_a_position_needs_no_other_and_each_has_its_own_key(size, data):
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8)))
    keys = key(7, np.arange(len(positions)), "order")
    together = permute(positions, size, keys)
    assert together.tolist() == [permute(positions[i:i + 1], size, keys[i:i + 1])[0] for i in range(len(positions))]
    assert together.min() >= 0 and together.max() < size


def test_the_order_is_what_it_always_was():
    """A checkpoint's data position means nothing when this changes."""
    assert order(10).tolist() == [3, 7, 0, 1, 9, 5, 6, 8, 2, 4]
    assert order(100_000, seed=3, epoch=2)[:5].tolist() == [722, 50917, 3414, 76412, 65957]


def test_seeds_epochs_and_purposes_give_unrelated_keys():
    keys = [int(key(seed, np.array([epoch]), purpose)[0])
            for seed, epoch, purpose in itertools.product((0, 1, 2, 2 ** 64), range(50), ("order", "shift"))]
    assert len(set(keys)) == len(keys)
    assert not np.array_equal(order(50, seed=0, epoch=1), order(50, seed=1, epoch=0)), "seeds are not epochs moved on"


@pytest.mark.parametrize("size", [100, 3556, 65_536, 100_000])
def test_neighbours_and_epochs_are_uncorrelated(size):
    """Correlations times the root of the size are about standard normal; the mean of 30, times root 30, too."""
    epochs = [order(size, epoch=e).astype(float) for e in range(31)]
    def z(pairs):
        return np.array([np.corrcoef(a, b)[0, 1] for a, b in pairs]) * size ** 0.5
    neighbours, places = [(p[:-1], p[1:]) for p in epochs[:30]], [(p, np.arange(size)) for p in epochs[:30]]
    for scores in (z(neighbours), z(zip(epochs, epochs[1:])), z(places)):
        assert abs(scores.mean()) * 30 ** 0.5 < 5 and np.abs(scores).max() < 5.5
    steps = np.concatenate([np.diff(p) % size for p in epochs])
    counts = np.histogram(steps, bins=20, range=(1, size))[0]
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 70, "chi-square with 19 degrees of freedom"


def test_small_permutations_are_all_equally_likely():
    draws = 6000
    keys = np.repeat(key(0, np.arange(draws), "order"), 4)
    orders = permute(np.tile(np.arange(4), draws), 4, keys).reshape(draws, 4)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24 and ((counts - draws / 24) ** 2 / (draws / 24)).sum() < 60, "chi-square with 23 degrees of freedom"
