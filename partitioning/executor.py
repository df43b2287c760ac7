"""The executor of pipeline schedules: one program for any table that `schedules` has checked.

The stages lie along the mesh axis `pipe`. A `jax.shard_map` that is manual over that axis alone runs a scan over the table's
ticks; in each tick a stage does the work that the table gives it, one `lax.switch` for each piece, and then all stages exchange
results with their neighbours, outside of the switches. Inside a stage the other axes go on through the compiler: data, fsdp and
tensor sharding, rematerialisation and accumulation are those of a model without a pipeline.

What a forward leaves for its backward lies in ring buffers with as many slots as the table has microbatches live, however many
microbatches there are. It is one of two things (`RESIDUALS`):

    recompute   the input of the position; its backward computes the position again
    saved       what JAX's vjp of the layers keeps, by their own rematerialisation, without the weights themselves

The head belongs to the last position's backward, and so do the sums; where that recomputes, the forward does nothing at all.
The first position's embedding is computed again where its gradient is made, for a lookup costs nothing.

A backward that a schedule splits is split for good (`halves`): the input half leaves what the weight half needs of it, one input
and one gradient for each matmul, and nothing is done twice.

The model gives three functions (`Stages`) and is not known otherwise.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from partitioning.collectives import read_collectives
from partitioning.declaration import DeclarationError
from partitioning.halves import Halves
from partitioning.pipeline import RESIDUALS
from partitioning.redistribution import rounds, to_positions, to_rest
from partitioning.schedules.arrays import ACTIVATION, FROM_NEXT, FROM_PREVIOUS, GRADIENT, Plan, plan
from partitioning.schedules.table import BACKWARD, FORWARD, INPUT, NEXT, PREVIOUS, WEIGHT, Table

AXIS = "pipe"


def check_compiled(hlo: str, sizes: Mapping[str, int]) -> None:
    """Goes over the compiled program of a pipeline for what could wait for ever.

    Stages take different branches, so all that moves inside of one must move within the stage; and a permute waits for every
    device of the mesh, wherever it moves. The compiler makes permutes for slices, rolls and concatenations along a dim that is
    sharded.

    Args:
      hlo: `compiled.as_text()`.
      sizes: of the mesh.

    Raises:
      DeclarationError: there is such a thing; the message names the operation.
    """
    found = [one for one in read_collectives(hlo, sizes) if one.branch and (one.kind == "collective-permute" or AXIS in one.axes)]
    if found:
        one = found[0]
        raise DeclarationError(
            f"this pipeline would wait for ever: inside a stage's work the compiler has put {len(found)} exchange(s) that all "
            f"stages would have to meet at, the first a {one.kind} of {one.dtype} {list(one.shape)} for {one.source!r}. They "
            "come from a dim that is sharded and then cut at another place. Change the rules for that dim (config.sharding, "
            "above all those of activations, such as stream_length), or train without a pipeline (config.mesh.pipe=1).")


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


def pipelined(table: Table, mesh: Mesh, stages: Stages, dtype: Any,
              residuals: str = "recompute") -> Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]:
    """The loss and the gradients of a batch that goes through a pipeline.

    Args:
      table: a schedule that `check` has passed, for as many stages as the mesh has.
      mesh: with an axis `pipe`.
      stages: the model.
      dtype: in which gradients are added up and returned.
      residuals: one of RESIDUALS.

    Returns:
      A function of (ends, layers, along, microbatches): the parameters before and after the layers; those of the layers and other
      facts of each layer, stacked along a leading dim that is split over the stages; arrays [microbatches, ...]. It gives
      (sums over the microbatches, gradients of ends, gradients of layers).
    """
    if residuals not in RESIDUALS:
        raise ValueError(f"residuals = {residuals!r}; expected one of {', '.join(RESIDUALS)}.")
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    body = _Body(table, stages, jnp.dtype(dtype), residuals == "saved")
    run = jax.shard_map(body, mesh=mesh, axis_names={AXIS}, check_vma=False,
                        in_specs=(split, whole, split, split, whole), out_specs=(whole, whole, split))
    return functools.partial(run, body.rows)


@dataclasses.dataclass(frozen=True, order=True)
class _Place:
    """What distinguishes the branches of a lane's switch: where the work is done, if any is.

    Attributes:
      busy: whether there is work at all.
      first, last: whether it is at the model's first or last position.
    """
    busy: bool = False
    first: bool = False
    last: bool = False


@dataclasses.dataclass(frozen=True)
class _Operands:
    """What the work of all ticks reads: `pipelined` says what each is. `layers` and `along` are this stage's."""
    ends: Any
    layers: Any
    along: Any
    microbatches: Any


class _Body:
    """What every stage runs. `rows` are the table's arrays, [stage, tick, ...].

    A buffer that a branch writes is read in no other branch of its switch: XLA then writes it in place, and copies nothing.
    """

    def __init__(self, table: Table, stages: Stages, dtype: Any, saved: bool):
        self.table, self.stages, self.dtype, self.saved = table, stages, dtype, saved
        self.splits = any(entry.work.kind == INPUT for entry in table.entries())
        # Where the last position's forward computes its output, the head finds it there.
        self.keeps_outputs = saved or self.splits
        self.plan = arrays = plan(table, keep_outputs=self.keeps_outputs)
        self.rounds = rounds(table)
        places = np.vectorize(self._place, otypes=[object])(arrays.kind, arrays.position)
        self.places = [sorted(set(places[:, :, lane].ravel())) for lane in range(len(arrays.lanes))]
        rows = {field.name: getattr(arrays, field.name) for field in dataclasses.fields(Plan)
                if isinstance(getattr(arrays, field.name), np.ndarray)}
        rows["branch"] = np.stack([np.vectorize(known.index, otypes=[np.int32])(places[:, :, lane])
                                   for lane, known in enumerate(self.places)], axis=-1)
        self.rows = {name: jnp.asarray(np.moveaxis(row, 1, 0)) for name, row in rows.items()}

    def _place(self, kind: int, position: int) -> _Place:
        return _Place(True, position == 0, position == self.table.num_positions - 1) if kind else _Place()

    def __call__(self, rows, ends, layers, along, microbatches):
        rows = {name: row[0] for name, row in rows.items()}                        # of this stage
        layers, along = to_positions((layers, along), self.rounds, AXIS)
        operands = _Operands(ends, layers, along, microbatches)
        carry = self._empty(operands)

        def tick(carry, row):
            carry = dict(carry)
            arriving = carry.pop("outbox", None)
            carry, outbox = self._work(carry, row, operands)
            carry = self._exchange(carry, outbox if arriving is None else arriving, row)
            return (carry if arriving is None else {**carry, "outbox": outbox}), None

        carry, _ = jax.lax.scan(tick, carry, rows)
        sums, of_ends, of_layers = carry["totals"]
        return *over_stages(sums, of_ends), to_rest(of_layers, self.rounds, AXIS)

    # The state of a stage.

    def _empty(self, operands: _Operands) -> dict[str, Any]:
        """All buffers, and the totals, before the first tick."""
        ends, own, facts, microbatch = self._read(operands, {"microbatch": 0, "chunk": 0})
        self.x = jax.eval_shape(self.stages.enter, ends, microbatch)
        sums = jax.eval_shape(lambda *a: self.stages.leave(*a)[1], ends, self.x, microbatch)
        left = jax.eval_shape(lambda *a: self._forward(*a)[1], own, facts, self.x, microbatch)
        again = own, facts, left, microbatch
        halves = jax.eval_shape(lambda *a: self._halves(*a).first(*a)[1], again, self.x) if self.splits else ()
        slots = self.plan.slots

        def zeros(tree, *leading, dtype=None):
            return jax.tree.map(lambda p: jnp.zeros((*leading, *p.shape), dtype or p.dtype), tree)

        carry = {
            # One slot more of what arrives, for what nobody will read.
            "activations": zeros(self.x, slots.activations + 1), "gradients": zeros(self.x, slots.gradients + 1),
            "residuals": zeros(left, slots.residuals), "cotangents": zeros(halves, slots.cotangents),
            "totals": (zeros(sums), zeros(operands.ends, dtype=self.dtype), zeros(operands.layers, dtype=self.dtype)),
        }
        return self._kept(carry) | ({"outbox": (self._nothing(),) * 2} if self.table.latency == 2 else {})

    def _kept(self, carry: dict[str, Any]) -> dict[str, Any]:
        """Parts of the state, laid out as they always are."""
        def keep(name, part):
            if name == "totals":
                sums, of_ends, of_layers = part
                return sums, self.stages.keep_ends(of_ends), self.stages.keep_layers(of_layers)
            if name == "cotangents" or (name == "residuals" and self.saved):       # the compiler's to say
                return part
            return jax.vmap(self.stages.keep_x)(part) if part.shape[0] else part

        return {name: keep(name, part) for name, part in carry.items()}

    def _nothing(self) -> jax.Array:
        return self.stages.keep_x(jnp.zeros(self.x.shape, self.x.dtype))

    # One tick.

    def _work(self, carry, row, operands):
        """Does the pieces of a tick in order. Returns the state, and what goes to the next stage and to the previous one."""
        outbox = [self._nothing()] * 2
        for lane, kind in enumerate(self.plan.lanes):
            piece = {name: value[lane] for name, value in row.items() if name not in ("arrival", "arrival_slot")}
            writes = {FORWARD: ("residuals",), INPUT: ("cotangents", "totals")}.get(kind, ("totals",))
            written = {name: carry[name] for name in writes}
            branches = [self._branch(kind, place, {name: part for name, part in carry.items() if name not in writes}, operands)
                        for place in self.places[lane]]
            written, value = jax.lax.switch(piece["branch"], branches, written, piece)
            carry = {**carry, **written}
            if np.any(self.plan.keep[:, :, lane] >= 0):
                carry = self._stay(carry, kind, value, piece)
            outbox = [jnp.where(piece["send"] == step, value, out) for step, out in zip((NEXT, PREVIOUS), outbox, strict=True)]
        return carry, tuple(outbox)

    def _stay(self, carry, kind, value, piece):
        """Puts a result that another piece of this stage takes where that looks for it."""
        for name, goes in (("activations", (kind == FORWARD) & (piece["position"] < self.table.num_positions - 1)),
                           ("gradients", (kind != FORWARD) | (piece["position"] == self.table.num_positions - 1))):
            slot = jnp.where(goes & (piece["keep"] >= 0), piece["keep"], getattr(self.plan.slots, name))
            carry = {**carry, name: _written(carry[name], value, slot)}
        return carry

    def _exchange(self, carry, outbox, row):
        """Sends what lies in the two outboxes to the neighbours, and puts what comes where the table says."""
        came = {FROM_PREVIOUS: jax.lax.ppermute(outbox[0], AXIS, self.plan.to_next),
                FROM_NEXT: jax.lax.ppermute(outbox[1], AXIS, self.plan.to_previous)}
        for side, value in came.items():
            what, slot = row["arrival"][side], row["arrival_slot"][side]
            for name, kind in (("activations", ACTIVATION), ("gradients", GRADIENT)):
                if np.any(self.plan.arrival[:, :, side] == kind):
                    spare = getattr(self.plan.slots, name)
                    carry = {**carry, name: _written(carry[name], value, jnp.where(what == kind, slot, spare))}
        return carry

    def _branch(self, kind: str, place: _Place, known: dict[str, Any], operands: _Operands) -> Callable:
        """A function (parts of the state that this kind of work writes, row of a piece) -> (those parts, what goes on), for one
        kind of work. `known` are the other parts."""
        def branch(written, piece):
            value = None
            if place.busy:
                work = self._go_forward if kind == FORWARD else self._go_back
                written, value = work(kind, place, {**known, **written}, piece, operands)
            return self._kept(written), self._nothing() if value is None else self.stages.keep_x(value)

        return branch

    def _go_forward(self, kind, place, carry, piece, operands):
        ends, own, facts, microbatch = self._read(operands, piece)
        x = self.stages.enter(ends, microbatch) if place.first else _slot(carry["activations"], piece["take"])
        value, left = (None, x) if place.last and not self.keeps_outputs else self._forward(own, facts, x, microbatch)
        return {"residuals": jax.tree.map(lambda b, r: _written(b, r, piece["residual"]), carry["residuals"], left)}, value

    def _go_back(self, kind, place, carry, piece, operands):
        """A backward or one of its halves."""
        ends, own, facts, microbatch = self._read(operands, piece)
        again = own, facts, jax.tree.map(lambda b: _slot(b, piece["residual"]), carry["residuals"]), microbatch
        sums, of_ends, of_layers = carry["totals"]
        if kind == WEIGHT:
            kept = jax.tree.map(lambda b: _slot(b, piece["cotangent"]), carry["cotangents"])
            found = self._halves(again, self.x).second(again, kept)
            return {"totals": (sums, of_ends, self._layers_added(of_layers, found, piece["chunk"]))}, None
        outputs, pull = self._backward(*again) if kind == BACKWARD else (None, None)
        gradient = _slot(carry["gradients"], piece["take"]) if self.keeps_outputs or not place.last else outputs
        if place.last:
            gradient, added, found = self._head(ends, gradient, microbatch)
            sums, of_ends = jax.tree.map(jnp.add, sums, added), _added(of_ends, found)
        written = {}
        if kind == BACKWARD:
            found, value = pull(gradient)
            of_layers = self._layers_added(of_layers, found, piece["chunk"])
        else:
            value, kept = self._halves(again, self.x).first(again, gradient)
            written["cotangents"] = jax.tree.map(lambda b, r: _written(b, r, piece["cotangent"]), carry["cotangents"], kept)
        if place.first:
            _, back = jax.vjp(lambda ends: self.stages.enter(ends, microbatch), ends)
            of_ends, value = _added(of_ends, back(value)[0]), None
        return {**written, "totals": (sums, of_ends, of_layers)}, value

    # Through the layers of one position, and through the head.

    def _read(self, operands: _Operands, piece):
        """The parameters of the ends, those of a chunk's layers and their facts, and a microbatch."""
        count, chunks = jax.tree.leaves(operands.layers)[0].shape[0] // self.table.num_chunks, self.table.num_chunks

        def of_chunk(x):
            return x if chunks == 1 else jax.lax.dynamic_slice_in_dim(x, piece["chunk"] * count, count)

        microbatch = jax.tree.map(lambda a: _slot(a, piece["microbatch"]), operands.microbatches)
        return operands.ends, jax.tree.map(of_chunk, operands.layers), jax.tree.map(of_chunk, operands.along), microbatch

    def _forward(self, own, facts, x, microbatch):
        """(the position's output, what is left for its backward)."""
        if not self.saved:
            return self.stages.blocks(own, facts, x, microbatch), x
        value, pull = jax.vjp(lambda own, x: self.stages.blocks(own, facts, x, microbatch), own, x)
        return value, _residuals(pull)

    def _backward(self, own, facts, left, microbatch):
        """(the position's output where it was computed, a function from its gradient to those of the weights and of x)."""
        def blocks(own, x):
            return self.stages.blocks(own, facts, x, microbatch)

        if not self.saved:
            return jax.vjp(blocks, own, self.stages.keep_x(left))
        # Traced once more for its form alone: what would compute it anew is not used, and the compiler leaves it out.
        _, pull = jax.vjp(blocks, own, jnp.zeros(self.x.shape, self.x.dtype))
        return None, _with_residuals(pull, left)

    def _halves(self, again, gradient) -> Halves:
        """The same backward in two halves, of x and of the weights. `again` are the arguments of `_backward`."""
        def backward(again, gradient):
            of_weights, of_x = self._backward(*again)[1](gradient)
            return of_x, of_weights

        return Halves(backward, again, gradient)

    def _head(self, ends, outputs, microbatch):
        """(gradient of the last position's output, the sums, gradients of the ends)."""
        def objective(ends, x):
            return self.stages.leave(ends, x, microbatch)

        value, pull, sums = jax.vjp(objective, ends, outputs, has_aux=True)
        found, gradient = pull(jnp.ones_like(value))
        return self.stages.keep_x(gradient), sums, found

    def _layers_added(self, total, found, chunk):
        """The gradients of one chunk added to those of all."""
        if self.table.num_chunks == 1:
            return _added(total, found)

        def one(a, g):
            start = chunk * g.shape[0]
            own = jax.lax.dynamic_slice_in_dim(a, start, g.shape[0])
            return jax.lax.dynamic_update_slice_in_dim(a, own + g.astype(a.dtype), start, 0)

        return jax.tree.map(one, total, found)


def over_stages(sums: Any, of_ends: Any) -> tuple[Any, Any]:
    """What the stages found of the sums and of the gradients of the ends, added up: a table may be used at both ends."""
    return jax.lax.psum((sums, of_ends), AXIS)


def _added(total: Any, found: Any) -> Any:
    return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, found)


def _slot(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(buffer, slot, keepdims=False)


def _written(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), slot, 0)


# What a vjp of (weights, x) keeps besides its arguments: arrays, but for random keys, which are known anyway.

def _is_kept(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)


def _kept_parts(pull: Any) -> tuple[Any, ...]:
    """x, the last argument, where it is needed; and what was computed on the way."""
    return pull.args_res[-1], pull.opaque_residuals, pull.structured_residuals


def _residuals(pull: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(_kept_parts(pull)) if _is_kept(leaf)]


def _with_residuals(pull: Any, residuals: list[jax.Array]) -> Callable:
    left = iter(residuals)
    x, opaque, structured = jax.tree.map(lambda leaf: next(left) if _is_kept(leaf) else leaf, _kept_parts(pull))
    return pull.replace(args_res=[*pull.args_res[:-1], x], opaque_residuals=opaque, structured_residuals=structured)
