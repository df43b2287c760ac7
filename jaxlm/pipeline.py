"""The training step's gradients through a pipeline: the model's parts handed to `partitioning.executor`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.config import Config
from jaxlm.models.transformer import STREAM
from partitioning import Stages, pipelined


def pipeline_gradients(config: Config, model: Any, layout: Any, table: Any) -> Callable:
    """A function (params, microbatches, weight, key) -> (loss sum, gradients), of a batch that is cut into
    [table.num_microbatches, B, ...] arrays.

    `weight` multiplies the sums of a microbatch, so that they add up to the objective of the whole batch; `key` is the step's key
    for dropout, or None. Gradients are added up in `precision.gradients`.
    """
    dtype = jnp.dtype(config.precision.gradients)

    def dropout(microbatch):
        return (microbatch["key"], microbatch["example"]) if "key" in microbatch else None

    def leave(ends, x_BLD, microbatch):
        sums = model.sums(ends, x_BLD, microbatch, z_loss=config.optimizer.z_loss, shard=layout)
        return (sums.loss + sums.z_loss) * microbatch["weight"], sums.loss

    stages = Stages(
        enter=lambda ends, microbatch: model.enter(ends, microbatch, dropout(microbatch), layout),
        blocks=lambda layers, along, x, microbatch: model.blocks(layers, along, x, microbatch, dropout(microbatch), layout),
        leave=leave,
        keep_x=lambda x: layout.constrain(x, STREAM),
        keep_ends=layout.keep_gradients,
        keep_layers=lambda layers: layout.keep_gradients(layers, "layers"),
    )
    run = pipelined(table, layout.mesh, stages, dtype, config.pipeline.residuals)

    def gradients(params, microbatches, weight, key):
        many = (table.num_microbatches,)
        microbatches = {**microbatches, "weight": jnp.broadcast_to(weight, many)}
        if key is not None:
            microbatches["key"] = jnp.broadcast_to(key, many)
        ends = {name: part for name, part in params.items() if name != "layers"}
        loss, of_ends, of_layers = run(ends, params["layers"], model.along_layers(), microbatches)
        return loss, jax.tree.map(lambda p, g: g.astype(dtype), params, {**of_ends, "layers": of_layers})

    return gradients
