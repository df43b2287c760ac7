"""Rotary embedding: what only relative positions mean, and scaling against the published figures."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.config import ModelConfig
from jaxlm.models import build_model, rope
from partitioning.declaration import DeclarationError

LLAMA31 = dict(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def test_scores_depend_on_the_distance_alone():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 16)).astype(np.float32)
    frequencies = rope.frequencies(16, 10_000.0)

    def score(m, n):
        turned = (rope.rotate(x, rope.angles(jnp.array([[place]]), frequencies)) for x, place in ((q, m), (k, n)))
        return jnp.sum(next(turned) * next(turned))

    np.testing.assert_allclose(score(5, 3), score(102, 100), rtol=1e-4)
    assert abs(score(5, 3) - score(5, 4)) > 1e-3


def test_linear_scaling_divides_every_frequency():
    np.testing.assert_allclose(rope.frequencies(16, 1e4, dict(kind="linear", factor=4)), rope.frequencies(16, 1e4) / 4, rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_stretches_long_ones_and_blends_between():
    plain, scaled = rope.frequencies(128, 5e5), rope.frequencies(128, 5e5, LLAMA31)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert short.any() and long.any() and not (short | long).all()
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    for i in np.flatnonzero(~short & ~long):
        smooth = (8192 / wavelength[i] - 1) / 3
        np.testing.assert_allclose(scaled[i], (1 - smooth) * plain[i] / 8 + smooth * plain[i], rtol=1e-5)


def test_bfloat16_is_rotated_in_float32():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 300, 2, 8)), jnp.bfloat16)
    turn = rope.angles(jnp.arange(300), rope.frequencies(8, 1e4))
    out = rope.rotate(x, turn)
    assert out.dtype == jnp.bfloat16
    assert np.array_equal(out, rope.rotate(x.astype(jnp.float32), turn).astype(jnp.bfloat16))


@pytest.mark.parametrize("scaling, message", [
    (dict(factor=8.0), "kind = None.*'linear'.*'llama3'"), (dict(kind="yarn", factor=2), "kind = 'yarn'"),
    (dict(kind="linear"), "lacks factor"), (dict(kind="linear", factor=0), "above 0"),
    (dict(kind="linear", factor="2"), "above 0"),
    ({**LLAMA31, "low_freq": 1.0}, "unknown key.*low_freq.*did you mean 'low_freq_factor'"),
    ({**LLAMA31, "low_freq_factor": 4.0}, "not below")])
def test_a_wrong_scaling_is_refused_when_the_model_is_built(scaling, message):
    with pytest.raises(DeclarationError, match=message):
        build_model(ModelConfig(rope_scaling=scaling))


def test_building_a_model_with_scaling_needs_no_arrays():
    specs = build_model(ModelConfig(rope_scaling=LLAMA31)).specs
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(specs))
