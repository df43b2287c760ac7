"""One training step: loss and gradients over the microbatches of a batch, then the optimizer's update.

The state is one pytree of plain nested dicts, in exactly the form that a checkpoint has on disk:

    params/<path>    optimizer/<slot>/<path>    counters/{step, updates, skipped, ...}

`step` counts batches, `updates` the updates that were applied; they differ where an update was skipped. `faults.py` and
`optimizers/loss_scale.py` have the other counters.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm import faults
from jaxlm.config import Config
from jaxlm.optimizers import loss_scale
from jaxlm.pipeline import pipeline_gradients


SCALING = ("loss_scale", "good_steps")         # counters that only a run with a loss scale has


def initial_counters(config: Config) -> dict[str, jax.Array]:
    """The counters at step 0."""
    counters = {**{name: jnp.zeros((), jnp.int32) for name in ("step", "updates", "skipped")}, **faults.initial_counters()}
    if config.precision.scales_loss:
        scale = loss_scale.init(config.precision)
        counters |= dict(zip(SCALING, (scale["scale"], scale["good_steps"]), strict=True))
    return counters


def split_microbatches(batch: dict[str, jax.Array], count: int) -> dict[str, jax.Array]:
    """[B, ...] to [count, B / count, ...]: microbatch i takes every count-th example, so that each device keeps its own."""
    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)
    return {name: split(x) for name, x in batch.items()}


def loss_and_gradients(objective: Callable, params: Any, batch: dict[str, jax.Array], *, accumulation: int, dtype: Any):
    """Sums of an objective and of its gradients over the microbatches of a batch.

    Args:
      objective: (params, microbatch) -> (scalar, sums to add up). It divides by the target count of the whole batch, so
        that microbatches with different numbers of targets add up to the large batch exactly.
      batch: arrays [B, ...].
      accumulation: microbatches, a divisor of B.
      dtype: in which the gradients are returned and added up.

    Returns:
      (sums, gradients).
    """
    differentiate = jax.value_and_grad(objective, has_aux=True)

    def of(microbatch):
        (_, sums), gradients = differentiate(params, microbatch)
        return sums, jax.tree.map(lambda g: g.astype(dtype), gradients)

    return added_up(of, batch, accumulation)


def added_up(of: Callable, batch: dict[str, jax.Array], accumulation: int) -> Any:
    """The sum of `of(microbatch)`, a pytree of arrays, over the microbatches of a batch, one after the other."""
    if accumulation == 1:
        return of(batch)

    def body(total, microbatch):
        return jax.tree.map(jnp.add, total, of(microbatch)), None

    microbatches = split_microbatches(batch, accumulation)
    shapes = jax.eval_shape(of, jax.tree.map(lambda x: x[0], microbatches))
    total, _ = jax.lax.scan(body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), microbatches)
    return total


def make_train_step(config: Config, model: Any, optimizer: Any, layout: Any, table: Any = None) -> Callable:
    """The function (state, batch) -> (state, metrics) that the loop compiles, with the state donated. `table`: the schedule of a
    pipeline, or None.

    metrics: scalars loss (mean over the batch's targets, nats), grad_norm, learning_rate, targets, and the counters.
    """
    gradient_dtype = jnp.dtype(config.precision.gradients)
    through_pipeline = None if table is None else pipeline_gradients(config, model, layout, table)

    def train_step(state, batch):
        params, counters = state["params"], state["counters"]
        targets = jnp.sum(batch["mask"].astype(jnp.float32))
        scale = counters["loss_scale"] if config.precision.scales_loss else 1.0
        weight = scale / jnp.maximum(targets, 1)
        key = jax.random.fold_in(jax.random.key(config.train.seed), counters["step"]) if config.model.dropout else None

        def objective(params, microbatch):
            dropout = None if key is None else (key, microbatch["example"])
            sums = model.loss(params, microbatch, dropout=dropout, z_loss=config.optimizer.z_loss, shard=layout)
            return (sums.loss + sums.z_loss) * weight, sums.loss

        accumulation = config.train.gradient_accumulation
        if through_pipeline is None:
            loss_sum, gradients = loss_and_gradients(objective, params, batch, accumulation=accumulation, dtype=gradient_dtype)
        else:
            def of(part):
                return through_pipeline(params, split_microbatches(part, table.num_microbatches), weight, key)

            loss_sum, gradients = added_up(of, batch, accumulation)
        if config.precision.scales_loss:
            gradients = loss_scale.unscale(gradients, scale)
        loss = loss_sum / jnp.maximum(targets, 1)
        step = counters["step"] + 1

        def accept(grad_norm):
            return faults.is_fine(config.faults, counters, loss, grad_norm)

        new_params, new_slots, facts = optimizer.update(gradients, state["optimizer"], params, step=counters["step"],
                                                        updates=counters["updates"], accept=accept)
        applied = facts.pop("applied")
        # Under loss scaling an overflow is expected, as long as the scale can still fall.
        excused = scale > loss_scale.SMALLEST if config.precision.scales_loss else False
        new_counters = {**counters, "step": step, "updates": counters["updates"] + applied,
                        "skipped": counters["skipped"] + ~applied,
                        **faults.counted(config.faults, counters, loss, facts["grad_norm"], excused)}
        if config.precision.scales_loss:
            adjusted = loss_scale.adjust({"scale": scale, "good_steps": counters["good_steps"]}, applied, config.precision)
            new_counters |= {"loss_scale": adjusted["scale"], "good_steps": adjusted["good_steps"]}
        metrics = {"loss": loss, "targets": targets, **facts, **{k: new_counters[k] for k in new_counters if k != "updates"}}
        return {"params": new_params, "optimizer": new_slots, "counters": new_counters}, metrics

    return train_step
