"""The training loop: steps are dispatched ahead of the device, and the host looks at numbers only where they are needed.

It reads nothing from the devices but at logged steps (and where it evaluates, samples or saves). Every time it reports is
measured from a finished step to a finished step, so none is the time of a dispatch.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxlm import faults
from jaxlm.checkpoints import Checkpoints
from jaxlm.errors import RunError, Stopped
from jaxlm.flops import model_flops_per_token, peak_flops
from jaxlm.in_flight import InFlight
from jaxlm.job import Job
from jaxlm.signals import StopFlag


@dataclasses.dataclass
class Clock:
    """Seconds of training since the last logged step, without evaluation, sampling and waiting for saves."""

    since: float = dataclasses.field(default_factory=time.perf_counter)
    steps: int = 0

    def lap(self) -> float:
        """Seconds per step since the last lap; called when the last step's numbers are on the host."""
        now = time.perf_counter()
        seconds, self.since, self.steps = (now - self.since) / max(self.steps, 1), now, 0
        return seconds

    def skip(self, action: Callable[[], Any]) -> Any:
        """Runs something that is no training."""
        start = time.perf_counter()
        result = action()
        self.since += time.perf_counter() - start
        return result


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def run_loop(
    job: Job,
    train_step: Callable,
    state: Any,
    feed: Any,
    *,
    start: int,
    stop_at: int,
    recorder: Any,
    checkpoints: Checkpoints,
    about: Callable[[int], dict],
    evaluate: Callable | None,
    sample: Callable | None,
    check_replicas: Callable | None,
    profile: Any,
    stop: StopFlag,
    shares: Callable[[int], dict[str, float]] = lambda step: {},
    last: int | None = None,
) -> Any:
    """Trains from step `start` to `stop_at` and saves.

    Args:
      train_step: (state, batch) -> (state, metrics), the state donated.
      feed: iterator of batches on devices, with `wait_seconds`.
      about: step -> what is saved beside the arrays.
      evaluate, sample: functions of the parameters: figures for a row, a text; or None.
      shares: step -> the share of each source in all examples so far, if there are several.
      last: the step that ends the whole run (None: train.steps).
      check_replicas: raises if copies of the parameters or the optimizer's state differ; or None.

    Returns:
      The last state.

    Raises:
      RunError: bad numbers are declared to stop the run, or copies differ.
      RollBack: bad numbers are declared to send it back.
      Stopped: asked to stop; everything is saved.
    """
    config = job.config
    train = config.train
    batch_tokens = train.global_batch_size * config.data.sequence_length
    has_gaps = config.data.pack != "split" or config.data.content != "text"  # places of a batch that are no targets
    last = train.steps if last is None else last
    flops_per_token = model_flops_per_token(config.model, config.data.sequence_length)
    peak = peak_flops(jax.devices()[0].device_kind, config.precision.compute)
    in_flight = InFlight()
    clock = Clock()
    waited = feed.wait_seconds
    saved_at = time.monotonic()

    def is_time(logs: bool) -> bool:
        """Whether a save is due by the clock; several processes go by that of the first, where they meet anyway."""
        minutes = config.checkpoint.every_minutes
        if not minutes or (jax.process_count() > 1 and not logs):
            return False
        late = time.monotonic() - saved_at >= 60 * minutes
        return late if jax.process_count() == 1 else bool(multihost_utils.broadcast_one_to_all(np.array(late)))

    def save(step: int, figures: dict) -> None:
        nonlocal saved_at
        saved_at = time.monotonic()
        facts = {**about(step), **({"metrics": figures} if figures else {})}
        # The save before this one may have failed in the background.
        for action in (checkpoints.wait, lambda: checkpoints.save(step, job.to_saved(state), facts)):
            try:
                clock.skip(action)
            except RunError as error:
                if config.checkpoint.on_save_error == "stop":
                    raise
                recorder.line(f"WARNING: {error} Going on without it (config.checkpoint.on_save_error).")

    def read(step: int, metrics: Any, write: bool) -> None:
        """Waits for the step's numbers; writes them as a row when one is due; stops on bad ones as configured."""
        nonlocal waited
        numbers = {name: value.item() for name, value in jax.device_get(metrics).items()}
        steps, seconds = clock.steps, clock.lap()
        tokens_per_second = batch_tokens / seconds
        if write:
            recorder.row(
                {
                    "step": step,
                    "loss": numbers["loss"],
                    "grad_norm": numbers["grad_norm"],
                    "learning_rate": numbers["learning_rate"],
                    "tokens": step * batch_tokens,
                    "tokens_per_second": tokens_per_second,
                    "step_seconds": seconds,
                    "mfu": tokens_per_second * flops_per_token / (peak * jax.device_count()) if peak else None,
                    "input_wait_seconds": (feed.wait_seconds - waited) / max(steps, 1),
                    **({"target_share": numbers["targets"] / batch_tokens} if has_gaps else {}),
                    **{f"share_{name}": share for name, share in shares(step).items()},
                    **faults.row(config.faults, numbers),
                    **({"loss_scale": numbers["loss_scale"]} if "loss_scale" in numbers else {}),
                }
            )
        waited = feed.wait_seconds
        faults.react(config.faults, numbers, checkpoints.steps())

    for step in range(start + 1, stop_at + 1):
        profile.before(step)
        state, metrics = train_step(state, next(feed))
        clock.steps += 1
        in_flight.add(metrics["loss"])
        if profile.after(step, lambda: jax.block_until_ready(metrics)):
            recorder.line(f"step {step}: profiler trace written")
        reason = stop.reached(step)  # asked once a step: a signal that comes later ends the next one
        ends = step == stop_at or reason is not None
        logs = train.log_every > 0 and (step == start + 1 or ends or is_due(step, train.log_every))
        saves = ends or is_due(step, config.checkpoint.every) or is_time(logs)
        evaluates = evaluate is not None and (step == last or is_due(step, train.eval_every))
        samples = sample is not None and is_due(step, train.sample_every)
        compares = check_replicas is not None and is_due(step, config.faults.replica_check_every)
        if logs or saves or evaluates or samples or compares:
            read(step, metrics, logs)
        if compares:
            clock.skip(lambda: check_replicas({name: state[name] for name in ("params", "optimizer")}))
        figures = clock.skip(lambda: evaluate(state["params"])) if evaluates else {}
        if evaluates:
            recorder.row({"step": step, **figures})
        if samples:
            recorder.text(step, clock.skip(lambda: sample(state["params"])))
        if saves:
            save(step, figures)
        if reason is not None and step < stop_at:
            finish(checkpoints, step)
            raise Stopped(f"{reason}: stopped after step {step}, saved.")
    finish(checkpoints, stop_at)
    return state


def finish(checkpoints: Checkpoints, step: int) -> None:
    """Waits for the last save. A run that may go on without a checkpoint has nothing to go on with at its end."""
    checkpoints.wait()
    if step not in checkpoints.steps():
        raise RunError(f"the run ends at step {step}, but the checkpoint of this step could not be written (see above).")
