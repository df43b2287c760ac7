"""Streams of several parts read as one array does."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxlm.data.examples import Examples
from jaxlm.data.streams import Stream, joined, with_documents
from partitioning.declaration import DeclarationError

part_sizes = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 1)


def parts_of(sizes):
    whole = np.arange(sum(sizes), dtype=np.uint16)
    return whole, tuple(np.split(whole, np.cumsum(sizes)[:-1]))


@hypothesis.given(part_sizes, st.data())
def test_reads_and_cuts_are_those_of_one_array(sizes, data):
    whole, parts = parts_of(sizes)
    ends = np.array(sorted(data.draw(st.sets(st.integers(1, len(whole)))) | {len(whole)}))
    stream = Stream(parts, ends, ends * 3, tuple((part % 2).astype(np.uint8) for part in parts))
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    assert stream.read(begin, end).tolist() == whole[begin:end].tolist()
    assert stream.read_loss(begin, end).tolist() == (whole[begin:end] % 2).tolist()
    places = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6)), np.int64)
    assert stream.at(places).tolist() == whole[places].tolist()
    piece = stream.cut(begin, end, begin * 3, end * 3)
    assert piece.read(0, len(piece)).tolist() == whole[begin:end].tolist() and piece.bytes == (end - begin) * 3
    inside = [e - begin for e in ends.tolist() if begin < e < end] + [end - begin] * (end > begin)
    assert piece.ends.tolist() == inside and piece.byte_ends.tolist() == [e * 3 for e in inside]
    both = joined([stream.cut(0, begin, 0, begin * 3), stream.cut(begin, len(whole), begin * 3, len(whole) * 3)])
    assert both.read(0, len(both)).tolist() == whole.tolist() and both.bytes == stream.bytes
    assert set(ends.tolist()) | ({begin} - {0}) == set(both.ends.tolist())


@hypothesis.given(part_sizes, st.integers(1, 6), st.data())
def test_examples_do_not_notice_parts(sizes, length, data):
    whole, parts = parts_of(sizes)
    length = min(length, len(whole) - 1)
    shift = data.draw(st.integers(0, len(whole) - 1))
    for make, extra in ((Examples.ring, ()), (Examples.line, (7,))):
        one, other = (make(*extra, tokens, length, None) for tokens in (whole, Stream(parts)))
        for a, b in zip(one.gather(np.arange(len(one) + 1), shift if not extra else 0).values(),
                        other.gather(np.arange(len(one) + 1), shift if not extra else 0).values()):
            assert np.array_equal(a, b)


@hypothesis.given(st.lists(st.integers(0, 1), min_size=3, max_size=30), st.integers(1, 5), st.integers(0, 29))
def test_targets_without_loss_are_masked_wherever_the_borders_lie(loss, length, shift):
    length, shift = min(length, len(loss) - 1), shift % len(loss)
    stream = Stream((np.arange(len(loss), dtype=np.uint16),), loss=(np.array(loss, np.uint8),))
    for examples, at in ((Examples.ring(stream, length, None), shift), (Examples.line(0, stream, length, None), 0)):
        batch = examples.gather(np.arange(len(examples)), at)
        assert sorted(batch["targets"][batch["mask"]].tolist()) == np.flatnonzero(loss).tolist()
        assert examples.targets == sum(loss)


def test_documents_of_a_flat_stream_end_behind_each_end_token():
    stream = Stream((np.array([5, 0, 6], np.uint16), np.array([7, 0, 0, 8], np.uint16)))
    assert with_documents(stream, 0).ends.tolist() == [2, 5, 6, 7]
    assert with_documents(stream, None).ends.tolist() == [7]
    assert with_documents(stream, 9).ends.tolist() == [7]


def test_ids_that_the_model_does_not_have_stop_the_run_with_their_number():
    examples = Examples.ring(Stream((np.array([1, 2, 70, 3], np.uint16),), limit=64), 2, None)
    with pytest.raises(DeclarationError, match="hold the id 70, but config.model.vocab_size = 64"):
        examples.gather(np.arange(2))
    with pytest.raises(DeclarationError, match="hold the id -1"):
        Stream((), limit=64).check(np.array([3, -1, 70]))
