"""Bad numbers: the rule for spikes against one written by hand, and what each reaction does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm import faults
from jaxlm.config import FaultsConfig, to_config
from jaxlm.errors import RollBack, RunError
from partitioning.declaration import DeclarationError


def counters_after(losses, config, norms=None):
    """The counters after each step of a run with these losses, and whether each update was applied."""
    step = jax.jit(lambda counters, loss, norm: (faults.is_fine(config, counters, loss, norm),
                                                 faults.counted(config, counters, loss, norm) | {"step": counters["step"] + 1}))
    counters = faults.initial_counters() | {"step": jnp.int32(0)}
    history = []
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        fine, counters = step(counters, jnp.float32(loss), jnp.float32(norm))
        history.append((bool(fine), {name: value.item() for name, value in counters.items()}))
    return history


def by_hand(losses, threshold):
    """Which losses are spikes, by the rule of the module's documentation, in Python."""
    mean, number, spikes = 0.0, 0, []
    for loss in losses:
        spike = number >= faults.WARM and loss > threshold * mean
        spikes.append(spike)
        number += 1
        mean += (min(loss, threshold * mean) - mean if spike else loss - mean) / min(number, faults.WINDOW)
    return spikes


def test_spikes_are_those_of_the_documented_rule():
    rng = np.random.default_rng(0)
    losses = 2 + rng.random(200) + 8 * (rng.random(200) < 0.05)
    losses[3] = 20                             # too early to be one
    history = counters_after(losses, FaultsConfig(spike_threshold=2))
    expected = by_hand(losses, 2)
    assert [not fine for fine, _ in history] == expected and history[-1][1]["spikes"] == sum(expected) >= 5
    assert not any(expected[:faults.WARM]) and losses[3] > 2 * losses[:3].mean()


def test_without_a_threshold_nothing_is_a_spike():
    history = counters_after([1.0] * 50 + [1e6], FaultsConfig())
    assert all(fine for fine, _ in history) and history[-1][1]["losses"] == 0


def test_a_loss_that_stays_high_is_accepted_in_the_end():
    history = counters_after([1.0] * 50 + [5.0] * 100, FaultsConfig(spike_threshold=2))
    fine = [fine for fine, _ in history[50:]]
    assert not fine[0] and fine[-1] and sum(not f for f in fine) < 60


@pytest.mark.parametrize("loss, norm", [(float("nan"), 1.0), (1.0, float("inf"))])
def test_numbers_that_are_not_finite_stay_out_of_the_mean_of_losses(loss, norm):
    history = counters_after([1.0] * 30 + [loss, 1.0], FaultsConfig("skip", 2.0), [1.0] * 30 + [norm, 1.0])
    assert [fine for fine, _ in history] == [True] * 30 + [False, True]
    assert history[-1][1]["loss_mean"] == 1.0 and history[-1][1]["bad_step"] == -1


@pytest.mark.parametrize("reaction", ["stop", "rollback"])
def test_nothing_is_applied_or_counted_after_a_bad_step_that_stops_the_run(reaction):
    history = counters_after([1.0] * 30 + [9.0, 1.0, float("nan"), 9.0], FaultsConfig("stop", 2.0, reaction))
    assert [fine for fine, _ in history[30:]] == [False] * 4
    last = history[-1][1]
    assert (last["bad_step"], last["bad_kind"], last["bad_loss"], last["spikes"]) == (31, faults.SPIKE, 9.0, 1)


def test_each_kind_has_its_own_reaction():
    history = counters_after([1.0] * 30 + [9.0, float("nan")], FaultsConfig("stop", 2.0, "skip"))
    assert (history[-2][1]["bad_step"], history[-1][1]["bad_step"], history[-1][1]["bad_kind"]) == (-1, 32, faults.NOT_FINITE)


NUMBERS = {"bad_step": 31, "bad_kind": faults.SPIKE, "bad_loss": 9.0, "loss_mean": 1.0, "rollbacks": 2, "left_out": 7}


def test_going_back_leaves_out_the_batches_since_the_checkpoint():
    with pytest.raises(RollBack) as raised:
        faults.react(FaultsConfig(spike_threshold=2, on_spike="rollback"), NUMBERS, [20, 25])
    # Step 31 took batch 30 + 7. From step 25 on, step 26 takes batch 25 + 13, the one after it.
    assert faults.after(raised.value.facts, 25) == {"rollbacks": 3, "left_out": 13}


@pytest.mark.parametrize("config, kind, message", [
    (FaultsConfig(spike_threshold=2, on_spike="rollback", max_rollbacks=2), faults.SPIKE,
     r"step 31, 9.0000, is over .*spike_threshold = 2 .*1.0000, and the run has gone back 2 times .*checkpoint is step 25"),
    (FaultsConfig(spike_threshold=2, on_spike="stop"), faults.SPIKE, r"config.faults.on_spike = 'stop'"),
    (FaultsConfig("stop", 2, "skip"), faults.NOT_FINITE, r"not finite at step 31 .config.faults.on_nonfinite = 'stop'")])
def test_a_run_that_stops_says_why_and_what_to_do(config, kind, message):
    with pytest.raises(RunError, match=message):
        faults.react(config, NUMBERS | {"bad_kind": kind}, [20, 25])


def test_good_numbers_ask_for_nothing():
    faults.react(FaultsConfig("rollback", 2, "rollback"), NUMBERS | {"bad_step": -1}, [])


def test_a_threshold_that_calls_ordinary_losses_spikes_is_refused():
    with pytest.raises(DeclarationError, match="config.faults.spike_threshold = 0.9.*above 1"):
        to_config({"faults": {"spike_threshold": 0.9}})
