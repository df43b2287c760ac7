"""Windows over a ring for training and a line for evaluation: every token is a target once."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxlm.data.examples import Examples


def scored(examples, shift=0):
    """The targets under the mask, and the input that stands before each."""
    batch = examples.gather(np.arange(len(examples)), shift)
    return batch["inputs"][batch["mask"]], batch["targets"][batch["mask"]]


def test_example_i_holds_the_ith_stretch_and_its_targets_are_one_further():
    tokens = np.arange(100, 120, dtype=np.uint16)
    examples = Examples.ring(tokens, 6, 20)
    for i in range(3):
        example = examples.example(i)
        assert example["inputs"].tolist() == tokens[6 * i:6 * i + 6].tolist()
        assert example["targets"].tolist() == tokens[6 * i + 1:6 * i + 7].tolist() and example["mask"].all()
    assert example["inputs"].dtype == example["targets"].dtype == np.int32 and example["mask"].dtype == bool
    last = examples.example(3)
    assert last["mask"].tolist() == [True, True] + [False] * 4 and last["targets"][:2].tolist() == [119, 100]
    with pytest.raises(IndexError, match="example 4 of 4"):
        examples.example(4)


@hypothesis.given(st.integers(1, 12), st.integers(1, 60), st.data())
def test_a_ring_scores_every_token_once_after_its_neighbour_wherever_the_borders_lie(length, extra, data):
    tokens = np.arange(length + extra, dtype=np.uint16)
    examples = Examples.ring(tokens, length, 0)
    inputs, targets = scored(examples, data.draw(st.integers(0, len(tokens) - 1)))
    assert np.array_equal(np.sort(targets), tokens)
    assert np.array_equal(targets, (inputs + 1) % len(tokens))


@hypothesis.given(st.integers(1, 12), st.integers(1, 60))
def test_a_line_scores_every_token_once_in_order_and_its_context_never(length, size):
    examples = Examples.line(1000, np.arange(size, dtype=np.uint16), length, 0)
    inputs, targets = scored(examples)
    assert np.array_equal(targets, np.arange(size)) and examples.targets == size and len(examples) == -(-size // length)
    assert inputs[0] == 1000 and np.array_equal(inputs[1:], targets[:-1])


def test_an_index_past_the_end_has_no_targets():
    for examples in (Examples.ring(np.arange(9, dtype=np.uint16), 4, 9), Examples.line(0, np.arange(9, dtype=np.uint16), 4, 9)):
        assert not examples.gather(np.array([len(examples), len(examples) + 50]))["mask"].any()


def test_bits_per_byte_need_the_bytes_per_target():
    assert Examples.line(0, np.arange(10, dtype=np.uint16), 4, 35).bytes_per_target == 3.5
