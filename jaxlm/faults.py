"""Bad numbers: which steps have them, and what follows.

A step is bad if its loss or gradient norm is not finite, or if its loss is a spike: more than `faults.spike_threshold` times the
running mean of the losses before it. The mean is over all of them so far up to `WINDOW`, then exponential with weight
1 / WINDOW; until there are `WARM` losses nothing is a spike. A spike enters the mean as the largest loss that would be none, so
a loss that stays high is accepted in the end.

An update from bad numbers is never applied. What else follows is declared, for each kind of its own:

    skip       the step is counted and the run goes on with the next batch
    stop       nothing changes from that step on, and the loop ends the run when it sees it
    rollback   nothing changes either; the run goes back to the newest scheduled checkpoint (at a multiple of checkpoint.every),
               and on from there with the batches after the bad one. Those since, the bad one included, are left out for good.

The judgement is part of the compiled step and rests on the state alone, and with it every process, and a run that was
interrupted and resumed, judge alike. The counters `rollbacks` and `left_out` (batches left out so far: step s takes batch
s - 1 + left_out) are saved with the state. A run that is killed after a rollback and before the next save meets the same bad
step again, and goes back in the same way.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.config import FaultsConfig
from jaxlm.errors import RollBack, RunError

WINDOW = 50                                    # losses
WARM = 20
NOT_FINITE, SPIKE = 1, 2                       # values of the counter `bad_kind`


@dataclasses.dataclass(frozen=True)
class BadStep:
    """A bad step that sends a run back, and the counters of the run before it does."""
    step: int
    rollbacks: int
    left_out: int
    words: str


def initial_counters() -> dict[str, jax.Array]:
    """The counters at step 0. `bad_step` is the step past which the run must not go, or -1, with its kind and loss."""
    whole = {name: jnp.zeros((), jnp.int32) for name in ("spikes", "losses", "rollbacks", "left_out", "bad_kind")}
    real = {name: jnp.zeros((), jnp.float32) for name in ("loss_mean", "bad_loss")}
    return {**whole, **real, "bad_step": jnp.full((), -1, jnp.int32)}


def is_fine(faults: FaultsConfig, counters: dict[str, jax.Array], loss: jax.Array, grad_norm: jax.Array) -> jax.Array:
    """Whether the update may be applied: bool scalar."""
    return jnp.isfinite(loss) & jnp.isfinite(grad_norm) & ~_is_spike(faults, counters, loss) & (counters["bad_step"] < 0)


def _is_spike(faults: FaultsConfig, counters: dict[str, jax.Array], loss: jax.Array) -> jax.Array:
    if not faults.spike_threshold:
        return jnp.zeros((), bool)
    return (counters["losses"] >= WARM) & jnp.isfinite(loss) & (loss > faults.spike_threshold * counters["loss_mean"])


def counted(faults: FaultsConfig, counters: dict[str, jax.Array], loss: jax.Array, grad_norm: jax.Array,
            excused: jax.Array | bool = False) -> dict[str, jax.Array]:
    """The counters of `initial_counters` after a step.

    Args:
      counters: before it, with `step` too.
      loss, grad_norm: of the step.
      excused: bool scalar; numbers that are not finite are no fault of the run (an overflow under loss scaling).
    """
    going = counters["bad_step"] < 0
    spike = going & _is_spike(faults, counters, loss) & jnp.isfinite(grad_norm)
    broken = going & ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm)) & ~jnp.asarray(excused)
    bad = (spike & (faults.on_spike != "skip")) | (broken & (faults.on_nonfinite != "skip"))
    out = {name: counters[name] for name in initial_counters()}
    if faults.spike_threshold:
        held = jnp.where(spike, faults.spike_threshold * counters["loss_mean"], loss)
        counts = going & jnp.isfinite(held)
        number = counters["losses"] + counts
        step = (held - counters["loss_mean"]) / jnp.clip(number, 1, WINDOW)
        out |= {"spikes": counters["spikes"] + spike, "losses": number,
                "loss_mean": jnp.where(counts, counters["loss_mean"] + step, counters["loss_mean"])}
    return out | {"bad_step": jnp.where(bad, counters["step"] + 1, counters["bad_step"]),
                  "bad_kind": jnp.where(bad, jnp.where(spike, SPIKE, NOT_FINITE), counters["bad_kind"]),
                  "bad_loss": jnp.where(bad, loss, counters["bad_loss"])}


def row(faults: FaultsConfig, numbers: dict[str, Any]) -> dict[str, Any]:
    """What a logged row tells of faults: the counts of those that the declaration lets happen."""
    out = {"skipped": numbers["skipped"]}
    if faults.spike_threshold:
        out |= {"spikes": numbers["spikes"], "loss_mean": numbers["loss_mean"]}
    if "rollback" in (faults.on_nonfinite, faults.on_spike):
        out |= {"rollbacks": numbers["rollbacks"], "left_out": numbers["left_out"]}
    return out


def react(faults: FaultsConfig, numbers: dict[str, Any], saved: list[int]) -> None:
    """Ends the run, or sends it back, if a bad step says so.

    Args:
      numbers: the metrics of a step on the host.
      saved: steps of the checkpoints.

    Raises:
      RollBack: the run is to go on from the newest checkpoint.
      RunError: it is to stop.
    """
    step = numbers["bad_step"]
    if step < 0:
        return
    spike = numbers["bad_kind"] == SPIKE
    key = "on_spike" if spike else "on_nonfinite"
    reaction = faults.on_spike if spike else faults.on_nonfinite
    what = (f"the loss of step {step}, {numbers['bad_loss']:.4f}, is over config.faults.spike_threshold = "
            f"{faults.spike_threshold:g} times the running mean, {numbers['loss_mean']:.4f}" if spike else
            f"loss or gradients were not finite at step {step}")
    if reaction == "rollback" and numbers["rollbacks"] < faults.max_rollbacks:
        raise RollBack(BadStep(step, numbers["rollbacks"], numbers["left_out"], what))
    newest = f"the newest checkpoint is {f'step {saved[-1]}' if saved else 'none'}"
    if reaction == "rollback":
        raise RunError(f"{what}, and the run has gone back {numbers['rollbacks']} times already (config.faults.max_rollbacks). "
                       f"Nothing was saved since; {newest}. Lower config.optimizer.learning_rate, or raise max_rollbacks.")
    raise RunError(f"{what} (config.faults.{key} = 'stop'). Nothing was saved since; {newest}. Lower "
                   "config.optimizer.learning_rate, look at the data of that step, or set config.faults."
                   f"{key} = 'skip' or 'rollback' and resume with --allow_change.")


def after(back: BadStep, step: int) -> dict[str, int]:
    """The counters to go on with from the checkpoint of `step`."""
    return {"rollbacks": back.rollbacks + 1, "left_out": back.left_out + back.step - step}
