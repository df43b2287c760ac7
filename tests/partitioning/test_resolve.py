"""Resolution: rules, spreads and overrides become specs, and whatever does not fit becomes a message."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from partitioning.array import ArraySpec
from partitioning.declaration import DeclarationError
from partitioning.layout import resolve
from partitioning.mesh import AXES
from partitioning.placement import spread
from partitioning.tables import ShardingConfig


def sizes(**given_sizes):
    return dict.fromkeys(AXES, 1) | given_sizes


def spec(**dims):
    """An ArraySpec whose dims are the keywords, float32."""
    return ArraySpec(tuple(dims.values()), "float32", tuple(dims))


PARAMS = {
    "embed": {"embedding": spec(vocab=48, embed=32)},
    "layers": {"attention": {"query": {"kernel": spec(layers=4, embed=32, heads=8, head_dim=4)},
                             "key": {"kernel": spec(layers=4, embed=32, kv_heads=4, head_dim=4)}},
               "mlp": {"up": {"kernel": spec(layers=4, embed=32, mlp=64)}, "down": {"kernel": spec(layers=4, mlp=64, embed=32)}},
               "norm": {"scale": spec(layers=4, embed=32)}},
    "lm_head": {"kernel": spec(embed=32, vocab=48)},
}
ACTIVATIONS = {"hidden": spec(batch=16, length=12, embed=32), "scores": spec(batch=16, heads=8, length=12)}
UP = "layers/mlp/up/kernel"


def layout(config=None, optimizer=None, params=PARAMS, activations=ACTIVATIONS, **axis_sizes):
    optimizer = {"mu": params} if optimizer is None else optimizer
    return resolve(sizes(**axis_sizes), config or ShardingConfig(), params, optimizer, activations)


def message(*args, **kwargs):
    with pytest.raises(DeclarationError) as caught:
        layout(*args, **kwargs)
    return str(caught.value)


def at(tree, path):
    for key in path.split("/"):
        tree = tree[key]
    return tree


def test_default_rules_are_megatron_and_zero_3_spreads_over_fsdp():
    found = layout(fsdp=2, tensor=4)
    assert at(found.params, UP) == P(None, "fsdp", "tensor")
    assert at(found.params, "layers/mlp/down/kernel") == P(None, "tensor", "fsdp")
    assert at(found.params, "layers/attention/query/kernel") == P(None, "fsdp", "tensor", None)
    assert at(found.params, "embed/embedding") == P("tensor", "fsdp")
    assert at(found.compute, UP) == P(None, None, "tensor")
    assert at(found.gradients, UP) == at(found.optimizer["mu"], UP) == P(None, "fsdp", "tensor")
    assert found.activation(("batch", "length", "embed")) == P("fsdp", None, None)
    assert layout(data=2, fsdp=2).activation(("batch", None)) == P(("data", "fsdp"), None)


@pytest.mark.parametrize("stage, spread_over", [(0, ()), (1, ("optimizer",)), (2, ("optimizer", "gradients")),
                                               (3, ("optimizer", "gradients", "params"))])
def test_zero_stage_n_spreads_the_first_n_of_optimizer_gradients_params(stage, spread_over):
    found = layout(ShardingConfig(zero=stage), fsdp=4)
    for kind, tree in (("optimizer", found.optimizer["mu"]), ("gradients", found.gradients), ("params", found.params)):
        assert at(tree, UP) == (P(None, None, "fsdp") if kind in spread_over else P(None, None, None)), kind
    assert at(found.compute, UP) == P(None, None, None)


def test_a_stage_is_the_same_as_the_tables_written_out():
    sugar = layout(ShardingConfig(zero=2, zero_axes=("data",)), data=4, tensor=2)
    written = layout(ShardingConfig(zero=0, optimizer=dict(spread="data"), gradients=dict(spread="data")), data=4, tensor=2)
    assert (sugar.params, sugar.gradients, sugar.optimizer) == (written.params, written.gradients, written.optimizer)


def test_optimizer_over_data_too_cuts_the_blocks_of_parameters_over_fsdp():
    found = layout(ShardingConfig(zero=3, optimizer=dict(spread="data")), data=2, fsdp=4)
    assert at(found.params, UP) == P(None, None, "fsdp")
    assert at(found.optimizer["mu"], UP) == P(None, None, ("fsdp", "data"))
    other = layout(ShardingConfig(zero=1, zero_axes=("data",), params=dict(spread="fsdp"), gradients=dict(spread="fsdp"),
                                  optimizer=dict(spread="fsdp")), data=2, fsdp=4)
    assert other.optimizer == found.optimizer and other.params == found.params


def test_rules_seed_all_tables_and_a_tables_own_entries_win_per_dim():
    found = layout(ShardingConfig(zero=0, rules=dict(mlp=None), params=dict(rules=dict(mlp="tensor", vocab=None))), tensor=4)
    assert at(found.params, UP) == P(None, None, "tensor")
    assert at(found.gradients, UP) == P(None, None, None)
    assert at(found.params, "lm_head/kernel") == P(None, None)
    assert at(found.gradients, "lm_head/kernel") == P(None, "tensor")


def test_layers_are_never_spread_over_unless_a_rule_says_so():
    params = {"layers": {"scale": spec(layers=64, embed=4)}}
    assert at(layout(params=params, fsdp=4).params, "layers/scale") == P(None, "fsdp")
    declared = layout(ShardingConfig(params=dict(rules=dict(layers="fsdp"))), params=params, fsdp=4)
    assert at(declared.params, "layers/scale") == P("fsdp", None)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4),
       st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 3]))
def test_spread_divides_uses_each_axis_at_most_once_and_leaves_taken_dims_alone(shape, taken, fsdp, data):
    dims = tuple(f"d{i}" for i in range(len(shape)))
    array = ArraySpec(tuple(shape), "float32", dims)
    before = tuple(("tensor",) if t else () for t in taken[:len(shape)])
    mesh = sizes(fsdp=fsdp, data=data, tensor=1)
    after, homes, unplaced = spread(array, before, ("fsdp", "data"), mesh)
    used = [axis for dim in after for axis in dim if axis != "tensor"]
    assert sorted(used + list(unplaced)) == sorted(axis for axis in ("fsdp", "data") if mesh[axis] > 1)
    for i, axes in enumerate(after):
        assert shape[i] % math.prod(mesh[axis] for axis in axes) == 0
        assert not before[i] or axes == before[i]
    free = [size for size, b in zip(shape, before) if not b]
    if fsdp > 1 and any(size % fsdp == 0 for size in free):
        chosen = homes["fsdp"]
        assert shape[chosen] == max(size for size in free if size % fsdp == 0)
        assert chosen == next(i for i, size in enumerate(shape) if not before[i] and size == shape[chosen])
    else:
        assert "fsdp" not in homes


def test_an_array_that_no_axis_divides_stays_whole_and_that_is_noted():
    found = layout(params={"odd": {"scale": spec(embed=33)}, "even": {"scale": spec(embed=32)}}, fsdp=4)
    assert at(found.params, "odd/scale") == P(None) and at(found.params, "even/scale") == P("fsdp")
    assert any("params: no free dim is divisible by fsdp=4" in note and "odd/scale" in note for note in found.notes)


def test_zero_that_shards_nothing_is_noted():
    assert any("ZeRO 3 over fsdp shards nothing: fsdp has size 1" in note for note in layout(data=8).notes)
    assert not any("ZeRO" in note for note in layout(fsdp=8, activations={}).notes)
    assert not any("ZeRO" in note for note in layout(ShardingConfig(zero=0), data=8).notes)


def test_a_rule_for_a_known_dim_that_the_model_lacks_is_noted():
    notes = layout(ShardingConfig(rules=dict(experts="data"))).notes
    assert any("config.sharding.rules has a rule for 'experts'" in note for note in notes)


def test_a_model_may_have_dims_of_its_own_if_they_have_rules():
    params = {"conv": {"kernel": spec(channels=8, embed=4)}}
    found = layout(ShardingConfig(rules=dict(channels="tensor")), params=params, tensor=2)
    assert at(found.params, "conv/kernel") == P("tensor", None)
    text = message(params=params, tensor=2)
    assert "params conv/kernel" in text and "'channels'" in text and "config.sharding.rules.channels = None" in text


def test_a_misspelt_dim_in_a_model_is_an_error_and_not_replicated():
    assert "did you mean 'embed'" in message(params={"a": {"kernel": spec(embd=8)}})


# Overrides

def test_an_override_is_final_for_parameter_gradient_and_optimizer_state():
    found = layout(ShardingConfig(overrides=((r"lm_head/kernel", (None, "tensor")),)), fsdp=2, tensor=4)
    for tree in (found.params, found.gradients, found.optimizer["mu"], found.compute):
        assert at(tree, "lm_head/kernel") == P(None, "tensor")
    assert at(found.params, UP) == P(None, "fsdp", "tensor")


def test_an_override_matches_a_whole_path_or_a_tail_from_a_slash_on():
    config = ShardingConfig(overrides=(("kernel", (None, None)),), zero=0)
    found = layout(config, params={"a": {"kernel": spec(embed=4, mlp=4)}}, tensor=2)
    assert at(found.params, "a/kernel") == P(None, None)
    text = message(ShardingConfig(overrides=(("head/kernel", (None, None)),)))
    assert "matches 'head/kernel'" in text and "lm_head/kernel" in text and "config.sharding.overrides[0]" in text


def test_an_override_of_a_stacked_parameter_may_leave_out_layers():
    short = layout(ShardingConfig(overrides=(("mlp/up/kernel", ("tensor", None)),)), tensor=2)
    long = layout(ShardingConfig(overrides=(("mlp/up/kernel", (None, "tensor", None)),)), tensor=2)
    assert at(short.params, UP) == at(long.params, UP) == P(None, "tensor", None)


def test_an_override_reaches_state_that_has_fewer_dims_by_their_names():
    slots = {"row": {"lm_head": {"kernel": spec(embed=32)}}, "column": {"lm_head": {"kernel": spec(vocab=48)}}}
    found = layout(ShardingConfig(overrides=(("lm_head/kernel", ("fsdp", "tensor")),)), optimizer=slots, fsdp=2, tensor=4)
    assert at(found.optimizer["row"], "lm_head/kernel") == P("fsdp")
    assert at(found.optimizer["column"], "lm_head/kernel") == P("tensor")


def test_a_parameter_that_an_override_puts_on_a_batch_axis_is_gathered_for_use():
    found = layout(ShardingConfig(overrides=(("lm_head/kernel", ("fsdp", "tensor")),)), fsdp=2, tensor=4)
    assert at(found.params, "lm_head/kernel") == P("fsdp", "tensor")
    assert at(found.compute, "lm_head/kernel") == P(None, "tensor")


def test_the_first_override_that_matches_decides_and_one_without_effect_is_an_error():
    config = ShardingConfig(overrides=(("lm_head/kernel", (None, None)), (".*/kernel", (None, "tensor"))))
    text = message(config, params={"lm_head": PARAMS["lm_head"], "mlp": {"kernel": spec(embed=4, mlp=4, head_dim=4)}}, tensor=2)
    assert "overrides[1]" in text and "mlp/kernel" in text and "has 3" in text
    shadowed = ShardingConfig(overrides=((".*", (None, None)), ("kernel", (None, "tensor"))))
    text = message(shadowed, params={"lm_head": PARAMS["lm_head"]}, tensor=2)
    assert "has no effect" in text and "lm_head/kernel" in text and "overrides[0]" in text


def test_an_override_with_the_wrong_number_of_dims_says_which_dims_there_are():
    text = message(ShardingConfig(overrides=(("mlp/up/kernel", ("tensor",)),)), tensor=2)
    assert "axes for 1 dims" in text and "(layers, embed, mlp)" in text and "Give 3, or 2 without layers" in text


@pytest.mark.parametrize("override, expected", [
    ((("lm_head/kernel",),), "expected a pair"), ((("(", (None, None)),), "no regular expression"),
    ((("lm_head/kernel", (None, "tensr")),), "did you mean 'tensor'"),
    ((("lm_head/kernel", ("tensor", "tensor")),), "both claim the mesh axis 'tensor'"),
    ((("lm_head/kernel", (None, 3)),), "expected a mesh axis")])
def test_malformed_overrides_are_explained(override, expected):
    text = message(ShardingConfig(overrides=override), tensor=2)
    assert expected in text and "sharding.overrides" in text


# Mistakes in tables

def test_unknown_axes_and_dims_get_the_nearest_name():
    text = message(ShardingConfig(rules=dict(heads="tensr")))
    assert "config.sharding.rules.heads" in text and "did you mean 'tensor'?" in text
    text = message(ShardingConfig(rules=dict(head="tensor")))
    assert "config.sharding.rules" in text and "'head'" in text and "did you mean 'heads'?" in text
    text = message(ShardingConfig(params=dict(rules=dict(mpl="tensor"))))
    assert "config.sharding.params.rules" in text and "did you mean 'mlp'?" in text
    assert "did you mean 'fsdp'" in message(ShardingConfig(zero_axes=("fdsp",)))
    assert "did you mean 'rules'" in message(ShardingConfig(gradients=dict(rule={})))
    assert "config.sharding.activations.spread" in message(ShardingConfig(activations=dict(spread="fsdp")))
    assert "names an axis twice" in message(ShardingConfig(rules=dict(heads=("tensor", "tensor"))))
    assert "expected a dict" in message(ShardingConfig(params=dict(rules="tensor")))


@pytest.mark.parametrize("axis_sizes", [dict(tensor=2), dict()])
def test_one_axis_on_two_dims_names_array_axis_and_both_dims_on_any_mesh(axis_sizes):
    text = message(ShardingConfig(params=dict(rules=dict(embed="tensor"))), **axis_sizes)
    assert "params embed/embedding" in text and "vocab and embed both claim the mesh axis 'tensor'" in text
    assert "config.sharding.rules.vocab" in text and "config.sharding.params.rules.embed" in text
    text = message(ShardingConfig(rules=dict(embed="fsdp"), zero=0), **axis_sizes)
    assert "activation hidden" in text and "batch and embed both claim the mesh axis 'fsdp'" in text


def test_the_axis_of_the_heads_on_the_length_is_answered_with_the_dim_that_may_have_it():
    query = {"query": ArraySpec((8, 32, 4, 16), "float32", ("batch", "length", "heads", "head_dim"))}
    with pytest.raises(DeclarationError, match="length and heads both claim .* give the rule to stream_length"):
        split = ShardingConfig(activations={"rules": {"length": "tensor"}})
        resolve({**dict.fromkeys(AXES, 1), "tensor": 2}, split, {}, {}, query)


def test_a_dim_that_its_axis_does_not_divide_gives_the_numbers_and_what_works():
    text = message(tensor=8)
    assert "params layers/attention/key/kernel: its dim kv_heads has size 4, which tensor=8 does not divide" in text
    assert "kv_heads = 8" in text and "tensor = 4" in text and "config.sharding.rules.kv_heads = None" in text


def test_several_axes_can_be_one_text_with_commas_as_a_command_line_has_them():
    found = layout(ShardingConfig(rules=dict(mlp="tensor,fsdp"), zero=0), fsdp=2, tensor=4)
    assert at(found.params, UP) == P(None, None, ("tensor", "fsdp"))
    assert "did you mean 'fsdp'" in message(ShardingConfig(rules=dict(mlp="tensor,fspd")))


def test_a_dim_over_two_axes_gives_what_works_for_each():
    text = message(activations={"hidden": spec(batch=12, embed=32)}, data=2, fsdp=4)
    assert "activation hidden: its dim batch has size 12, which data=2 x fsdp=4 = 8 does not divide" in text
    assert "batch = 8 or 16" in text and "data = 1 or 3" in text and "fsdp = 3 or 6" in text


def test_a_size_that_does_not_suit_is_told_by_the_key_that_it_comes_from():
    with pytest.raises(DeclarationError) as caught:
        resolve(sizes(data=4), ShardingConfig(), PARAMS, activations={"hidden": spec(batch=6, embed=32)},
                keys={"batch": ("config.train.global_batch_size", 3)})
    assert ("its dim batch has size 6 (config.train.global_batch_size = 18 in 3 parts), which data=4 does not divide"
            in str(caught.value))
    assert "What works: config.train.global_batch_size = 12 or 24; or data = 3 or 6 (with the devices" in str(caught.value)


def test_an_override_that_does_not_divide_points_to_the_override():
    text = message(ShardingConfig(overrides=(("embed/embedding", ("data", None)),)), data=5, activations={})
    assert "embed/embedding" in text and "config.sharding.overrides[0]" in text and "vocab = 50 or 45" in text


@given(st.integers(1, 100), st.integers(2, 16))
def test_nearest_values_in_a_message_do_work(dim, axis):
    if dim % axis == 0:
        return
    text = message(params={"a": {"kernel": spec(mlp=dim)}}, activations={}, tensor=axis)
    ways = text.split("What works: ")[1].split(" (with the devices")[0].split("; or ")
    for value in ways[0].removeprefix("mlp = ").split(" or "):
        assert int(value) % axis == 0 and abs(int(value) - dim) < axis
    for value in ways[1].removeprefix("tensor = ").split(" or "):
        assert dim % int(value) == 0


def test_an_activation_with_conflicting_or_unknown_dims_is_an_error():
    found = layout(tensor=2)
    with pytest.raises(DeclarationError, match="heads and mlp both claim"):
        found.activation(("heads", "mlp"))
    with pytest.raises(DeclarationError, match="did you mean 'length'"):
        found.activation(("batch", "lenght"))
