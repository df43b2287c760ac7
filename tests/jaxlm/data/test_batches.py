"""The order of training data is a pure function of (seed, step); evaluation passes over its text exactly once."""

import itertools
import threading

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxlm.data import Examples, eval_batches, train_batches
from jaxlm.data.mixture import alone


def ring(size, length):
    return Examples.ring(np.arange(size, dtype=np.uint16), length, size)


def take(count, examples, *, batch_size, seed, **options):
    batches = train_batches(alone(examples, batch_size, seed), **options)
    out = list(itertools.islice(batches, count))
    batches.close()
    return out


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) and one[k].dtype == other[k].dtype for k in one)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(5, 60), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2 ** 40), st.integers(0, 70),
                  st.data())
def test_any_rows_from_any_start_are_rows_of_the_one_order(size, length, batch_size, seed, start, data):
    examples = ring(size, length)
    whole = take(start + 3, examples, batch_size=batch_size, seed=seed, prefetch=0)
    cuts = sorted(data.draw(st.sets(st.integers(1, batch_size), max_size=3)) | {0, batch_size})
    parts = [take(3, examples, batch_size=batch_size, seed=seed, start_step=start, rows=range(a, b),
                  prefetch=data.draw(st.sampled_from([0, 2])), workers=data.draw(st.sampled_from([1, 3])))
             for a, b in itertools.pairwise(cuts)]
    for step, pieces in enumerate(zip(*parts)):
        joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        assert same(joined, whole[start + step])


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(5, 60), st.integers(1, 4), st.integers(1, 9), st.integers(0, 100))
def test_every_target_counts_once_in_every_epoch(size, length, batch_size, seed):
    examples = ring(size, length)
    steps = -(-3 * len(examples) // batch_size)
    batches = take(steps, examples, batch_size=batch_size, seed=seed, prefetch=0)
    rows = [(t, m) for batch in batches for t, m in zip(batch["targets"], batch["mask"])]
    for epoch in range(3):
        of_epoch = rows[epoch * len(examples):(epoch + 1) * len(examples)]
        targets = np.concatenate([t[m] for t, m in of_epoch])
        assert np.array_equal(np.sort(targets), np.arange(size))


def test_epochs_and_seeds_differ_in_order_and_in_borders():
    examples = ring(1000, 10)
    epochs = [take(1, examples, batch_size=100, seed=seed, start_step=epoch)[0]["inputs"][:, 0]
              for seed, epoch in itertools.product(range(3), range(3))]
    for one, other in itertools.combinations(epochs, 2):
        assert not np.array_equal(np.diff(one) % 1000, np.diff(other) % 1000), "the order differs by more than the borders"
    assert len({int(first[0]) % 10 for first in epochs}) > 2, "the borders move"
    assert all(len(set(first % 10)) == 1 for first in epochs), "within an epoch they do not"


def test_a_batch_has_the_agreed_arrays():
    batch = take(1, ring(100, 8), batch_size=6, seed=0, rows=[1, 4])[0]
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        "inputs": ((2, 8), np.int32), "targets": ((2, 8), np.int32), "mask": ((2, 8), bool), "example": ((2,), np.int32)}
    assert batch["example"].tolist() == [1, 4] and all(v.flags.c_contiguous for v in batch.values())


def test_rows_outside_the_batch_are_refused():
    for rows in ([], [4], [-1]):
        with pytest.raises(ValueError, match="batch of 4"):
            train_batches(alone(ring(100, 8), 4, 0), rows=rows)


def test_a_start_far_along_costs_no_replay():
    examples = ring(100, 8)
    far = 2 ** 40
    one = take(2, examples, batch_size=4, seed=0, start_step=far)[1]
    other = take(1, examples, batch_size=4, seed=0, start_step=far + 1)[0]
    assert same(one, other)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3))
def test_evaluation_scores_every_token_once_however_the_rows_are_shared(size, length, batch_size, parts):
    examples = Examples.line(99, np.arange(size, dtype=np.uint16), length, size)
    seen = []
    for part in range(min(parts, batch_size)):
        batches = list(eval_batches(examples, batch_size=batch_size, rows=range(part, batch_size, parts), prefetch=0))
        assert len(batches) == -(-len(examples) // batch_size), "every process takes the same number of steps"
        assert len({batch["inputs"].shape for batch in batches}) == 1
        seen += [batch["targets"][batch["mask"]] for batch in batches]
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(size))


def test_evaluation_can_stop_early_and_then_is_over():
    examples = Examples.line(99, np.arange(60, dtype=np.uint16), 3, 60)
    batches = eval_batches(examples, batch_size=4, limit=2)
    assert [int(b["mask"].sum()) for b in batches] == [12, 12] and list(batches) == []
    assert list(eval_batches(examples, batch_size=4, limit=0)) == []


def test_closing_ends_reading_ahead():
    before = set(threading.enumerate())
    batches = train_batches(alone(ring(100, 8), 4, 0), prefetch=3)
    next(batches)
    assert set(threading.enumerate()) - before, "something was reading ahead"
    batches.close()
    batches.close()
    assert list(batches) == []
