"""The fused loss: sums and gradients are those of cross-entropy on whole logits, in chunks, in shards, and in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kernels import linear_cross_entropy as module
from kernels.cross_entropy import cross_entropy
from kernels.linear_cross_entropy import is_worthwhile, linear_cross_entropy
from kernels.matmul import einsum

B, L, D, V = 4, 6, 16, 40
FORMS = {"plain": {}, "cap": dict(softcap=1.5), "z-loss": dict(z_loss=0.1), "padded": dict(size=33), "tied": dict(tied=True),
         "all": dict(softcap=1.5, z_loss=0.1, size=33, tied=True)}


@pytest.fixture
def data(monkeypatch):
    monkeypatch.setattr(module, "ELEMENTS", 7 * V)                     # 24 tokens in chunks of six
    rng = np.random.default_rng(0)
    targets, mask = rng.integers(0, 33, (B, L)).astype(np.int32), rng.random((B, L)) < 0.7
    return (rng.standard_normal((B, L, D)).astype(np.float32), rng.standard_normal((D, V)).astype(np.float32),
            np.where(mask, targets, -7), mask)


def whole(x, matrix, targets, mask, *, tied=False, size=None, softcap=None, z_loss=0.0):
    logits = einsum("bld,vd->blv" if tied else "bld,dv->blv", x, matrix, jnp.float32)
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    loss, log_z = cross_entropy(logits, targets, size)
    return (jnp.sum(jnp.where(mask, loss, 0)), z_loss * jnp.sum(jnp.where(mask, jnp.square(log_z), 0)))


def step(function, x, matrix, targets, mask, **options):
    def objective(x, matrix):
        loss, penalty = function(x, matrix, targets, mask, **options)
        return 3 * (loss + penalty), (loss, penalty)
    return jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(x, matrix)


def prepared(data, options):
    x, matrix, targets, mask = data
    return x, (matrix.T if options.get("tied") else matrix), targets, mask


@pytest.mark.parametrize("form", FORMS)
def test_sums_and_gradients_are_those_of_whole_logits(data, form):
    given = prepared(data, FORMS[form])
    got, want = (step(f, *given, **FORMS[form]) for f in (linear_cross_entropy, whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, want)
    assert np.allclose(linear_cross_entropy(*given, **FORMS[form]), got[0][1], rtol=1e-6)              # without a gradient


@pytest.mark.parametrize("form", ["plain", "all"])
@pytest.mark.parametrize("spec", [PartitionSpec("rows", None, "vocabulary"), PartitionSpec("rows", "vocabulary")])
def test_a_mesh_gives_the_same_whatever_it_splits(data, form, spec):
    options = FORMS[form]
    given = prepared(data, options)
    mesh = jax.make_mesh((2, 2), ("rows", "vocabulary"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec[:2]) if x.ndim == 3 else PartitionSpec())) for x in given]
    got = step(linear_cross_entropy, *placed, mesh=mesh, spec=spec, **options)
    want = step(whole, *given, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, want)


def test_bfloat16_gives_a_weight_its_gradient_in_float32_and_as_exactly_as_whole_logits(data):
    x, matrix, targets, mask = data
    low = jnp.asarray(x, jnp.bfloat16)
    (_, (loss, _)), (d_x, d_matrix) = step(linear_cross_entropy, low, matrix, targets, mask)
    rounded = np.asarray(jnp.asarray(matrix, jnp.bfloat16), np.float32)
    (_, (want, _)), (_, exact) = step(whole, np.asarray(low, np.float32), rounded, targets, mask)
    _, (_, plain) = step(whole, low, matrix, targets, mask)
    assert (d_x.dtype, d_matrix.dtype, loss.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert np.abs(d_matrix - exact).max() <= 1.1 * np.abs(plain - exact).max()


def test_no_target_at_all_gives_zeros(data):
    x, matrix, targets, mask = data
    (_, sums), gradients = step(linear_cross_entropy, x, matrix, targets, np.zeros_like(mask), z_loss=0.1)
    assert not any(np.any(a) for a in jax.tree.leaves((sums, gradients)))


def test_a_target_outside_the_vocabulary_is_seen(data):
    x, matrix, targets, mask = data
    (_, (loss, _)), gradients = step(linear_cross_entropy, x, matrix, np.where(mask, 33, targets), mask, size=33)
    assert np.isnan(loss) and all(np.isfinite(g).all() for g in gradients)


def test_unlike_factors_are_refused_where_they_would_give_wrong_gradients(data):
    x, matrix, targets, mask = data
    gradient = jax.grad(lambda x: linear_cross_entropy(x, matrix, targets, mask, z_loss=0.1)[0])(x)
    assert np.isnan(gradient).all()


def test_memory_does_not_grow_with_the_vocabulary():
    def temporary(vocabulary):
        given = [jax.ShapeDtypeStruct(s, t) for s, t in (((8, 512, 8), jnp.float32), ((8, vocabulary), jnp.float32),
                                                         ((8, 512), jnp.int32), ((8, 512), bool))]
        objective = jax.value_and_grad(lambda x, matrix, *rest: linear_cross_entropy(x, matrix, *rest)[0], (0, 1))
        memory = jax.jit(objective).lower(*given).compile().memory_analysis()
        return memory.temp_size_in_bytes - 4 * 8 * vocabulary          # the sum of the gradient itself

    assert temporary(2 ** 17) < 1.1 * temporary(2 ** 14)


def test_it_is_worthwhile_from_one_chunk_of_one_device_on():
    mesh = jax.make_mesh((2, 4), ("rows", "vocabulary"), axis_types=(AxisType.Auto,) * 2)
    assert is_worthwhile(4096, 8192 + 1, None, PartitionSpec()) and not is_worthwhile(4096, 8192, None, PartitionSpec())
    assert not is_worthwhile(8 * 4096, 8192, mesh, PartitionSpec("rows", None, "vocabulary"))
