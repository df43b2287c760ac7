"""The learning rate at the steps that matter."""

import jax
import numpy as np
import pytest

from jaxlm.config import SCHEDULES, OptimizerConfig
from jaxlm.optimizers import make_schedule
from partitioning.declaration import DeclarationError


def rates(steps, **config):
    schedule = jax.jit(make_schedule(OptimizerConfig(learning_rate=2.0, **config), steps))
    return np.array([schedule(s) for s in range(steps)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_starts_above_zero_rises_evenly_and_reaches_the_peak_at_the_step_after_warmup(name):
    r = rates(40, schedule=name, warmup_steps=4, final_fraction=0.25)
    np.testing.assert_allclose(r[:5], [0.4, 0.8, 1.2, 1.6, 2.0], rtol=1e-6)
    assert r.dtype == np.float32


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_step_0_is_at_the_peak(name):
    assert rates(40, schedule=name)[0] == 2.0


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("final", [0.0, 0.25])
def test_the_last_step_is_at_the_declared_share_of_the_peak_and_the_one_before_above_it(name, warmup, final):
    r = rates(40, schedule=name, warmup_steps=warmup, final_fraction=final)
    np.testing.assert_allclose(r[-1], 2.0 * final, rtol=1e-6, atol=1e-7)
    assert r[-2] > r[-1] + 1e-4
    assert (np.diff(r[warmup:]) <= 0).all()


def test_the_decays_follow_their_formulas():
    p = np.arange(31) / 30
    np.testing.assert_allclose(rates(41, schedule="linear", warmup_steps=10)[10:], 2 * (1 - 0.9 * p), rtol=1e-6)
    np.testing.assert_allclose(rates(41, schedule="cosine", warmup_steps=10)[10:],
                               2 * (0.1 + 0.9 * (1 + np.cos(np.pi * p)) / 2), rtol=1e-6)


def test_wsd_is_stable_until_its_last_decay_steps():
    r = rates(40, schedule="wsd", warmup_steps=5, decay_steps=10, final_fraction=0.0)
    np.testing.assert_array_equal(r[5:30], 2.0)
    np.testing.assert_allclose(r[29:], 2 * (1 - np.arange(11) / 10), rtol=1e-6, atol=1e-7)
    default = rates(40, schedule="wsd", final_fraction=0.0)
    assert (default == 2.0).sum() == 32 and (default < 2.0).sum() == 8     # a fifth of the steps


def test_a_warmup_and_decay_that_do_not_fit_the_run_are_refused_with_the_numbers():
    with pytest.raises(DeclarationError, match=r"warmup_steps = 8 and decay_steps = 5 .*steps = 12.*at most 4"):
        make_schedule(OptimizerConfig(schedule="wsd", warmup_steps=8, decay_steps=5), 12)
    with pytest.raises(DeclarationError, match=r"warmup_steps = 13 exceeds train.steps = 12"):
        make_schedule(OptimizerConfig(warmup_steps=13), 12)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps, warmup", [(1, 0), (1, 1), (2, 1), (5, 5)])
def test_runs_too_short_to_decay_have_finite_rates_up_to_the_peak(name, steps, warmup):
    r = rates(steps, schedule=name, warmup_steps=warmup)
    assert ((r > 0) & (r <= 2.0)).all()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("steps", [40, 500, 740, 1000])
def test_under_jit_the_last_rate_is_exactly_the_final_one_and_none_is_negative(schedule, steps):
    config = OptimizerConfig(schedule=schedule, learning_rate=0.007, final_fraction=0.0)
    rates = jax.jit(jax.vmap(make_schedule(config, steps)))(np.arange(steps))
    assert float(rates[-1]) == 0 and float(rates.min()) >= 0
