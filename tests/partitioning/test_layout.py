"""A bound layout on eight devices: the same numbers as without it, and every array where the tables say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from partitioning import UNSHARDED, ArraySpec, ShardingConfig, make_mesh, memory_per_device, resolve
from partitioning.declaration import DeclarationError
from partitioning.layout import _scatterings
from partitioning.mesh import AXES

LAYERS, EMBED, MLP, BATCH = 4, 16, 32, 8
SPECS = {
    "layers": {"up": {"kernel": ArraySpec((LAYERS, EMBED, MLP), "float32", ("layers", "embed", "mlp"))},
               "down": {"kernel": ArraySpec((LAYERS, MLP, EMBED), "float32", ("layers", "mlp", "embed"))},
               "norm": {"scale": ArraySpec((LAYERS, EMBED), "float32", ("layers", "embed"))}},
    "lm_head": {"kernel": ArraySpec((EMBED, 24), "float32", ("embed", "vocab"))},
}
MESHES = [dict(data=8), dict(fsdp=8), dict(tensor=8), dict(data=2, fsdp=4), dict(data=2, tensor=4), dict(fsdp=4, tensor=2),
          dict(data=2, fsdp=2, tensor=2)]


def bound(config=None, **sizes):
    devices = jax.devices()[:int(np.prod(list(sizes.values()) or [1]))]
    layout = resolve(dict.fromkeys(AXES, 1) | sizes, config or ShardingConfig(), SPECS, {"mu": SPECS},
                     {"hidden": ArraySpec((BATCH, EMBED), "float32", ("batch", "embed"))})
    return layout.on(make_mesh(layout.sizes, devices))


def is_spec(x):
    return isinstance(x, P)


def shardings(layout, specs):
    return jax.tree.map(layout.sharding, specs, is_leaf=is_spec)


@functools.cache
def parameters():
    keys = iter(jax.random.split(jax.random.key(0), 8))
    return jax.tree.map(lambda spec: np.asarray(jax.random.normal(next(keys), spec.shape)) / 4, SPECS)


@functools.cache
def inputs():
    return np.asarray(jax.random.normal(jax.random.key(1), (BATCH, EMBED)))


def loss(params, x, shard, dtype="float32", scan=True):
    """A residual MLP over stacked layers; sum of squares of its outputs."""
    x = shard.constrain(x.astype(dtype), ("batch", "embed"))

    def block(x, layer):
        layer = shard.use(layer, "layers", dtype)
        hidden = shard.constrain(jnp.tanh(x @ layer["up"]["kernel"]), ("batch", "mlp"))
        return shard.constrain(x + (hidden @ layer["down"]["kernel"]) * layer["norm"]["scale"], ("batch", "embed")), None

    stacked = shard.stack(params["layers"], "layers")
    if scan:
        x, _ = jax.lax.scan(jax.checkpoint(block), x, stacked)
    else:
        for i in range(LAYERS):
            x, _ = block(x, jax.tree.map(lambda w: w[i], stacked))
    logits = shard.constrain(x @ shard.use(params["lm_head"], "lm_head", dtype)["kernel"], ("batch", "vocab"))
    return jnp.sum(jnp.square(logits.astype(jnp.float32)))


@functools.cache
def expected(scan=True):
    return jax.jit(jax.value_and_grad(functools.partial(loss, shard=UNSHARDED, scan=scan)))(parameters(), inputs())


def gradients_on(layout, scan=True, **kwargs):
    """Loss and gradients on the layout's mesh; where the gradients lie is left to the program."""
    params = jax.device_put(parameters(), shardings(layout, layout.params))
    x = jax.device_put(inputs(), layout.sharding(layout.activation(("batch", "embed"))))
    return jax.jit(jax.value_and_grad(functools.partial(loss, shard=layout, scan=scan, **kwargs)))(params, x)


def assert_equal_to_one_device(found, scan=True):
    np.testing.assert_allclose(found[0], expected(scan)[0], rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found[1], expected(scan)[1])


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_loss_and_gradients_equal_one_device_and_gradients_lie_by_their_table(sizes):
    layout = bound(**sizes)
    found = gradients_on(layout)
    assert_equal_to_one_device(found)
    jax.tree.map(lambda g, spec: assert_lies(g, layout, spec), found[1], layout.gradients)


def assert_lies(x, layout, spec):
    assert x.sharding.is_equivalent_to(layout.sharding(spec), x.ndim), f"{x.sharding.spec} is not {spec}"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lower_zero_stages_give_the_same_numbers_with_gradients_where_they_belong(stage):
    layout = bound(ShardingConfig(zero=stage), fsdp=4, tensor=2)
    found = gradients_on(layout)
    assert_equal_to_one_device(found)
    jax.tree.map(lambda g, spec: assert_lies(g, layout, spec), found[1], layout.gradients)
    whole = layout.gradients["layers"]["up"]["kernel"] == P(None, None, "tensor")
    assert whole == (stage < 2)


def test_unrolled_layers_use_the_same_specs():
    layout = bound(data=2, fsdp=2, tensor=2)
    assert_equal_to_one_device(gradients_on(layout, scan=False), scan=False)


def test_an_override_changes_where_an_array_lies_and_no_number():
    overrides = (("up/kernel", ("tensor", "fsdp")), ("lm_head/kernel", (None, None)))
    layout = bound(ShardingConfig(overrides=overrides), fsdp=4, tensor=2)
    found = gradients_on(layout)
    assert_equal_to_one_device(found)
    assert_lies(found[1]["layers"]["up"]["kernel"], layout, P(None, "tensor", "fsdp"))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_predicted_bytes_per_device_are_those_of_the_real_blocks(sizes):
    layout = bound(**sizes)
    predicted = memory_per_device(layout)
    for kind, specs in (("params", layout.params), ("gradients", layout.gradients), ("optimizer", layout.optimizer["mu"])):
        placed = jax.device_put(parameters(), shardings(layout, specs))
        for device in layout.mesh.devices.flat:
            real = sum(shard.data.nbytes for x in jax.tree.leaves(placed) for shard in x.addressable_shards
                       if shard.device == device)
            assert real == predicted[kind]


def test_use_casts_before_it_gathers_and_gives_gradients_in_the_parameters_dtype():
    layout = bound(fsdp=8)
    weight = jax.device_put(parameters()["lm_head"]["kernel"], layout.sharding(layout.params["lm_head"]["kernel"]))

    def used(w):
        return layout.use({"kernel": w}, "lm_head", "bfloat16")["kernel"]

    out, gradient = jax.jit(used)(weight), jax.jit(jax.grad(lambda w: used(w).astype(jnp.float32).sum()))(weight)
    assert out.dtype == jnp.bfloat16 and out.sharding.is_fully_replicated
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(out), np.asarray(weight.astype(jnp.bfloat16)))
    program = str(jax.jit(used).trace(weight).jaxpr)
    assert program.index("new_dtype=bfloat16") < program.index("sharding_constraint")


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("config", [dict(rules=dict(layers="fsdp")), dict(gradients=dict(rules=dict(layers="fsdp"))),
                                    dict(overrides=(("up/kernel", ("fsdp", None, "tensor")),))],
                         ids=["all", "gradients", "override"])
def test_gradients_split_along_layers_lie_so_after_the_loop(config, scan):
    layout = bound(ShardingConfig(**config), fsdp=2, tensor=2)
    found = gradients_on(layout, scan)
    assert_equal_to_one_device(found, scan)
    jax.tree.map(lambda g, spec: assert_lies(g, layout, spec), found[1], layout.gradients)
    assert layout.gradients["layers"]["up"]["kernel"][0] == "fsdp"


def test_a_whole_stack_where_one_layer_is_used_is_an_error():
    layout = bound(fsdp=4, tensor=2)
    with pytest.raises(ValueError, match="has 3 dims here, but its spec .* has 2, where `use` takes one layer's slice"):
        layout.use(parameters()["layers"], "layers", "float32")
    with pytest.raises(ValueError, match="did you mean 'lm_head/kernel'"):
        layout.use({"kernl": parameters()["lm_head"]["kernel"]}, "lm_head", "float32")


def test_integer_arrays_keep_their_dtype_in_use():
    specs = {"table": ArraySpec((8, 4), "int32", ("vocab", "embed"))}
    layout = resolve(dict.fromkeys(AXES, 1) | dict(fsdp=8), ShardingConfig(), specs)
    layout = layout.on(make_mesh(layout.sizes))
    used = jax.jit(lambda t: layout.use({"table": t}, "", "bfloat16"))(jnp.arange(32, dtype=jnp.int32).reshape(8, 4))
    assert used["table"].dtype == jnp.int32
    assert UNSHARDED.use({"table": jnp.zeros(2, jnp.int32)}, "", "bfloat16")["table"].dtype == jnp.int32


def test_constrain_puts_an_activation_where_its_table_says():
    layout = bound(data=2, fsdp=2, tensor=2)
    out = jax.jit(lambda x: layout.constrain(x, ("batch", "mlp")))(jnp.zeros((8, 32)))
    assert_lies(out, layout, P(("data", "fsdp"), "tensor"))


def test_constrain_refuses_what_jax_would_replicate():
    layout = bound(data=2, fsdp=4)
    with pytest.raises(DeclarationError, match=r"shape \(6, 16\): its dim batch has size 6, which data=2 x fsdp=4 = 8 does not"):
        jax.jit(lambda x: layout.constrain(x, ("batch", "embed")))(jnp.zeros((6, 16)))


def test_on_one_device_nothing_is_added_to_the_program():
    layout = bound()
    plain = jax.make_jaxpr(jax.grad(functools.partial(loss, shard=UNSHARDED)))(parameters(), inputs())
    assert str(jax.make_jaxpr(jax.grad(functools.partial(loss, shard=layout)))(parameters(), inputs())) == str(plain)
    x = jnp.zeros((3, 5))
    assert layout.constrain(x, ("batch", "embed")) is x


def test_a_layout_works_inside_a_shard_map_that_is_manual_over_another_axis():
    """What a pipeline will do: one axis is manual, values differ along it, the other axes go on through the compiler."""
    layout = bound(fsdp=2, tensor=2)
    sizes = dict(layout.sizes, pipe=2)
    mesh = jax.make_mesh(tuple(sizes[axis] for axis in AXES), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 6)
    layout = dataclasses.replace(layout, sizes=sizes).on(mesh)

    def half(params, x):
        own = jax.tree.map(lambda w: jax.lax.pcast(w, "pipe", to="varying"), params)
        return jax.tree.map(lambda y: jax.lax.psum(y, "pipe"), jax.value_and_grad(functools.partial(loss, shard=layout))(own, x))

    run = jax.jit(jax.shard_map(half, mesh=mesh, in_specs=(P(), P("pipe")), out_specs=P(), axis_names={"pipe"}))
    assert_equal_to_one_device(run(parameters(), inputs()))


def test_an_unbound_layout_says_how_to_bind_it_and_refuses_another_mesh():
    layout = resolve(dict.fromkeys(AXES, 1) | dict(fsdp=8), ShardingConfig(), SPECS)
    with pytest.raises(ValueError, match="bind it first"):
        layout.constrain(jnp.zeros((8, 16)), ("batch", "embed"))
    with pytest.raises(ValueError, match="resolved for a mesh"):
        layout.on(make_mesh(dict.fromkeys(AXES, 1) | dict(data=8)))


@pytest.mark.parametrize("used, gradient, steps", [
    (P(None, None), P("fsdp", None), [P("fsdp", None)]),
    (P(None, "tensor"), P(("data", "fsdp"), "tensor"), [P(("data", "fsdp"), "tensor")]),
    (P(None, None), P(("fsdp", "data"), None), [P("fsdp", None), P(("fsdp", "data"), None)]),
    (P(None, None), P("data", "fsdp"), [P(None, "fsdp"), P("data", "fsdp")]),
    (P("tensor", None), P(("tensor", "fsdp"), None), [P(("tensor", "fsdp"), None)]),
    (P("tensor", None), P("fsdp", None), [P("fsdp", None)]),
    (P("tensor", None), P("tensor", None), []),
])
def test_a_gradient_is_scattered_in_steps_that_are_each_one_reduce_scatter(used, gradient, steps):
    assert _scatterings(used, gradient) == steps
