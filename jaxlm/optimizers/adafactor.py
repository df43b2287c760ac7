"""Adafactor, one layer at a time.

For a matrix Adafactor keeps the row and column means of the squared gradient instead of all of it, bounds the root mean square
of the step, and scales it by the root mean square of the parameter (Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5).
All three speak of one matrix. Our layers are stacked: given such an array whole, the two largest dims may be `layers` and
something else, a stack of norm gains passes for a matrix, and every layer's step is scaled by all the others. So the rule is
mapped over `layers`, and each layer gets what it would get alone.

Slots: `v_row` and `v_col` for factored parameters (the dims that remain after averaging over the largest, and over the second
largest), `v` for the others. A parameter is factored if the second largest dim of its layer has at least 128 rows.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from jaxlm.config import OptimizerConfig
from jaxlm.optimizers.update_rules import Arrays, Specs, UpdateRule, moments, on_true_shapes
from partitioning.array import ArraySpec

MIN_DIM_TO_FACTOR = 128


def adafactor(config: OptimizerConfig, specs: Specs, dtype: Any) -> UpdateRule:
    """Adafactor without momentum; second-moment decay 1 - t^-0.8, step clipped at root mean square 1."""
    del config                                 # its constants are the paper's
    factored_rms = optax.scale_by_factored_rms(min_dim_size_to_factor=MIN_DIM_TO_FACTOR)
    bound_and_scale = optax.chain(optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())
    stateless = bound_and_scale.init({})
    factored = {path: _factored_dims(spec) for path, spec in specs.items()}

    def step_one(grad, statistics, param, updates):
        placeholder = jax.numpy.zeros((1,))    # optax's mark for what a parameter does not have
        state = optax.FactoredState(updates, *(statistics.get(name, placeholder) for name in ("v_row", "v_col", "v")))
        direction, state = factored_rms.update(grad, state, param)
        direction, _ = bound_and_scale.update(direction, stateless, param)
        return direction, {name: getattr(state, name) for name in statistics}

    def step(grads: Arrays, slots, params: Arrays, updates):
        directions, new_slots = {}, {name: {} for name in slots}
        for path, spec in specs.items():
            statistics = {name: arrays[path] for name, arrays in slots.items() if path in arrays}
            one = jax.vmap(step_one, in_axes=(0, 0, 0, None)) if _stacked(spec) else step_one
            directions[path], statistics = one(grads[path], statistics, params[path], updates)
            for name, array in statistics.items():
                new_slots[name][path] = array
        return directions, new_slots

    slots = dict(
        v_row={path: _without(specs[path], dims[1], dtype) for path, dims in factored.items() if dims},
        v_col={path: _without(specs[path], dims[0], dtype) for path, dims in factored.items() if dims},
        v=moments({path: specs[path] for path, dims in factored.items() if not dims}, dtype))
    return on_true_shapes(UpdateRule(tuple(specs), {name: arrays for name, arrays in slots.items() if arrays}, step), specs)


def _stacked(spec: ArraySpec) -> bool:
    return spec.dims[:1] == ("layers",)


def _factored_dims(spec: ArraySpec) -> tuple[int, int] | None:
    """The second largest and the largest dim of one layer's array, as optax orders them; None if it is not factored."""
    first = int(_stacked(spec))
    sizes = spec.true_shape[first:]
    if len(sizes) < 2:
        return None
    second, largest = (int(d) for d in np.argsort(sizes)[-2:])
    return (first + second, first + largest) if sizes[second] >= MIN_DIM_TO_FACTOR else None


def _without(spec: ArraySpec, dim: int, dtype: Any) -> ArraySpec:
    return dataclasses.replace(spec.without(dim), dtype=dtype)
