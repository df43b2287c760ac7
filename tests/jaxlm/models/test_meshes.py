"""Eight devices and one: first values and dropout masks have the same bits, the loss the same value."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlm.models.dropout import Dropout
from partitioning.layout import resolve
from partitioning.mesh import MeshConfig, make_mesh, resolve_sizes
from partitioning.tables import ShardingConfig
from tests.jaxlm.models.tiny import B, L, batch, tiny

SIZES = dict(embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=24, vocab_size=48, num_layers=2)
MESHES = [dict(fsdp=8), dict(data=2, fsdp=2, tensor=2), dict(fsdp=4, tensor=2), dict(data=4, tensor=2)]


def layout_of(model, mesh, **sharding):
    sizes = resolve_sizes(MeshConfig(**mesh), 8)
    return resolve(sizes, ShardingConfig(**sharding), model.specs, {}, model.activations(8, L)).on(make_mesh(sizes))


@pytest.mark.parametrize("mesh", MESHES)
def test_first_values_have_the_same_bits_on_every_mesh(mesh):
    model, _ = tiny(SIZES)
    layout = layout_of(model, mesh)
    shardings = jax.tree.map(layout.sharding, layout.params, is_leaf=lambda x: isinstance(x, PartitionSpec))
    one = jax.jit(model.init)(jax.random.key(3))
    eight = jax.jit(model.init, out_shardings=shardings)(jax.random.key(3))
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(eight))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(eight)):
        assert np.array_equal(a, b)


def test_layers_and_parameters_start_from_different_draws_that_options_leave_alone():
    model, _ = tiny(SIZES)
    params = jax.jit(model.init)(jax.random.key(3))
    gate, up = params["layers"]["mlp"]["gate"]["kernel"], params["layers"]["mlp"]["up"]["kernel"]
    assert not np.any(gate == up) and not np.any(gate[0] == gate[1])
    other = jax.jit(tiny(SIZES, qk_norm=True, bias=True, scan_layers=False)[0].init)(jax.random.key(3))
    assert np.array_equal(gate, other["layers"]["mlp"]["gate"]["kernel"])


def test_first_values_have_the_documented_scales():
    model, _ = tiny(num_layers=8, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=256, vocab_size=512)
    params = jax.jit(model.init)(jax.random.key(3))
    layers = params["layers"]
    for x, std in ((layers["attention"]["query"]["kernel"], 64 ** -0.5), (layers["mlp"]["up"]["kernel"], 64 ** -0.5),
                   (layers["attention"]["output"]["kernel"], (64 * 16) ** -0.5),
                   (layers["mlp"]["down"]["kernel"], (256 * 16) ** -0.5),
                   (params["embed"]["embedding"], 0.02), (params["lm_head"]["kernel"], 64 ** -0.5)):
        np.testing.assert_allclose(x.std(), std, rtol=0.03)
        assert abs(x.mean()) < 0.05 * std
    assert np.all(layers["attention_norm"]["scale"] == 1)


def test_dropout_masks_have_the_same_bits_on_every_mesh_and_in_every_microbatch():
    x = np.ones((8, L, 16), np.float32)
    examples = np.arange(8, dtype=np.int32) + 5
    key = jax.random.key(2)

    def drop(x, examples):
        return Dropout(0.25, key, examples)(x, 3, 1)

    one = np.asarray(jax.jit(drop)(x, examples))
    assert abs((one == 0).mean() - 0.25) < 0.04 and np.allclose(one[one > 0], 4 / 3)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    for spec in (PartitionSpec(("a", "b")), PartitionSpec("a", "b", "c"), PartitionSpec(None, ("a", "b"), "c")):
        at = NamedSharding(mesh, spec)
        eight = jax.jit(drop, in_shardings=(at, NamedSharding(mesh, PartitionSpec(spec[0]))), out_shardings=at)(x, examples)
        assert np.array_equal(one, eight)
    halves = [jax.jit(drop)(x[i:i + 2], examples[i:i + 2]) for i in range(0, 8, 2)]
    assert np.array_equal(one, np.concatenate(halves))
    for other in (Dropout(0.25, key, examples)(x, 4, 1), Dropout(0.25, key, examples)(x, 3, 2),
                  Dropout(0.25, jax.random.key(9), examples)(x, 3, 1), Dropout(0.25, key, examples + 1)(x, 3, 1)):
        assert not np.array_equal(one, other)


@pytest.mark.parametrize("mesh", MESHES[:2])
def test_loss_and_gradients_equal_one_device_with_dropout_and_windows(mesh):
    model, params = tiny(SIZES, dropout=0.2, window_pattern=(4, None))
    data = jax.tree.map(lambda *x: np.concatenate(x), batch(0), batch(1))
    data["example"] = np.arange(2 * B, dtype=np.int32)
    layout = layout_of(model, mesh)

    def step(params, data, **shard):
        def f(p):
            sums = model.loss(p, data, dropout=(jax.random.key(1), data["example"]), z_loss=0.01, **shard)
            return (sums.loss + sums.z_loss) / sums.targets

        return jax.value_and_grad(f)(params)

    one = jax.jit(step)(params, data)
    shardings = jax.tree.map(layout.sharding, layout.params, is_leaf=lambda x: isinstance(x, PartitionSpec))
    rows = layout.sharding(layout.activation(("batch",)))
    eight = jax.jit(lambda p, d: step(p, d, shard=layout))(jax.device_put(params, shardings), jax.device_put(data, rows))
    np.testing.assert_allclose(one[0], eight[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one[1], eight[1])
