"""A job: model, optimizer, mesh and layout of one configuration, resolved before anything compiles.

Everything here works on abstract shapes. What the training step, the checkpoint and the commands need to know of where
an array lies they ask the job's layout; nobody computes it again.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import Config
from jaxlm.in_flight import InFlight
from jaxlm.models import build_model
from jaxlm.models.padding import PADDABLE, padded_sizes
from jaxlm.optimizers import make_optimizer
from jaxlm.train_step import initial_counters
from partitioning import (Machine, filled, links, make_mesh, multiples, read_table, resolve, resolve_sizes, trimmed,
                          trimmed_abstract)
from partitioning.declaration import DeclarationError
from partitioning.machine import check_within_host, notes
from partitioning.pipeline import note
from partitioning.schedules import Table
from partitioning.tables import read_axes


@dataclasses.dataclass(frozen=True)
class Job:
    """What a configuration means on a number of devices. `layout` is bound to a mesh once `on_devices` has been called;
    `table` is the schedule of a pipeline, if there is one."""

    config: Config
    model: Any
    optimizer: Any
    layout: Any
    machine: Machine | None = None
    table: Table | None = None

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.layout.mesh

    def on_devices(self, devices=None) -> "Job":
        """This job on real devices (all of them by default)."""
        return dataclasses.replace(self, layout=self.layout.on(make_mesh(self.layout.sizes, devices, self.machine)))

    def links(self) -> dict[str, str] | None:
        """What connects the devices along each axis, where the machine is known."""
        return None if self.machine is None else links(self.layout.sizes, self.machine)

    def shardings(self) -> dict[str, Any]:
        """The state's shardings, in the form of the state."""
        place = self.layout.sharding

        def place_all(specs):
            return jax.tree.map(place, specs, is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec))

        counters = jax.eval_shape(lambda: initial_counters(self.config))
        replicated = place(jax.sharding.PartitionSpec())
        return {
            "params": place_all(self.layout.params),
            "optimizer": place_all(self.layout.optimizer),
            "counters": jax.tree.map(lambda _: replicated, counters),
        }

    def initialise(self) -> dict[str, Any]:
        """The state at step 0 on the devices, the same bits under any mesh."""
        # Run once, so compiled lightly: the random numbers' unrolled rounds otherwise cost the compiler two seconds.
        options = {"xla_backend_optimization_level": 1}
        make = jax.jit(self.initial_state, out_shardings=self.shardings(), compiler_options=options)
        return InFlight().add(make(jax.random.key(self.config.train.seed)))

    def set_counters(self, state: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """The state with some counters replaced or added, on every device."""
        like, places = jax.eval_shape(lambda: initial_counters(self.config)), self.shardings()["counters"]
        new = {name: jax.device_put(np.asarray(value, like[name].dtype), places[name]) for name, value in values.items()}
        return {**state, "counters": {**state["counters"], **new}}

    def initial_state(self, key: jax.Array) -> dict[str, Any]:
        """The state at step 0; traceable."""
        params = self.model.init(key)
        return {"params": params, "optimizer": self.optimizer.init(params), "counters": initial_counters(self.config)}

    def abstract_state(self) -> dict[str, Any]:
        """ShapeDtypeStructs of the state with the job's shardings."""
        shapes = jax.eval_shape(self.initial_state, jax.random.key(0))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings())

    def abstract_saved(self) -> dict[str, Any]:
        """ShapeDtypeStructs of the state as a checkpoint holds it: without padding."""
        return trimmed_abstract(self.abstract_state(), self.layout)

    def to_saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state, or some groups of it, as a checkpoint holds it."""
        return trimmed(state, self.layout)

    def from_saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `to_saved`."""
        return filled(state, self.layout)

    def batch_shardings(self) -> dict[str, Any]:
        """Where the arrays of a batch lie."""
        by_token = self.layout.sharding(self.layout.activation(("batch", "length")))
        by_example = self.layout.sharding(self.layout.activation(("batch",)))
        return {**{name: by_token for name in self._by_token()}, "example": by_example}

    def _by_token(self) -> dict[str, Any]:
        """The arrays of a batch that have a number for each token, and their dtypes."""
        packed = {"positions": jnp.int32, "segment_ids": jnp.int32} if self.config.data.pack == "best_fit" else {}
        return {"inputs": jnp.int32, "targets": jnp.int32, "mask": jnp.bool_, **packed}

    def abstract_batch(self) -> dict[str, Any]:
        """ShapeDtypeStructs of a training batch."""
        shape = (self.config.train.global_batch_size, self.config.data.sequence_length)
        forms = {**{name: (shape, dtype) for name, dtype in self._by_token().items()}, "example": (shape[:1], jnp.int32)}
        return {name: jax.ShapeDtypeStruct(*forms[name], sharding=sharding) for name, sharding in self.batch_shardings().items()}


def build_job(config: Config, num_devices: int, machine: Machine | None = None) -> Job:
    """Resolves a configuration for a number of devices, which need not exist, or for a machine that has them.

    Raises:
      DeclarationError: the mesh, the rules or the model do not fit each other.
    """
    try:
        sizes = resolve_sizes(config.mesh, num_devices)
    except DeclarationError as error:
        raise DeclarationError(f"{error} (--simulate_devices=N tries a mesh on a CPU.)") from None
    axes = read_axes(config.sharding.within_host, "config.sharding.within_host")
    if machine is not None:
        check_within_host(axes, sizes, machine)
    build = functools.partial(
        build_model,
        config.model,
        param_dtype=config.precision.params,
        compute_dtype=config.precision.compute,
        gradient_dtype=config.precision.gradients,
        remat=config.train.remat,
        attention_backend=config.kernels.attention,
        cross_entropy_form=config.kernels.cross_entropy,
        interpret=config.kernels.interpret,
    )
    model = build()
    if config.sharding.pad:
        needed = multiples(sizes, config.sharding, model.specs, PADDABLE)
        model = build(padding=padded_sizes(config.model, config.sharding.pad, needed))
    optimizer = make_optimizer(config.optimizer, config.precision, config.train.steps, model.specs)
    table = read_table(config.pipeline, sizes["pipe"], config.model.num_layers)
    pieces = config.train.gradient_accumulation * (1 if table is None else table.num_microbatches)
    if config.train.global_batch_size % pieces:
        rows = config.train.global_batch_size
        near = ", ".join(str(n) for n in sorted({max(rows // pieces, 1) * pieces, (rows // pieces + 1) * pieces}))
        numbers = [n for n in range(1, rows + 1) if rows % (n * config.train.gradient_accumulation) == 0]
        raise DeclarationError(
            f"config.train.global_batch_size = {rows} is not a multiple of {pieces}: gradient_accumulation = "
            f"{config.train.gradient_accumulation} times {table.num_microbatches} microbatches of the pipeline. Batch sizes that "
            f"are: {near}. For this batch config.pipeline.num_microbatches may be {', '.join(map(str, numbers[:12]))}.")
    microbatch = config.train.global_batch_size // pieces
    activations = model.activations(microbatch, config.data.sequence_length)
    layout = resolve(sizes, config.sharding, model.specs, optimizer.specs, activations, PADDABLE, _keys(config, pieces))
    said = (*([] if machine is None else notes(sizes, machine)), *([] if table is None else [note(config.pipeline, table)]))
    layout = dataclasses.replace(layout, notes=(*layout.notes, *said))
    return Job(config, model, optimizer, layout, machine, table)


def _keys(config: Config, pieces: int) -> dict[str, tuple[str, int]]:
    """For messages: the key that the size of a dim comes from, and its value for a size of 1."""
    return {
        "batch": ("config.train.global_batch_size", pieces),
        "length": ("config.data.sequence_length", 1),
        "stream_length": ("config.data.sequence_length", 1),
        "vocab": ("config.model.vocab_size", 1),
        "embed": ("config.model.embed_dim", 1),
        "mlp": ("config.model.mlp_dim", 1),
        "heads": ("config.model.num_heads", 1),
        "kv_heads": ("config.model.num_kv_heads", 1),
        "layers": ("config.model.num_layers", 1),
    }
