"""The training loop: steps are dispatched ahead of the device, and the host looks at numbers only where they are needed.

It reads nothing from the devices but at logged steps (and where it evaluates, samples or saves). Every time it reports is
measured from a finished step to a finished step, so none is the time of a dispatch.
"""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxlm.checkpoints import Checkpoints
from jaxlm.errors import RunError, Stopped
from jaxlm.flops import model_flops_per_token, peak_flops
from jaxlm.job import Job
from jaxlm.signals import StopFlag

# Steps that may be under way at once: one runs while the next waits in the queue, so that the device never idles and a
# request to stop is answered within a step or two.
IN_FLIGHT = 2


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
    profile: Any,
    stop: StopFlag,
) -> Any:
    """Trains from step `start` to `stop_at` and saves.

    Args:
      train_step: (state, batch) -> (state, metrics), the state donated.
      feed: iterator of batches on devices, with `wait_seconds`.
      about: step -> what is saved beside the arrays.
      evaluate, sample: functions of the parameters: figures for a row, a text; or None.

    Returns:
      The last state.

    Raises:
      RunError: a loss or gradient norm was not finite and `faults.on_nonfinite` is stop.
      Stopped: asked to stop; everything is saved.
    """
    config = job.config
    train = config.train
    batch_tokens = train.global_batch_size * config.data.sequence_length
    flops_per_token = model_flops_per_token(config.model, config.data.sequence_length)
    peak = peak_flops(jax.devices()[0].device_kind, config.precision.compute)
    in_flight: collections.deque = collections.deque()
    # Simulated devices share one pool of threads, where steps that pile up can keep each other's collectives waiting for ever.
    ahead = 0 if jax.devices()[0].platform == "cpu" and jax.local_device_count() > 1 else IN_FLIGHT
    clock = Clock()
    waited = feed.wait_seconds

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
                    "skipped": numbers["skipped"],
                    **({"loss_scale": numbers["loss_scale"]} if "loss_scale" in numbers else {}),
                }
            )
        waited = feed.wait_seconds
        if config.faults.on_nonfinite == "stop" and numbers["bad_step"] >= 0:
            saved = checkpoints.steps()
            raise RunError(
                f"loss or gradients were not finite at step {numbers['bad_step']} (config.faults.on_nonfinite = 'stop'). "
                f"Nothing was saved since; the newest checkpoint is {f'step {saved[-1]}' if saved else 'none'}. "
                "Lower config.optimizer.learning_rate, look at the data of that step, or set config.faults.on_nonfinite = 'skip'."
            )

    for step in range(start + 1, stop_at + 1):
        profile.before(step)
        state, metrics = train_step(state, next(feed))
        clock.steps += 1
        in_flight.append(metrics["loss"])
        if len(in_flight) > ahead:
            jax.block_until_ready(in_flight.popleft())
        if profile.after(step, lambda: jax.block_until_ready(metrics)):
            recorder.line(f"step {step}: profiler trace written")
        # Asked once a step: a signal that comes later ends the next one. Several processes must agree, which costs a wait,
        # so they ask where the numbers are read anyway.
        asks = jax.process_count() == 1 or is_due(step, train.log_every) or is_due(step, config.checkpoint.every)
        reason = stop.agreed() if asks else None
        ends = step == stop_at or reason is not None
        logs = train.log_every > 0 and (step == start + 1 or ends or is_due(step, train.log_every))
        saves = ends or is_due(step, config.checkpoint.every)
        evaluates = evaluate is not None and (step == train.steps or is_due(step, train.eval_every))
        samples = sample is not None and is_due(step, train.sample_every)
        if logs or saves or evaluates or samples:
            read(step, metrics, logs)
        if evaluates:
            recorder.row({"step": step, **clock.skip(lambda: evaluate(state["params"]))})
        if samples:
            recorder.text(step, clock.skip(lambda: sample(state["params"])))
        if saves:
            clock.skip(lambda: checkpoints.save(step, job.to_saved(state), about(step)))
        if reason is not None and step < stop_at:
            checkpoints.wait()
            raise Stopped(f"{reason}: stopped after step {step}, saved.")
    checkpoints.wait()
    return state
