"""The learning rate over the steps of a run.

Steps count from 0; a run of `steps` steps ends with step `steps - 1`. With a warm-up of w steps the rate at step s < w is
`peak * (s + 1) / (w + 1)`: w equal rises that start above 0 (a step at rate 0 would be a step thrown away), and step w is the
first at the peak. Without warm-up step 0 is at the peak. The decaying schedules leave the peak after step w and are at
`final_fraction * peak` on the last step exactly. A pure function of the step, so a resumed run needs no schedule state.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxlm.config import OptimizerConfig
from partitioning.declaration import DeclarationError


def make_schedule(config: OptimizerConfig, steps: int, peak: float | None = None) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """The schedule that `config` declares for a run of `steps` steps.

    With w = `warmup_steps`, p(s) = (s - w) / (steps - 1 - w) and f = `final_fraction`, the rate over the peak after warm-up is

      constant  1
      linear    1 - (1 - f) p
      cosine    f + (1 - f) (1 + cos(pi p)) / 2                              (Loshchilov and Hutter, arXiv:1608.03983, eq. 5)
      wsd       1, then linear from 1 to f over the last `decay_steps` steps (Hu et al., arXiv:2404.06395, eq. 1)

    A warm-up that leaves no step to decay in (w >= steps - 1) ends the run at the rate that it has reached.

    Args:
      config: the optimizer's section.
      steps: steps of the whole run, whether or not it stops earlier.
      peak: the peak rate, if it is not `config.learning_rate`.

    Returns:
      A function from a step (int32 scalar, or a Python int) to its rate (float32 scalar).

    Raises:
      DeclarationError: warm-up and wsd's decay together are longer than the run.
    """
    peak = config.learning_rate if peak is None else peak
    warmup, final = config.warmup_steps, peak * config.final_fraction
    if warmup > steps:
        raise DeclarationError(f"config.optimizer.warmup_steps = {warmup} exceeds train.steps = {steps}; shorten the warm-up.")
    left = max(steps - 1 - warmup, 0)          # steps after the first at the peak
    if config.schedule == "constant" or left == 0:
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, final, left)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, left, alpha=config.final_fraction)
    else:
        after = _stable_then_decay(config, steps, peak, left)
    if warmup:
        rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
        after = optax.join_schedules([rise, after], [warmup])
    falls = config.schedule != "constant" and left > 0

    def rate(step):
        step = jnp.asarray(step, jnp.int32)
        value = jnp.asarray(after(step), jnp.float32)
        # Set rather than computed: under jit the formula may round to the other side of 0, and a negative rate climbs.
        return jnp.where(step >= steps - 1, jnp.float32(final), value) if falls else value

    return rate


def _stable_then_decay(config: OptimizerConfig, steps: int, peak: float, left: int) -> optax.Schedule:
    if config.decay_steps is not None and config.warmup_steps + config.decay_steps > steps:
        raise DeclarationError(
            f"config.optimizer.warmup_steps = {config.warmup_steps} and decay_steps = {config.decay_steps} together exceed "
            f"train.steps = {steps}; shorten one of them (at most {steps - config.warmup_steps} steps are left to decay in).")
    decay = min(steps // 5 if config.decay_steps is None else config.decay_steps, left)
    if decay == 0:
        return optax.constant_schedule(peak)
    fall = optax.linear_schedule(peak, peak * config.final_fraction, decay)
    return optax.join_schedules([optax.constant_schedule(peak), fall], [left - decay])
