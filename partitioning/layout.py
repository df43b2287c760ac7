"""The layout: where every array of a training job lies, resolved once on abstract shapes.

`resolve` is the only place that turns declarations into specs. Its result is one frozen object that the model, the
optimizer, the checkpoint and the reports read. It has no mesh of real devices until `.on(mesh)` binds it to one; the
same layout can so be computed, printed and tested for thousands of devices on a laptop.

A parameter has two places. At rest it lies by the params table, spread included. In use, next to the activations of a
batch, it lies by its rules alone: an axis that splits the batch cannot split the weights that the batch meets as well.
`Layout.use` goes from the one to the other, and its backward takes the gradient to the gradients table. A program
that calls it inside the loop over layers gathers a layer's weights when the layer needs them, and reduces its gradients
as soon as they exist.
"""

import dataclasses
import math
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.array import ArraySpec
from partitioning.declaration import DeclarationError, nearest
from partitioning.mesh import AXES
from partitioning.overrides import Override, match, read_overrides, rules_of
from partitioning.padding import Padded, trimmed_placement
from partitioning.paths import flatten, join, map_paths, unflatten
from partitioning.placement import Hint, Placed, check_claims, dim_name, place, spread
from partitioning.tables import Rule, ShardingConfig, Table, declared_dims, read_axes, read_tables
from partitioning.unsharded import UNSHARDED, cast, dtypes_in_use


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of the job, as reports show it.

    Attributes:
      kind: params, gradients, optimizer or activations.
      path: the parameter's path, SLOT/path for optimizer state, the activation's name.
      shape: of the whole array, with its padding, as are `bytes`.
      spec: per dim None, an axis or a tuple of axes.
      rule: what decided, in words.
      bytes_per_device: of the block that one device holds.
      copies: how many devices hold the same block; 1 for an array that is split over all of them.
    """
    kind: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str | None, ...]
    spec: PartitionSpec
    rule: str
    bytes: int
    bytes_per_device: int
    copies: int


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter's three specs (at rest, in use, as a gradient), and whether its leading dim is `layers`."""
    stored: PartitionSpec
    used: PartitionSpec
    gradient: PartitionSpec
    stacked: bool

    def one_layer(self) -> "Weight":
        """The specs of one layer of a stacked array."""
        return Weight(*(PartitionSpec(*spec[1:]) for spec in (self.stored, self.used, self.gradient)), stacked=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where everything lies. Compared and hashed by identity, so functions that are traced may close over it.

    Attributes:
      sizes: mesh axis to its size, all six.
      params, gradients, compute: nested dicts of PartitionSpec in the form of the parameters; `compute` is how a
        parameter lies while it is used.
      optimizer: slot to nested dict of PartitionSpec.
      rows: one for each array, in the order params, gradients, optimizer, activations.
      notes: what a user should know though it is no error.
      padded: params/<path> or optimizer/<slot>/<path> to the two forms of each array that is padded.
      mesh: the devices, once bound.
    """
    sizes: Mapping[str, int]
    params: dict[str, Any]
    gradients: dict[str, Any]
    compute: dict[str, Any]
    optimizer: dict[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    padded: Mapping[str, Padded]
    activation_table: Table = dataclasses.field(repr=False)
    weights: Mapping[str, Weight] = dataclasses.field(repr=False)
    mesh: Mesh | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    def on(self, mesh: Mesh) -> "Layout":
        """This layout bound to a mesh of its sizes."""
        if dict(mesh.shape) != dict(self.sizes):
            raise ValueError(f"the layout was resolved for a mesh of {dict(self.sizes)}; this one has {dict(mesh.shape)}.")
        return dataclasses.replace(self, mesh=mesh)

    def activation(self, dims: tuple[str | None, ...]) -> PartitionSpec:
        """The spec of an activation with these logical dims.

        Raises:
          DeclarationError: a dim without a rule, or an axis that two dims claim.
        """
        name = f"an activation ({', '.join(map(str, dims))})"
        rules = _rules(name, dims, self.activation_table)
        check_claims(name, dims, rules)
        return _spec(tuple(tuple(axis for axis in rule.axes if self.sizes[axis] > 1) for rule in rules))

    def constrain(self, x: jax.Array, dims: tuple[str | None, ...]) -> jax.Array:
        """`x`, made to lie by the activations table; itself on one device.

        Args:
          x: any array inside a jitted function.
          dims: the logical name of each of its dimensions.

        Raises:
          DeclarationError: as `activation`, or a dim that its axes do not divide.
        """
        spec = self.activation(dims)
        if self._bound().size == 1:
            return x
        array = ArraySpec(x.shape, x.dtype, dims)
        place(f"an activation ({', '.join(map(str, dims))}) of shape {x.shape}", array,
              _rules("", dims, self.activation_table), self.sizes)
        return _constrain(x, self.mesh, spec)

    def stack(self, params: Any, prefix: str) -> Any:
        """Parameters stacked along `layers` on their way into the loop over the layers: themselves.

        Backward, the gradients that their table splits along `layers` come to lie so. The loop holds one layer's gradient at
        a time, and cannot split it along a dim that it does not have.
        """
        def one(path: str, x: jax.Array) -> jax.Array:
            spec = self._weight(path).gradient
            return x if spec[0] is None or self._bound().size == 1 else _stack(x, self.mesh, spec)

        return map_paths(one, params, prefix)

    def use(self, params: Any, prefix: str, dtype: Any, gradients: Any = None) -> Any:
        """Parameters as a computation needs them: in `dtype` (floats; vectors stay as they are), gathered from where they rest.

        Backward, each gradient is reduced to the gradients table's layout and then cast to its parameter's dtype. On
        one device this is the cast alone.

        A gradient has the dtype of its array, and is reduced in it: bfloat16 for a computation in bfloat16. With
        `gradients='float32'` the arrays are rounded to `dtype`, and travel so, but come out as float32, for a product
        that rounds them back (which loses nothing, and the compiler drops both casts) and computes their gradient in
        float32.

        Args:
          params: a subtree of the parameters, or one array. Of arrays that are stacked along `layers` one layer's slice.
          prefix: its path, such as 'layers' or 'embed'.
          dtype: of the computation.
          gradients: the narrowest dtype that gradients may be reduced in; None is that of the computation.
        """
        if self._bound().size == 1:
            return cast(params, dtype, gradients)

        def gather(path: str, x: jax.Array) -> jax.Array:
            weight = self._weight(path)
            if weight.stacked:
                weight = weight.one_layer()
            if x.ndim != len(weight.stored):
                slices = ", where `use` takes one layer's slice" if self._weight(path).stacked else ""
                raise ValueError(f"{path} has {x.ndim} dims here, but its spec {weight.stored} has {len(weight.stored)}{slices}. "
                                 f"Or the prefix {prefix!r} is wrong.")
            return _gather(x, self.mesh, weight, *dtypes_in_use(x, dtype, gradients), jnp.dtype(x.dtype))

        return map_paths(gather, params, prefix)

    def keep_gradients(self, gradients: Any, prefix: str = "") -> Any:
        """Gradients in the form of the parameters below `prefix`, made to lie by their table."""
        if self._bound().size == 1:
            return gradients
        return map_paths(lambda path, x: _constrain(x, self.mesh, self._weight(path).gradient), gradients, prefix)

    def copies(self, path: str, param_dtype: Any, dtype: Any) -> bool:
        """Whether `use` makes another array of a parameter: it casts, or gathers, or pins where on the mesh it lies, which is an
        array of its own to what decides on what a backward keeps."""
        return self._bound().size > 1 or UNSHARDED.copies(path, param_dtype, dtype)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A spec on this layout's devices."""
        return NamedSharding(self._bound(), spec)

    def _bound(self) -> Mesh:
        if self.mesh is None:
            raise ValueError("this layout has no devices; bind it first: layout.on(make_mesh(layout.sizes)).")
        return self.mesh

    def _weight(self, path: str) -> Weight:
        if path not in self.weights:
            raise ValueError(f"no parameter {path!r}; {nearest(path, self.weights, 'parameter')}")
        return self.weights[path]


def resolve(sizes: Mapping[str, int], sharding: ShardingConfig, params: Mapping[str, Any],
            optimizer: Mapping[str, Any] | None = None, activations: Mapping[str, ArraySpec] | None = None,
            paddable: Collection[str] = (), keys: Mapping[str, tuple[str, int]] = types.MappingProxyType({})) -> Layout:
    """Decides where every array lies.

    Args:
      sizes: of all mesh axes, from `resolve_sizes`.
      sharding: the declaration.
      params: nested dict of ArraySpec.
      optimizer: slot name to a nested dict of ArraySpec with some of the parameters' paths. An array may have fewer dims
        than its parameter.
      activations: name to ArraySpec, those that are worth checking and showing.
      paddable: dims that could be padded, for messages. What is padded the arrays say themselves.
      keys: dim to the configuration's key that its size comes from and the key's value for a size of 1, for messages.

    Raises:
      DeclarationError: whatever cannot be done as declared. Nothing is ever replicated because it does not fit.
    """
    arrays = flatten(params)
    slots = {slot: flatten(tree) for slot, tree in (optimizer or {}).items()}
    activations = activations or {}
    everything = [*arrays.values(), *(array for slot in slots.values() for array in slot.values()), *activations.values()]
    dims = dict.fromkeys(dim for array in everything for dim in array.dims if dim)
    tables = read_tables(sharding, dims)
    overrides = match(read_overrides(sharding.overrides), arrays)

    hints = {dim: Hint(*keys.get(dim, (None, 1)), (*sharding.pad, dim) if dim in paddable and dim not in sharding.pad else ())
             for dim in {*paddable, *keys}}

    rows, placed, unplaced, padded = [], {}, {}, {}
    state = [(kind, path, path, array) for kind in ("params", "gradients") for path, array in arrays.items()]
    state += [("optimizer", join(slot, path), path, array) for slot, tree in slots.items() for path, array in tree.items()]
    for kind, path, parameter, array in state:
        if parameter not in arrays:
            raise ValueError(f"optimizer state {path} belongs to no parameter.")
        result, words, left = _place(path, array, tables[kind], overrides.get(parameter), arrays[parameter], sizes, hints)
        placed[kind, path] = result
        if array.is_padded:
            padded[join(kind, path)] = Padded(array.shape, _spec(result), array.true_shape,
                                              _spec(trimmed_placement(array, result, sizes)))
        rows.append(_row(kind, path, array, result, words, sizes))
        for axis in left:
            unplaced.setdefault((kind, axis, sizes[axis]), []).append(path)
    for name, array in activations.items():
        result = place(f"activation {name}", array, _rules(f"activation {name}", array.dims, tables["activations"]), sizes, hints)
        rows.append(_row("activations", name, array, result, _words(array, result, tables["activations"], {}), sizes))

    weights = {path: Weight(_spec(placed["params", path]),
                            _spec(_in_use(path, array, tables, overrides.get(path), sizes)),
                            _spec(placed["gradients", path]), array.dims[:1] == ("layers",)) for path, array in arrays.items()}
    return Layout(
        sizes=dict(sizes),
        params=unflatten({path: weight.stored for path, weight in weights.items()}),
        gradients=unflatten({path: weight.gradient for path, weight in weights.items()}),
        compute=unflatten({path: weight.used for path, weight in weights.items()}),
        optimizer={slot: unflatten({path: _spec(placed["optimizer", join(slot, path)]) for path in tree})
                   for slot, tree in slots.items()},
        rows=tuple(rows), notes=tuple(_notes(sharding, sizes, dims, unplaced, everything)), padded=padded,
        activation_table=tables["activations"], weights=weights)


def _rules(name: str, dims: tuple[str | None, ...], table: Table) -> tuple[Rule, ...]:
    """The table's rule for each dim. A dim without one is an error: a misspelt name must not replicate in silence."""
    for dim in dims:
        if dim is not None and dim not in table.rules:
            raise DeclarationError(f"{name}: there is no rule for its dim {dim!r}; {nearest(dim, table.rules, 'dim')} "
                                   f"A new dim needs a rule, None to replicate: config.sharding.rules.{dim} = None.")
    return tuple(Rule((), "") if dim is None else table.rules[dim] for dim in dims)


def _place(path: str, array: ArraySpec, table: Table, override: Override | None, param: ArraySpec,
           sizes: Mapping[str, int], hints: Mapping[str, Hint]) -> tuple[Placed, str, tuple[str, ...]]:
    """Where one array of state lies, what decided it, and the spread axes that fit nowhere."""
    name = f"{table.name} {path}"
    rules = _rules(name, array.dims, table)
    if override is not None:
        placed = place(name, array, rules_of(override, param, array, table.rules), sizes, hints)
        return placed, f"override {override.pattern!r}", ()
    placed = place(name, array, rules, sizes, hints)
    full, homes, unplaced = spread(array, placed, table.spread, sizes)
    return full, _words(array, placed, table, homes), unplaced


def _in_use(path: str, array: ArraySpec, tables: Mapping[str, Table], override: Override | None,
            sizes: Mapping[str, int]) -> Placed:
    """Where a parameter lies while it is used: by its rules or override, without the spread and without the axes that
    split the batch (unless the activations split that very dim by them too, as experts are)."""
    rules = _rules(path, array.dims, tables["params"])
    if override is not None:
        rules = rules_of(override, array, array, tables["params"].rules)
    met = tables["activations"].rules
    gathered = set(met["batch"].axes)
    return tuple(tuple(axis for axis in rule.axes if sizes[axis] > 1 and (axis not in gathered or dim and axis in met[dim].axes))
                 for dim, rule in zip(array.dims, rules))


def _words(array: ArraySpec, placed: Placed, table: Table, homes: Mapping[str, int]) -> str:
    words = [f"{dim_name(array.dims, i)}={'+'.join(axes)} ({table.rules[array.dims[i]].source})"
             for i, axes in enumerate(placed) if axes]
    words += [f"{dim_name(array.dims, i)}={axis} ({table.spread[axis]})" for axis, i in homes.items()]
    return ", ".join(words) or "replicated"


def _row(kind: str, path: str, array: ArraySpec, placed: Placed, words: str, sizes: Mapping[str, int]) -> Row:
    blocks = math.prod(sizes[axis] for axes in placed for axis in axes)
    words = ", ".join([words, *(f"{dim_name(array.dims, i)} padded from {true}" for i, true in enumerate(array.true_shape)
                                if true != array.shape[i])])
    return Row(kind, path, array.shape, array.dtype_name, array.dims, _spec(placed), words, array.bytes, array.bytes // blocks,
               math.prod(sizes.values()) // blocks)


def _spec(placed: Placed) -> PartitionSpec:
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in placed))


def _notes(sharding: ShardingConfig, sizes: Mapping[str, int], dims: Mapping[str, Any],
           unplaced: Mapping[tuple, list[str]], arrays: Iterable[ArraySpec]) -> list[str]:
    notes = []
    padded = dict.fromkeys((dim, true, size) for array in arrays for dim, true, size in
                           zip(array.dims, array.true_shape, array.shape) if true != size)
    notes += [f"config.sharding.pad: {dim} is padded from {true} to {size}." for dim, true, size in padded]
    zero_axes = read_axes(sharding.zero_axes, "config.sharding.zero_axes")
    if sharding.zero and all(sizes[axis] == 1 for axis in zero_axes):
        axes = " and ".join(zero_axes)
        have = "has" if len(zero_axes) == 1 else "have"
        why = f"{axes} {have} size 1 on this mesh" if axes else "config.sharding.zero_axes is empty"
        notes.append(f"ZeRO {sharding.zero}{f' over {axes}' if axes else ''} shards nothing: {why}.")
    for dim, key in declared_dims(sharding).items():
        if dim not in dims:
            notes.append(f"config.{key} has a rule for {dim!r}, but this model has no such dim.")
    for (kind, axis, size), paths in unplaced.items():
        shown = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
        notes.append(f"{kind}: no free dim is divisible by {axis}={size}, so these stay whole along {axis}: {shown}.")
    return notes


def _constrain(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    # Inside a shard_map that is manual over some axes, only the mesh of the context knows which they are; an array there is what
    # one place along them holds, and is laid out along the others.
    context = jax.sharding.get_abstract_mesh()
    if context.axis_names != AXES:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    manual = set(context.manual_axes)
    axes = (() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec)
    spec = _spec(tuple(tuple(axis for axis in entry if axis not in manual) for entry in axes))
    return jax.lax.with_sharding_constraint(x, NamedSharding(context, spec))


def _gathered(x: jax.Array, mesh: Mesh, weight: Weight, dtype: Any, carrier: Any, param_dtype: Any) -> jax.Array:
    # Cast first and pin the cast where the parameter rests: else XLA gathers before it casts, and moves float32.
    x = _constrain(x.astype(dtype), mesh, weight.stored)
    return (x if weight.used == weight.stored else _constrain(x, mesh, weight.used)).astype(carrier)


def _stacked(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    del mesh, spec
    return x


_stack = jax.custom_vjp(_stacked, nondiff_argnums=(1, 2))
_stack.defvjp(lambda x, mesh, spec: (x, None), lambda mesh, spec, _, cotangent: (_constrain(cotangent, mesh, spec),))

_gather = jax.custom_vjp(_gathered, nondiff_argnums=(1, 2, 3, 4, 5))


def _gather_forward(*args):
    return _gathered(*args), None  # its steps in plain sight: a policy of rematerialisation decides on each


def _gather_backward(mesh, weight, dtype, carrier, param_dtype, _, cotangent):
    # First as the parameter was used: a table's gradient is then summed over the batch where the lookups are, and the two
    # constraints together are a reduce-scatter. Without it XLA gathers the whole batch's activations instead.
    cotangent = _constrain(cotangent, mesh, weight.used)
    for spec in _scatterings(weight.used, weight.gradient):
        # The barrier keeps XLA from merging this slice with the next one, here or in the optimizer, into one that no
        # reduce-scatter matches. The constraint after it keeps the next one's layout from reaching back over it.
        cotangent = _constrain(jax.lax.optimization_barrier(_constrain(cotangent, mesh, spec)), mesh, spec)
    return (_constrain(cotangent, mesh, weight.gradient).astype(param_dtype),)


def _scatterings(used: PartitionSpec, gradient: PartitionSpec) -> list[PartitionSpec]:
    """The steps of a gradient from one layout to the other, the fastest links first. Each is one reduce-scatter, as XLA makes
    of a sum and a slice: along one dim, over axes in the order of the mesh."""
    now, goal = ([() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]
                 for spec in (used, gradient))
    if any(there[:len(here)] != here for here, there in zip(now, goal)):
        return [gradient]
    steps = []
    while now != goal:
        i = max((i for i in range(len(goal)) if now[i] != goal[i]), key=lambda i: AXES.index(goal[i][len(now[i])]))
        size = len(now[i]) + 1
        while size < len(goal[i]) and AXES.index(goal[i][size]) > AXES.index(goal[i][size - 1]):
            size += 1
        now[i] = goal[i][:size]
        steps.append(_spec(tuple(now)))
    return steps


_gather.defvjp(_gather_forward, _gather_backward)
