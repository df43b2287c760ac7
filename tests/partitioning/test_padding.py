"""Padded sizes are what the declared axes need, and an array goes to its true shape and back without loss."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from partitioning import ArraySpec, DeclarationError, ShardingConfig, filled, make_mesh, multiples, resolve, text, trimmed
from partitioning.mesh import AXES
from partitioning.padding import next_multiple, trimmed_abstract, trimmed_placement

PARAMS = {"embed": ArraySpec((50, 32), "float32", ("vocab", "embed")),
          "layers": {"query": ArraySpec((3, 32, 6, 4), "float32", ("layers", "embed", "heads", "head_dim"))}}
PADDABLE = ("vocab", "heads")


def sizes(**given_sizes):
    return dict.fromkeys(AXES, 1) | given_sizes


def padded(tree, **to):
    return jax.tree.map(lambda spec: spec.padded(to), tree)


def needed(config, **axis_sizes):
    return multiples(sizes(**axis_sizes), config, PARAMS, PADDABLE)


def test_a_dim_needs_what_divides_it_in_every_table_and_override_and_nothing_for_spreads():
    assert needed(ShardingConfig(), tensor=4, fsdp=2) == {"vocab": 4, "heads": 4}
    assert needed(ShardingConfig(rules=dict(heads=None)), tensor=4) == {"vocab": 4, "heads": 1}
    tables = ShardingConfig(params=dict(rules=dict(vocab=("tensor", "fsdp"))), optimizer=dict(rules=dict(vocab="data")))
    assert needed(tables, tensor=2, fsdp=2, data=3)["vocab"] == 12
    overrides = ShardingConfig(zero=0, overrides=(("query", (None, "fsdp", None)), ("embed", (("data", "tensor"), None))))
    assert needed(overrides, tensor=2, fsdp=3, data=2) == {"vocab": 4, "heads": 6}


@given(st.integers(1, 1000), st.integers(1, 64))
def test_the_next_multiple_is_the_smallest_that_holds(size, step):
    found = next_multiple(size, step)
    assert found % step == 0 and size <= found < size + step


def test_a_dim_that_cannot_be_padded_names_those_that_can():
    with pytest.raises(DeclarationError, match=r"config\.sharding\.pad = \('embed',\): the dim 'embed' .* can: vocab, heads"):
        needed(ShardingConfig(pad=("embed",)), tensor=2)


def test_a_dim_that_does_not_divide_may_be_padded_if_the_model_can():
    def message(**how):
        with pytest.raises(DeclarationError) as caught:
            resolve(sizes(tensor=4), ShardingConfig(pad=("heads",)), PARAMS, **how)
        return str(caught.value)
    assert message(paddable=PADDABLE).endswith("; or pad it: config.sharding.pad = ('heads', 'vocab').")
    assert "pad it" not in message()


def test_rows_show_the_padded_shape_and_say_the_true_size():
    specs = padded(PARAMS, vocab=52, heads=8)
    logits = ArraySpec((8, 52), "float32", ("batch", "vocab"), (8, 50))
    layout = resolve(sizes(tensor=4, fsdp=2), ShardingConfig(pad=PADDABLE), specs, {"mu": specs}, {"logits": logits})
    rows = {(row.kind, row.path): row for row in layout.rows}
    row = rows["optimizer", "mu/embed"]
    assert (row.shape, row.bytes_per_device) == ((52, 32), 52 * 32 * 4 // 8)
    assert row.rule == "vocab=tensor (default), embed=fsdp (ZeRO 3), vocab padded from 50"
    assert "heads padded from 6" in rows["params", "layers/query"].rule
    assert "vocab padded from 50" in rows["activations", "logits"].rule
    assert "config.sharding.pad: vocab is padded from 50 to 52." in text(layout)


@given(st.data())
def test_an_array_without_its_padding_is_split_by_all_axes_that_fit_and_only_evenly(data):
    axes = {"tensor": data.draw(st.sampled_from((2, 3, 4))), "fsdp": data.draw(st.sampled_from((2, 4)))}
    placements = [(("tensor",), ("fsdp",)), (("tensor", "fsdp"), ()), ((), ("fsdp", "tensor")), (("fsdp",), ())]
    placed = data.draw(st.sampled_from(placements))
    true = (data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40)))
    shape = tuple(next_multiple(n, math.prod(axes[a] for a in split)) for n, split in zip(true, placed))
    found = trimmed_placement(ArraySpec(shape, "float32", ("vocab", "embed"), true), placed, axes)
    used = [axis for split in found for axis in split]
    assert len(used) == len(set(used)) and set(used) <= {axis for split in placed for axis in split}
    blocks = [n / math.prod(axes[a] for a in split) for n, split in zip(true, found)]
    assert all(block.is_integer() for block in blocks)
    for axis in {axis for split in placed for axis in split} - set(used):
        assert all(block % axes[axis] for block in blocks)


@pytest.mark.parametrize("axis_sizes", [dict(tensor=4, fsdp=2), dict(tensor=8), dict(fsdp=4, tensor=2)])
def test_a_state_goes_to_its_true_shapes_and_back_with_the_same_bits(axis_sizes):
    specs = padded(PARAMS, vocab=56, heads=8)
    layout = resolve(sizes(**axis_sizes), ShardingConfig(), specs, {"mu": specs}).on(make_mesh(sizes(**axis_sizes)))
    rng = np.random.default_rng(0)
    true = jax.tree.map(lambda spec: rng.standard_normal(spec.true_shape).astype("float32"), specs)
    state = filled({"params": true, "optimizer": {"mu": true}, "counters": {"step": np.int32(3)}}, layout)
    assert state["params"]["embed"].sharding.spec == layout.params["embed"]
    assert state["optimizer"]["mu"]["layers"]["query"].shape == (3, 32, 8, 4)
    assert np.count_nonzero(state["params"]["embed"][50:]) == 0
    back = trimmed(state, layout)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), back["params"], true)
    assert back["counters"]["step"] == 3
    abstract = trimmed_abstract(state, layout)
    assert back["optimizer"]["mu"]["embed"].sharding == abstract["optimizer"]["mu"]["embed"].sharding
    share = max(shard.data.size for shard in back["params"]["embed"].addressable_shards)
    assert share == 50 * 32 / 8                # the axis that vocab = 50 has no room for splits embed


def test_arrays_without_padding_are_passed_on_as_they_are():
    layout = resolve(sizes(fsdp=8), ShardingConfig(), PARAMS).on(make_mesh(sizes(fsdp=8)))
    x = jax.device_put(np.zeros((50, 32)), layout.sharding(P(None, "fsdp")))
    assert trimmed({"params": {"embed": x}}, layout)["params"]["embed"] is x


def test_a_true_shape_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="cannot hold"):
        ArraySpec((4, 2), "float32", ("vocab", "embed"), (5, 2))
