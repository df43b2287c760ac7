"""Cross-entropy: values and gradients against float64 and automatic differentiation, and a vocabulary in shards."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kernels.cross_entropy import cross_entropy

B, L, V = 4, 6, 32


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return (5 * rng.standard_normal((B, L, V))).astype(np.float32), rng.integers(0, V, (B, L)).astype(np.int32)


def weighted(f, logits, targets):
    """A scalar in which each loss and each log-partition has a weight of its own."""
    loss, log_z = f(logits, targets)
    weights = jnp.arange(B * L, dtype=jnp.float32).reshape(B, L)
    return jnp.sum(weights * loss + jnp.sin(weights) * jnp.square(log_z))


def by_definition(logits, targets):
    log_z = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    return -jnp.log(jnp.take_along_axis(jax.nn.softmax(logits), targets[..., None], -1)[..., 0]), log_z


def test_values_are_those_of_numpy_in_float64(data):
    logits, targets = data
    loss, log_z = cross_entropy(*data)
    z = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(log_z, z, rtol=1e-6)
    np.testing.assert_allclose(loss, z - np.take_along_axis(logits, targets[..., None], -1)[..., 0], atol=2e-6)


def test_gradients_are_those_of_the_definition(data):
    got, want = (jax.jit(jax.grad(lambda x: weighted(f, x, data[1])))(data[0]) for f in (cross_entropy, by_definition))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_large_logits_neither_overflow_nor_lose_the_gradient():
    logits, targets = jnp.array([[1e4, 0.0, -1e4]]), jnp.array([1])
    loss, gradient = jax.value_and_grad(lambda x: cross_entropy(x, targets)[0].sum())(logits)
    np.testing.assert_allclose(loss, 1e4)
    np.testing.assert_allclose(gradient, [[1, -1, 0]], atol=1e-6)


def test_a_sharded_vocabulary_gives_the_same_and_moves_no_logits(data):
    mesh = jax.make_mesh((2, 4), ("rows", "vocabulary"), axis_types=(AxisType.Auto,) * 2)
    logits_at, targets_at = (NamedSharding(mesh, PartitionSpec("rows", None, *rest)) for rest in (("vocabulary",), ()))
    f = jax.jit(jax.value_and_grad(lambda x, t: weighted(cross_entropy, x, t)), in_shardings=(logits_at, targets_at),
                out_shardings=(None, logits_at)).lower(*data).compile()
    value, gradient = f(*(jax.device_put(x, s) for x, s in zip(data, (logits_at, targets_at))))
    want = jax.jit(jax.value_and_grad(lambda x: weighted(cross_entropy, x, data[1])))(data[0])
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, want[1], rtol=1e-5, atol=1e-5)
    moved = re.findall(r"= f32\[([\d,]+)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute)\(", f.as_text())
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in moved]
    assert sizes and max(sizes) <= B // 2 * L


def test_padded_logits_have_no_probability_and_no_gradient_whatever_they_are(data):
    logits, targets = data
    padding = np.concatenate([np.full((B, L, 2), 50.0), np.full((B, L, 1), -3.0)], -1).astype(np.float32)
    padded = np.concatenate([logits, padding], -1)
    loss, log_z = cross_entropy(padded, targets, V)
    want = cross_entropy(logits, targets)
    np.testing.assert_allclose((loss, log_z), want, rtol=1e-6, atol=2e-6)
    got = jax.jit(jax.grad(lambda x: weighted(lambda x, t: cross_entropy(x, t, V), x, targets)))(padded)
    np.testing.assert_allclose(got[..., :V], jax.jit(jax.grad(lambda x: weighted(cross_entropy, x, targets)))(logits), atol=1e-5)
    assert np.count_nonzero(got[..., V:]) == 0


def test_a_target_in_the_padding_is_outside_the_vocabulary(data):
    padded = np.concatenate([data[0], np.zeros((B, L, 3), np.float32)], -1)
    targets = np.full((B, L), V + 1)
    loss, log_z = cross_entropy(padded, targets, V)
    assert np.isnan(loss).all() and np.isfinite(log_z).all()
    gradient = jax.grad(lambda x: cross_entropy(x, targets, V)[0].sum())(padded)
    np.testing.assert_allclose(gradient[..., :V], jax.nn.softmax(data[0]), atol=1e-6)
    assert np.count_nonzero(gradient[..., V:]) == 0
