"""A run goes on in its data by a declared rule, or not at all."""

import dataclasses
import itertools
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxlm.config import Config, DataConfig, TrainConfig
from jaxlm.data import open_data, train_batches
from jaxlm.data.continuation import described, origin_of
from jaxlm.data.mixture import Origin
from partitioning.declaration import DeclarationError

BATCH = 4


@pytest.fixture
def texts(tmp_path):
    for name, letter, size in (("a", 97, 400), ("b", 65, 300)):
        (tmp_path / f"{name}.txt").write_bytes(bytes(letter + i % 26 for i in range(size)))
    return tmp_path


def config(folder, weights=(3, 1), batch_size=BATCH, names=("a", "b"), **options):
    train = tuple({"paths": str(folder / f"{name}.txt"), "name": name, "weight": w} for name, w in zip(names, weights))
    data = DataConfig(**{"train": train, "sequence_length": 8, "eval_fraction": 0.0, "on_change": "refuse", **options})
    return Config(data=data, train=TrainConfig(global_batch_size=batch_size))


def saved(config, batch, origin=Origin()):
    data = open_data(config.data, 257)
    order = data.mixture(config.train.global_batch_size, 0, origin)
    return described(order, data, config, batch)


def resume(config, order, batch):
    return origin_of(order, batch, open_data(config.data, 257), config)


def test_the_same_order_goes_on_from_where_it_is_counted(texts):
    one = config(texts)
    assert resume(one, saved(one, 7), 7) == (Origin(0, ()), [])
    origin = Origin(5, (12, 8))
    assert resume(one, saved(one, 7, origin), 7) == (origin, [])
    assert resume(one, None, 7) == (Origin(), []), "of a checkpoint that says nothing"


@pytest.mark.parametrize("change, words", [
    (dict(weights=(1, 1)), "the shares: a 0.75 b 0.25 -> a 0.5 b 0.5"),
    (dict(sequence_length=16), "the sequence length: 8 -> 16"), (dict(pack="best_fit"), "the packing: split -> best_fit"),
    (dict(seed=1), "the seed: 0 -> 1"),
    (dict(temperature=2.0), "the shares"), (dict(stages=((9, {"b": 1}),)), "then a 0 b 1 from step 10"),
    (dict(weights=(1,), names=("a",)), "the sources")])
def test_another_order_is_refused_unless_a_rule_is_declared(texts, change, words):
    before, order = config(texts), saved(config(texts), 7)
    with pytest.raises(DeclarationError) as error:
        resume(config(texts, **change), order, 7)
    assert words in str(error.value) and "config.data.on_change = 'continue'" in str(error.value)
    origin, lines = resume(config(texts, **change, on_change="continue"), order, 7)
    assert "the tokens" not in lines[0], "they are the same"
    assert origin.batch == 7 and "a new order from batch 7 on" in lines[0]
    assert before.data.on_change == "refuse"


def test_other_weights_and_batch_sizes_repeat_nothing_before_an_epoch_is_over(texts):
    """Over the change, each source's examples are those of its own order, one after the other."""
    first, second = config(texts, weights=(3, 1)), config(texts, weights=(1, 2), batch_size=6, on_change="continue")
    data = open_data(first.data, 257)
    order = data.mixture(BATCH, 0)
    origin, lines = resume(second, saved(first, 5), 5)
    assert origin == Origin(5, order.taken(5)) and len(lines) == 1
    after = open_data(second.data, 257).mixture(6, 0, origin)
    batches = [*itertools.islice(train_batches(order, prefetch=0), 5),
               *itertools.islice(train_batches(after, start_step=5, prefetch=0), 4)]
    alone = {name: train_batches(data.mixture(BATCH, 0), prefetch=0) for name in "ab"}
    seen = {name: [r for b in batches for r in b["targets"].tolist() if (r[0] >= 97) == (name == "a")] for name in "ab"}
    for name in "ab":
        whole = [r for b in itertools.islice(alone[name], 40) for r in b["targets"].tolist() if (r[0] >= 97) == (name == "a")]
        assert seen[name] == whole[:len(seen[name])] and seen[name]


@hypothesis.settings(max_examples=20, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([(3, 1), (1, 1), (0, 1)]), st.sampled_from([2, 5])),
                           min_size=1, max_size=6))
def test_killed_at_any_moments_and_changed_meanwhile_every_source_goes_through_its_epochs(texts, lives):
    """Each life ends somewhere behind its newest checkpoint, and the next one may have other shares."""
    given, batch, order, last = {"a": [], "b": []}, 0, None, None
    for count, *now in lives:
        weights, batch_size = now
        one = config(texts, weights=weights, batch_size=batch_size, on_change="continue")
        data = open_data(one.data, 257)
        origin, _ = resume(one, order, batch)
        if now == last:
            assert origin == Origin(order["origin"]["batch"], tuple(order["origin"]["taken"])), "the same order goes on"
        mixture = data.mixture(batch_size, 0, origin)
        for step, found in enumerate(train_batches(mixture, start_step=batch, prefetch=0)):
            if step == count:
                break                          # the checkpoint; what comes now is lost
            numbers = (batch + step - origin.batch) * batch_size + np.arange(batch_size)
            for row, whose, which in zip(found["targets"], *mixture.locate(numbers)):
                assert (row[0] >= 97) == (whose == 0), "the row is of the source that it is counted for"
                given[mixture.names[whose]].append(int(which))
        batch, last = batch + count, now
        order = json.loads(json.dumps(described(mixture, data, one, batch)))
    for name, which in given.items():
        assert which == list(range(len(which))), "none twice, none left out"


def test_examples_that_are_cut_anew_begin_with_the_next_epoch(texts):
    first, second = config(texts), config(texts, sequence_length=16, on_change="continue")
    order = saved(first, 10)
    origin, lines = resume(second, order, 10)
    sizes = [len(x) for x in open_data(second.data, 257).sources.values()]
    epochs = [-(-taken // old) for taken, old in zip(order["taken"], order["examples"])]
    assert origin == Origin(10, tuple(epoch * size for epoch, size in zip(epochs, sizes)))
    assert "goes on with epoch 2, and 40.0% of epoch 1 is passed over" in " ".join(lines)
    batch = next(train_batches(open_data(second.data, 257).mixture(BATCH, 0, origin), start_step=10,
                               prefetch=0))
    assert batch["inputs"].shape == (BATCH, 16)


def test_a_text_that_changed_begins_anew_and_the_others_go_on(texts):
    first = config(texts)
    order = saved(first, 6)
    (texts / "b.txt").write_bytes(b"another text " * 20)
    origin, lines = resume(first, order, 6)              # --allow_change has been asked for before
    assert origin.taken[0] == order["taken"][0] and origin.taken[1] % 33 == 0 and "'b' are cut anew" in " ".join(lines)


@pytest.mark.parametrize("weights, names", [((1,), ("a",)), ((3, 1), ("a", "b"))])
def test_more_epochs_begin_behind_the_last_example_that_was_there(texts, weights, names):
    """An epoch that ended inside a batch: the places behind its end hold no examples, and none is passed over for them."""
    first, second = (config(texts, weights=weights, names=names, batch_size=7, epochs=n) for n in (1, 3))
    data = open_data(first.data, 257)
    before = data.mixture(7, 0, epochs=1)
    last = before.batches
    assert before.end % 7
    order = described(before, data, first, last)
    origin, lines = resume(second, order, last)
    assert origin == Origin(last, tuple(order["taken"])) and "partly empty" in lines[0]
    assert sum(origin.taken) == before.end and resume(first, order, last) == (Origin(), [])
    after = data.mixture(7, 0, origin, 3)
    rows = [tuple(row) for batch in [*train_batches(before, prefetch=0), *train_batches(after, start_step=last, prefetch=0)]
            for row, mask in zip(batch["targets"], batch["mask"]) if mask.any()]
    whole = data.mixture(7, 0, epochs=3)
    want = [tuple(row) for batch in train_batches(whole, prefetch=0) for row, mask in zip(batch["targets"], batch["mask"])
            if mask.any()]
    assert sorted(rows) == sorted(want) if len(names) == 1 else len(rows) > 2 * before.end
    order = described(after, data, second, last + 2)
    assert resume(second, order, last + 2) == (origin, []), "and from then on this is the order"


def test_a_source_that_comes_new_begins_at_its_beginning(texts):
    only = config(texts, weights=(1,), names=("a",))
    origin, _ = resume(config(texts, on_change="continue"), saved(only, 3), 3)
    assert origin == Origin(3, (12, 0))


def test_a_source_that_comes_again_goes_on_after_its_last_example(texts):
    both, only = config(texts, weights=(1, 1)), config(texts, weights=(1,), names=("a",), on_change="continue")
    order = saved(both, 10)
    away, _ = resume(only, order, 10)
    assert away.gone == (("b", order["taken"][1], order["examples"][1], order["sha256"][1]),) and away.gone[0][1] > 0
    meanwhile = json.loads(json.dumps(saved(only, 12, away)))
    assert resume(only, meanwhile, 12) == (away, []), "what is gone is kept"
    again, lines = resume(dataclasses.replace(both, data=dataclasses.replace(both.data, on_change="continue")), meanwhile, 12)
    assert again == Origin(12, (meanwhile["taken"][0], order["taken"][1])) and len(lines) == 1


def test_other_borders_between_the_same_letters_are_another_text(tmp_path):
    lines, orders = (("abc", "defghij", "klm"), ("abcdef", "ghi", "jklm")), []
    for texts in lines:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data = DataConfig(train=(str(tmp_path / "a.jsonl"),), sequence_length=8, eval_fraction=0.0, eos=False, pack="best_fit")
        orders.append(saved(Config(data=data, train=TrainConfig(global_batch_size=2)), 3))
    assert orders[0]["sha256"] != orders[1]["sha256"]


def test_the_position_is_of_constant_size(texts):
    sizes = {len(repr(saved(config(texts), batch))) for batch in (10_000_000, 99_999_999)}
    assert max(sizes) - min(sizes) < 10 and max(sizes) < 1000
    assert dataclasses.is_dataclass(Origin) and np.asarray(saved(config(texts), 10**12)["taken"]).sum() == BATCH * 10**12
