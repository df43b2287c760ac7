"""Documents packed whole: the fit is the best one, every token counts once, segments know nothing of each other."""

import collections

import hypothesis
import numpy as np
from hypothesis import strategies as st

from jaxlm.data import eval_batches, train_batches
from jaxlm.data.mixture import alone
from jaxlm.data.packing import best_fit, pack
from jaxlm.data.streams import Stream

CONTEXT = 9999


def stream_of(sizes, **options):
    """Token i is the number i."""
    ends = np.cumsum(np.array(sizes, np.int64))
    return Stream((np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.uint16),), ends, **options)


def naive_rooms(lengths, room):
    left = []
    for length in sorted(lengths, reverse=True):
        fits = [(r, i) for i, r in enumerate(left) if r >= length]
        if fits:
            left[min(fits)[1]] -= length
        else:
            left.append(room - length)
    return sorted(left)


@hypothesis.given(st.integers(1, 20), st.data())
def test_pieces_go_where_they_leave_the_least_room(room, data):
    lengths = np.array(data.draw(st.lists(st.integers(1, room), max_size=50)), np.int64)
    bins = best_fit(lengths, room)
    used = np.bincount(bins, lengths).astype(int)
    assert sorted(room - used) == naive_rooms(lengths.tolist(), room)


@hypothesis.given(st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any), st.integers(1, 12), st.integers(0, 9))
def test_every_token_is_a_target_once_in_its_documents_order(sizes, length, seed):
    stream = stream_of(sizes)
    packed = pack(stream, length, None, CONTEXT, seed)
    rows = packed.gather(np.arange(len(packed)))
    assert np.array_equal(np.sort(rows["targets"][rows["mask"]]), np.arange(len(stream)))
    assert np.array_equal(rows["mask"], rows["segment_ids"] > 0), "padding, and nothing else, is no target"
    assert abs(packed.padding - (1 - rows["mask"].mean())) < 1e-12
    starts = {0, *stream.ends.tolist()}
    for i in range(len(packed)):
        for segment in range(1, rows["segment_ids"][i].max() + 1):
            at = rows["segment_ids"][i] == segment
            targets, inputs = rows["targets"][i][at], rows["inputs"][i][at]
            assert rows["positions"][i][at].tolist() == list(range(at.sum())) and np.ptp(np.flatnonzero(at)) == at.sum() - 1
            assert np.array_equal(targets, targets[0] + np.arange(len(targets))), "a stretch of the stream"
            assert not starts & set(targets[1:].tolist()), "of one document"
            assert inputs[0] == (CONTEXT if int(targets[0]) in starts else targets[0] - 1)
            assert np.array_equal(inputs[1:], targets[:-1])
    past = packed.gather(np.array([len(packed), len(packed) + 7]))
    assert not past["mask"].any() and not past["segment_ids"].any()


def test_a_document_that_fits_is_never_cut_and_a_longer_one_fills_rows():
    packed = pack(stream_of([5, 12, 3, 8]), 8, None, CONTEXT, 0)
    assert sorted(packed.lengths.tolist()) == [3, 4, 5, 8, 8]
    assert len(packed) == 4 and packed.padding == 1 - 28 / 32


def test_a_beginning_token_is_the_context_and_no_target():
    """The second document lacks it, as one that was cut does, and the last are that token alone and nothing."""
    stream = Stream((np.array([7, 1, 2, 3, 4, 5, 6, 7], np.uint16),), np.array([4, 7, 8, 8]))
    packed = pack(stream, 8, None, 7, 0, begun=True)
    row = packed.example(0)
    assert sorted(row["targets"][row["mask"]].tolist()) == [1, 2, 3, 4, 5, 6] and packed.targets == 6
    firsts = row["inputs"][(row["positions"] == 0) & (row["segment_ids"] > 0)]
    assert firsts.tolist() == [7, 7]


def test_tokens_without_loss_are_seen_but_are_no_targets():
    loss = np.array([0, 0, 1, 1, 0, 1, 0], np.uint8)
    packed = pack(stream_of([4, 3], loss=(loss,)), 8, None, CONTEXT, 0)
    row = packed.example(0)
    assert sorted(row["targets"][row["mask"]].tolist()) == [2, 3, 5] and packed.targets == 3
    assert (row["segment_ids"] > 0).sum() == 7


def test_a_token_that_equals_the_padding_is_a_target_all_the_same():
    """The mask comes from lengths, never from values: an end token of id 0 is learnt."""
    stream = Stream((np.zeros(6, np.uint16),), np.array([2, 6]))
    row = pack(stream, 8, None, 0, 0).example(0)
    assert row["mask"].tolist() == [True] * 6 + [False] * 2


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 5), st.integers(1, 3))
def test_an_epoch_of_batches_accounts_for_every_token(sizes, batch_size, epochs):
    packed = pack(stream_of(sizes), 8, None, CONTEXT, 1)
    batches = list(train_batches(alone(packed, batch_size, 3, epochs), prefetch=0))
    counts = collections.Counter(t for batch in batches for t in batch["targets"][batch["mask"]].tolist())
    assert counts == {t: epochs for t in range(sum(sizes))}
    assert len(batches) == -(-epochs * len(packed) // batch_size)
    batches = eval_batches(packed, batch_size=batch_size, prefetch=0)
    whole = [t for batch in batches for t in batch["targets"][batch["mask"]].tolist()]
    assert sorted(whole) == list(range(sum(sizes)))
