"""The loss scale rises slowly, falls at once, and stays within bounds."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import PrecisionConfig
from jaxlm.optimizers import loss_scale

CONFIG = PrecisionConfig(loss_scale_initial=1024.0, loss_scale_growth_steps=3)


def after(outcomes, config=CONFIG):
    adjust = jax.jit(lambda state, finite: loss_scale.adjust(state, finite, config))
    state = loss_scale.init(config)
    for finite in outcomes:
        state = adjust(state, jnp.bool_(finite))
    assert state["scale"].dtype == jnp.float32 and state["good_steps"].dtype == jnp.int32
    return float(state["scale"]), int(state["good_steps"])


def test_the_scale_doubles_after_the_declared_number_of_finite_steps_and_counts_anew():
    assert after([True] * 2) == (1024, 2)
    assert after([True] * 3) == (2048, 0)
    assert after([True] * 6) == (4096, 0)


def test_a_nonfinite_step_halves_the_scale_and_restarts_the_count():
    assert after([True, True, False]) == (512, 0)
    assert after([True, True, False, True, True]) == (512, 2)
    assert after([False, False]) == (256, 0)


def test_the_scale_stays_between_1_and_2_to_the_24():
    assert after([False] * 40) == (1, 0)
    assert after([True] * 200)[0] == 2.0 ** 24
    beyond = PrecisionConfig(loss_scale_initial=2.0 ** 30, loss_scale_growth_steps=1)
    assert after([True] * 3, beyond)[0] == 2.0 ** 30


def test_unscaling_happens_in_float32_so_that_gradients_too_small_for_float16_survive():
    value = 3 * 2.0 ** -24                    # three of float16's smallest steps
    scaled = {"w": jnp.asarray([value * 8], jnp.float16)}
    unscaled = loss_scale.unscale(scaled, jnp.float32(2.0 ** 15))["w"]
    assert unscaled.dtype == jnp.float32
    np.testing.assert_array_equal(unscaled, np.float32([value * 8 / 2.0 ** 15]))
    assert unscaled[0].astype(jnp.float16) == 0
