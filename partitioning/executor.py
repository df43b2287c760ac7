"""The executor of pipeline schedules: one program for any table that `schedules` has checked.

The stages lie along the mesh axis `pipe`. A `jax.shard_map` that is manual over that axis alone runs a scan over the table's
ticks; in each tick a stage does the work that the table gives it, one `lax.switch` for each piece, and then all stages exchange
results with their neighbours, outside of the switches. Inside a stage the other axes go on through the compiler: data, fsdp and
tensor sharding, rematerialisation and accumulation are those of a model without a pipeline.

A forward keeps nothing but the stage's input; a backward computes the stage again and goes back through it. What is live is so
the inputs of the microbatches that the table has live, in as many slots as that takes, however many microbatches there are.

The model gives three functions (`Stages`) and is not known otherwise.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from partitioning.schedules.arrays import ACTIVATION, CODES, FROM_NEXT, FROM_PREVIOUS, GRADIENT, Plan, plan
from partitioning.schedules.table import BACKWARD, FORWARD, INPUT, NEXT, PREVIOUS, WEIGHT, Table

AXIS = "pipe"


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model cut into stages, as pure functions that can be traced and differentiated.

    Attributes:
      enter: (ends, microbatch) -> x, the array that goes through the pipeline.
      blocks: (layers, along, x, microbatch) -> x, some consecutive layers.
      leave: (ends, x, microbatch) -> (objective, sums): what is minimised, a scalar, and a pytree of scalars to add up.
      keep_x, keep_ends, keep_layers: constraints on the layout of an `x`, and of gradients of the form of `ends` and of
        `layers`. All branches of a switch must lay their results out alike.
    """
    enter: Callable[[Any, Any], jax.Array]
    blocks: Callable[[Any, Any, jax.Array, Any], jax.Array]
    leave: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
    keep_x: Callable[[jax.Array], jax.Array]
    keep_ends: Callable[[Any], Any]
    keep_layers: Callable[[Any], Any]


def pipelined(table: Table, mesh: Mesh, stages: Stages, dtype: Any) -> Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]:
    """The loss and the gradients of a batch that goes through a pipeline.

    Args:
      table: a schedule that `check` has passed, for as many stages as the mesh has.
      mesh: with an axis `pipe`.
      stages: the model.
      dtype: in which gradients are added up and returned.

    Returns:
      A function of (ends, layers, along, microbatches): the parameters before and after the layers; those of the layers and other
      facts of each layer, stacked along a leading dim that is split over the stages; arrays [microbatches, ...]. It gives
      (sums over the microbatches, gradients of ends, gradients of layers).
    """
    order = _layer_order(table)
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    body = _Body(table, plan(table), stages, jnp.dtype(dtype))
    run = jax.shard_map(body, mesh=mesh, axis_names={AXIS}, check_vma=False,
                        in_specs=(split, whole, split, split, whole), out_specs=(whole, whole, split))

    def loss_and_gradients(ends, layers, along, microbatches):
        layers, along = (jax.tree.map(lambda x: _permuted(x, order), tree) for tree in (layers, along))
        sums, of_ends, of_layers = run(body.rows, ends, layers, along, microbatches)
        back = None if order is None else np.argsort(order)
        return sums, of_ends, jax.tree.map(lambda x: _permuted(x, back), of_layers)

    return loss_and_gradients


def _layer_order(table: Table) -> np.ndarray | None:
    """The positions in the order in which the stages hold them, chunk by chunk; None where that is their own order."""
    order = np.array([row[stage] for stage in range(table.num_stages) for row in table.placement])
    return None if np.array_equal(order, np.arange(order.size)) else order


def _permuted(x: jax.Array, order: np.ndarray | None) -> jax.Array:
    """Equal parts of the leading dim in another order."""
    if order is None:
        return x
    return jnp.take(x.reshape(order.size, x.shape[0] // order.size, *x.shape[1:]), order, axis=0).reshape(x.shape)


class _Body:
    """What every stage runs. `rows` are the table's arrays, [stage, tick, ...]."""

    def __init__(self, table: Table, arrays: Plan, stages: Stages, dtype: Any):
        self.table, self.plan, self.stages, self.dtype = table, arrays, stages, dtype
        self.last = table.num_positions - 1
        pieces = zip(arrays.kind.ravel().tolist(), arrays.position.ravel().tolist(), strict=True)
        # What a branch does differs with the kind of work and, at the model's ends, with the position.
        self.variants = sorted({self._variant(kind, position) for kind, position in pieces})
        number = {variant: i for i, variant in enumerate(self.variants)}
        branch = np.vectorize(lambda kind, position: number[self._variant(kind, position)], otypes=[np.int32])
        rows = {field.name: getattr(arrays, field.name) for field in dataclasses.fields(arrays)
                if isinstance(getattr(arrays, field.name), np.ndarray)}
        rows["branch"] = branch(arrays.kind, arrays.position)
        self.rows = {name: jnp.asarray(np.moveaxis(row, 1, 0)) for name, row in rows.items()}

    def _variant(self, kind: int, position: int) -> tuple[int, bool, bool]:
        return (kind, position == 0, position == self.last) if kind else (0, False, False)

    def __call__(self, rows, ends, layers, along, microbatches):
        rows = {name: row[0] for name, row in rows.items()}                        # of this stage
        number = jax.tree.leaves(layers)[0].shape[0] // self.table.num_chunks     # layers to a position
        self.chunk_of = lambda tree, chunk: jax.tree.map(
            lambda x: x if self.table.num_chunks == 1 else jax.lax.dynamic_slice_in_dim(x, chunk * number, number), tree)
        x = jax.eval_shape(self.stages.enter, ends, jax.tree.map(lambda a: a[0], microbatches))
        sums = jax.eval_shape(lambda *a: self.stages.leave(*a)[1], ends, x, jax.tree.map(lambda a: a[0], microbatches))

        def buffer(slots: int):
            # One slot more, for what nobody will read. [slots, ...x]
            return jnp.zeros((slots + 1, *x.shape), x.dtype)

        def zeros(tree):
            return jax.tree.map(lambda p: jnp.zeros(p.shape, self.dtype), tree)

        slots = self.plan.slots
        keep_x = jax.vmap(self.stages.keep_x)
        carry = {
            "activations": keep_x(buffer(slots.activations)), "gradients": keep_x(buffer(slots.gradients)),
            "residuals": keep_x(buffer(slots.residuals)), "cotangents": keep_x(buffer(slots.cotangents)),
            "outbox": (jnp.zeros(x.shape, x.dtype),) * 2,
            "totals": (jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums), self.stages.keep_ends(zeros(ends)),
                       self.stages.keep_layers(zeros(layers))),
        }

        def tick(carry, row):
            arriving = carry["outbox"]
            outbox = [self.stages.keep_x(jnp.zeros(x.shape, x.dtype))] * 2
            for i in range(self.table.width):
                carry, outbox = self._piece(carry, outbox, {name: value[i] for name, value in row.items()
                                                            if name not in ("arrival", "arrival_slot")},
                                            ends, layers, along, microbatches)
            if self.table.latency == 1:
                arriving = outbox
            carry = self._exchange(carry, arriving, row)
            return {**carry, "outbox": tuple(outbox)}, None

        carry, _ = jax.lax.scan(tick, carry, rows)
        sums, of_ends, of_layers = carry["totals"]
        return *jax.lax.psum((sums, of_ends), AXIS), of_layers

    def _piece(self, carry, outbox, row, ends, layers, along, microbatches):
        """One piece of work: reads its slots, does it, and writes what it gives into slots and outboxes."""
        slots, kind = self.plan.slots, row["kind"]
        forward = kind == CODES[FORWARD]
        goes_back = (kind == CODES[BACKWARD]) | (kind == CODES[INPUT])
        taken = jax.lax.dynamic_index_in_dim(carry["activations"], _or_last(row["take"], forward, slots.activations), keepdims=False)
        held = jax.lax.dynamic_index_in_dim(carry["residuals"], _or_last(row["residual"], kind > 0, slots.residuals), keepdims=False)
        gradient = jnp.where(
            kind == CODES[WEIGHT],
            jax.lax.dynamic_index_in_dim(carry["cotangents"], _or_last(row["cotangent"], kind > 0, slots.cotangents), keepdims=False),
            jax.lax.dynamic_index_in_dim(carry["gradients"], _or_last(row["take"], goes_back, slots.gradients), keepdims=False))
        microbatch = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, jnp.maximum(row["microbatch"], 0), keepdims=False),
                                  microbatches)
        chunk = jnp.maximum(row["chunk"], 0)
        x = self.stages.keep_x(jnp.where(forward, taken, held))
        value, totals = jax.lax.switch(row["branch"], [self._branch(*variant) for variant in self.variants], carry["totals"], x,
                                       self.stages.keep_x(gradient), (ends, layers, along, microbatch, chunk))
        kept = row["keep"] >= 0
        carry = {
            **carry, "totals": totals,
            "residuals": _written(carry["residuals"], x, _or_last(row["residual"], forward, slots.residuals)),
            "cotangents": _written(carry["cotangents"], gradient, _or_last(row["cotangent"], kind == CODES[INPUT], slots.cotangents)),
            "activations": _written(carry["activations"], value, _or_last(row["keep"], kept & forward, slots.activations)),
            "gradients": _written(carry["gradients"], value, _or_last(row["keep"], kept & goes_back, slots.gradients)),
        }
        return carry, [jnp.where(row["send"] == step, value, out) for step, out in zip((NEXT, PREVIOUS), outbox, strict=True)]

    def _exchange(self, carry, arriving, row):
        """Sends what lies in the two outboxes to the neighbours, and puts what comes where the table says."""
        came = {FROM_PREVIOUS: jax.lax.ppermute(arriving[0], AXIS, self.plan.to_next),
                FROM_NEXT: jax.lax.ppermute(arriving[1], AXIS, self.plan.to_previous)}
        for side, value in came.items():
            what, slot = row["arrival"][side], row["arrival_slot"][side]
            for name, kind in (("activations", ACTIVATION), ("gradients", GRADIENT)):
                spare = getattr(self.plan.slots, name)
                carry = {**carry, name: _written(carry[name], value, _or_last(slot, what == kind, spare))}
        return carry

    def _branch(self, kind: int, first: bool, last: bool) -> Callable:
        """A function (totals, x, gradient, operands) -> (what goes on, totals) for one kind of work at one kind of position."""
        stages = self.stages

        def ended(x, totals):
            sums, of_ends, of_layers = totals
            return stages.keep_x(x), (sums, stages.keep_ends(of_ends), stages.keep_layers(of_layers))

        def nothing(totals, x, gradient, operands):
            return ended(jnp.zeros_like(x), totals)

        def forward(totals, x, gradient, operands):
            ends, layers, along, microbatch, chunk = operands
            if first:
                x = stages.enter(ends, microbatch)
            return ended(stages.blocks(self.chunk_of(layers, chunk), self.chunk_of(along, chunk), x, microbatch), totals)

        def backward(totals, x, gradient, operands):
            ends, layers, along, microbatch, chunk = operands
            own, facts = self.chunk_of(layers, chunk), self.chunk_of(along, chunk)

            def through(ends, own, x):
                if first:
                    x = stages.enter(ends, microbatch)
                x = stages.blocks(own, facts, x, microbatch)
                return stages.leave(ends, x, microbatch) if last else (x, ())

            # Which of the three inputs this piece differentiates by; the compiler leaves out what the others would take.
            of_x = kind != CODES[WEIGHT] and not first
            of_weights = kind != CODES[INPUT]
            wanted = ((ends,) if of_weights and (first or last) else ()) + ((own,) if of_weights else ()) + ((x,) if of_x else ())
            if not wanted:                                             # the input half of the first position
                return ended(jnp.zeros_like(x), totals)

            def function(*wanted):
                rest = list(wanted)
                e = rest.pop(0) if of_weights and (first or last) else ends
                o = rest.pop(0) if of_weights else own
                return through(e, o, rest.pop(0) if of_x else x)

            out, pull, sums = jax.vjp(function, *wanted, has_aux=True)
            found = list(pull(jnp.ones_like(out) if last else gradient))
            total, of_ends, of_layers = totals
            if of_weights and (first or last):
                of_ends = jax.tree.map(lambda a, g: a + g.astype(a.dtype), of_ends, found.pop(0))
            if of_weights:
                of_layers = self._add(of_layers, found.pop(0), chunk)
                if last:                                               # once for each microbatch
                    total = jax.tree.map(jnp.add, total, sums)
            return ended(found.pop(0) if of_x else jnp.zeros_like(x), (total, of_ends, of_layers))

        if not kind or (kind == CODES[FORWARD] and last):               # the last position's forward is part of its backward
            return nothing
        return forward if kind == CODES[FORWARD] else backward

    def _add(self, total, found, chunk):
        """The gradients of one chunk added to those of all."""
        if self.table.num_chunks == 1:
            return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, found)

        def one(a, g):
            start = chunk * g.shape[0]
            return jax.lax.dynamic_update_slice_in_dim(a, jax.lax.dynamic_slice_in_dim(a, start, g.shape[0]) + g.astype(a.dtype), start, 0)

        return jax.tree.map(one, total, found)


def _or_last(slot: jax.Array, applies: jax.Array, count: int) -> jax.Array:
    """The slot, or the one beyond the `count` that are used."""
    return jnp.where(applies & (slot >= 0), slot, count)


def _written(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, value, slot, 0)
