"""Sources in their shares, in an order that any process computes from (seed, number)."""

import collections
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxlm.data import Examples, train_batches
from jaxlm.data.mixture import BLOCK, Mixture, Origin, declared_sources, declared_stages, quotas_of
from jaxlm.data.packing import pack
from jaxlm.data.streams import Stream
from partitioning.declaration import DeclarationError

NAMES = ("a", "b", "c")


def source(name, size, length=4):
    """The tokens tell which source they are of: 1000 s + i."""
    first = 1000 * NAMES.index(name)
    return Examples.ring(np.arange(first, first + size, dtype=np.uint16), length, None)


def packed_source(name, sizes, length=4):
    first = 1000 * NAMES.index(name)
    tokens = np.arange(first, first + sum(sizes), dtype=np.uint16)
    return pack(Stream((tokens,), np.cumsum(sizes)), length, None, 0, 0)


def mixture(weights=(5, 3, 2), sizes=(50, 40, 30), stages=(), batch_size=4, seed=0, origin=Origin(), temperature=1.0,
            packed=False, epochs=None):
    names = NAMES[:len(weights)]
    quotas = [(0, quotas_of(weights, temperature, names, "k")), *((b, quotas_of(w, 1.0, names, "k")) for b, w in stages)]
    sources = (packed_source(n, [s % 7, 1, s - 1 - s % 7]) if packed else source(n, s) for n, s in zip(names, sizes))
    return Mixture(names, tuple(sources), tuple(quotas), batch_size, seed, origin, epochs)


weights = st.lists(st.sampled_from([0.5, 1, 2, 7]), min_size=2, max_size=3)
stages = st.sampled_from([(), ((3, (1, 1, 0)),), ((2, (0, 1, 1)), (9, (1, 0, 0)))])


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(weights, stages, st.integers(1, 7), st.integers(0, 2 ** 40), st.integers(0, 20), st.data())
def test_rows_of_any_processes_from_any_resume_are_rows_of_the_one_order(w, later, batch_size, seed, start, data):
    """The global batch is the same for 1, 2 or 4 processes, and after a kill at any step, of documents cut or packed, with an
    end or without."""
    later = tuple((b, x[:len(w)]) for b, x in later if any(x[:len(w)]))
    how = dict(packed=data.draw(st.booleans()), stages=later, batch_size=batch_size, seed=seed,
               epochs=data.draw(st.sampled_from([None, 1, 2])))
    whole = list(itertools.islice(train_batches(mixture(w, **how), prefetch=0), start + 3))
    cuts = sorted(data.draw(st.sets(st.integers(1, batch_size), max_size=3)) | {0, batch_size})
    again = mixture(w, **how)
    parts = [list(itertools.islice(train_batches(again, start_step=start, rows=range(a, b), prefetch=0), 3))
             for a, b in itertools.pairwise(cuts)]
    assert {len(part) for part in parts} == {max(len(whole) - start, 0)}, "all processes end together"
    for step, pieces in enumerate(zip(*parts)):
        for name in pieces[0]:
            assert np.array_equal(np.concatenate([piece[name] for piece in pieces]), whole[start + step][name])


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(weights, st.integers(0, 3 * BLOCK), st.integers(0, 99))
def test_shares_are_exact_in_every_block_and_each_source_comes_in_its_order(w, number, seed):
    order = mixture(w, (50, 40, 30)[:len(w)], seed=seed, batch_size=1)
    whose, which = order.locate(np.arange(2 * BLOCK))
    exact = np.array(w) / sum(w) * BLOCK
    for block in (whose[:BLOCK], whose[BLOCK:]):
        assert np.abs(np.bincount(block, minlength=len(w)) - exact).max() < 1
    for s in range(len(w)):
        assert np.array_equal(which[whose == s], np.arange((whose == s).sum())), "none twice, none left out"
    far, _ = order.locate(np.arange(number, number + 5))
    assert order.taken(number + 5) == tuple(np.array(order.taken(number)) + np.bincount(far, minlength=len(w)))


def test_what_is_taken_is_counted_over_stages_and_blocks_without_replay():
    order = mixture((1, 1, 2), stages=((5, (1, 0, 0)), (3 * BLOCK, (0, 1, 3))), batch_size=1)
    whose, which = order.locate(np.arange(4 * BLOCK))
    for number in (0, 1, 5, 6, BLOCK, 3 * BLOCK - 1, 3 * BLOCK + 7):
        assert order.taken(number) == tuple(np.bincount(whose[:number], minlength=3))
    assert set(whose[5:3 * BLOCK]) == {0} and set(whose[3 * BLOCK:]) == {1, 2}
    for s in range(3):
        assert np.array_equal(which[whose == s], np.arange((whose == s).sum()))


def test_places_in_a_block_are_mixed_well():
    whose, _ = mixture((1, 1), (50, 40)).locate(np.arange(BLOCK))
    runs = np.flatnonzero(np.diff(whose)).size
    assert abs(runs - BLOCK / 2) < 5 * BLOCK ** 0.5 / 2, "neighbours are independent"
    other, _ = mixture((1, 1), (50, 40), seed=1).locate(np.arange(BLOCK))
    assert 0.4 < (whose == other).mean() < 0.6


def test_other_weights_at_a_resume_are_a_stage_that_goes_on_with_each_sources_next_example():
    first = mixture((3, 1), (50, 40))
    origin = Origin(10, first.taken(10))
    second = mixture((1, 1), (50, 40), origin=origin)
    _, which = first.locate(np.arange(40))
    whose, after = second.locate(np.arange(40))
    for s in (0, 1):
        assert after[whose == s][0] == origin.taken[s]
    assert second.taken(10) == origin.taken and sum(second.taken(20)) == 80


@pytest.mark.parametrize("weights_, epochs", [((3, 1), 1), ((1, 1), 2), ((1, 9), 3)])
def test_the_data_end_where_the_first_source_would_come_once_more(weights_, epochs):
    order = mixture(weights_, (50, 40), epochs=epochs)
    batches = list(train_batches(order, prefetch=0))
    assert len(batches) == order.batches
    counts = collections.Counter(t for batch in batches for t in batch["targets"][batch["mask"]].tolist())
    assert max(counts.values()) <= epochs
    out = [s for s, (first, size) in enumerate(((0, 50), (1000, 40))) if all(counts[first + i] == epochs for i in range(size))]
    assert len(out) >= 1, "one source was passed whole"
    end = order.end
    whose, which = order.locate(np.arange(end + 1))
    assert which[end] == epochs * len(order.sources[whose[end]])
    assert order.taken(order.batches) == tuple(np.bincount(whose[:end])), "places behind the end hold no example"


def test_mixtures_of_packed_documents_count_every_token_once_in_an_epoch():
    sources = packed_source("a", [3, 9, 2, 7]), packed_source("b", [5, 5, 1])
    order = Mixture(("a", "b"), sources, ((0, (BLOCK // 2,) * 2),), 3, 5, epochs=1)
    batches = list(train_batches(order, prefetch=0))
    assert set(batches[0]) == {"inputs", "targets", "mask", "positions", "segment_ids", "example"}
    counts = collections.Counter(t for batch in batches for t in batch["targets"][batch["mask"]].tolist())
    assert max(counts.values()) == 1 and all(counts[1000 + i] == 1 for i in range(11)), "the smaller source is passed whole"


def test_temperature_flattens_the_shares():
    flat = [quotas_of((100, 1), t, NAMES[:2], "k")[1] / BLOCK for t in (1, 2, 1e6)]
    assert flat[0] == pytest.approx(1 / 101, abs=1e-4) and flat[1] == pytest.approx(1 / 11, abs=1e-4)
    assert flat[2] == pytest.approx(1 / 2, abs=1e-4)
    assert sum(quotas_of((1, 1, 1), 1.0, NAMES, "k")) == BLOCK


@pytest.mark.parametrize("train, words", [
    (("a.txt", {"paths": "b"}), "stands beside dicts"),
    (({"path": "b"},), "did you mean 'paths'?"),
    (({"paths": ()},), "expected a path, glob or URL"),
    (({"paths": 5},), "expected a path, glob or URL"),
    (({"paths": "b", "weight": -1},), "weight = -1"),
    (({"paths": "b", "weight": 10 ** 400},), "expected a number"),
    (({"paths": "b", "weight": 1}, {"paths": "c"}), "give all or none"),
    (({"paths": "b"}, {"paths": "b"}), "two sources of the name 'b'")])
def test_what_is_no_mixture_is_refused(train, words):
    with pytest.raises(DeclarationError) as error:
        declared_sources(train)
    assert words in str(error.value) and "config.data.train" in str(error.value)


@pytest.mark.parametrize("stages_, words", [
    ((5,), "expected a pair"), (((0, {"a": 1}),), "must be above 0"), (((5, {"a": 1}), (5, {"b": 1})), "ascend"),
    (((5, {"aa": 1}),), "did you mean 'a'?"), (((5, {"a": "x"}),), "expected a number")])
def test_what_are_no_stages_is_refused(stages_, words):
    with pytest.raises(DeclarationError) as error:
        declared_stages(stages_, ("a", "b"))
    assert words in str(error.value)


def test_a_share_too_small_to_be_had_is_refused():
    with pytest.raises(DeclarationError, match="below 1 in 16,384"):
        quotas_of((1e9, 1), 1.0, NAMES[:2], "config.data.train")
    with pytest.raises(DeclarationError, match="no source has a weight above 0"):
        quotas_of((0, 0), 1.0, NAMES[:2], "config.data.train")
