"""Muon: momentum, orthogonalised matrix by matrix.

Muon replaces the momentum of a weight matrix by the nearest (semi-)orthogonal matrix, found with five Newton-Schulz steps (Jordan
et al., 2024, https://kellerjordan.github.io/posts/muon). What is one matrix is a matter of meaning, not of rank: our
layers are stacked, and an attention kernel has two dims for its heads. The logical dims say it: `layers` (and `experts`) count
matrices, `embed` is one side of each, and what remains is the other. Everything else (embeddings, the output matrix, norms,
biases) goes to Adam at its own rate.

An orthogonal matrix has root mean square 1 / sqrt(its larger side); Adam's step has about 0.2. The direction is therefore scaled
by 0.2 * sqrt(max(fan_in, fan_out)) (Liu et al., arXiv:2502.16982, section 2.2), so that rate and weight decay mean here what they
mean for AdamW, at any shape.
"""

import math
from typing import Any

import optax
import optax.contrib

from jaxlm.config import OptimizerConfig
from jaxlm.optimizers.update_rules import Specs, UpdateRule, moments, on_true_shapes
from partitioning.array import ArraySpec

UPDATE_RMS = 0.2
COUNTING_DIMS = ("layers", "experts")


def matrix_sides(spec: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The input and output dims of the matrices that a stacked array holds, or None if it holds none.

    ('layers', 'embed', 'heads', 'head_dim') -> ((1,), (2, 3)); ('layers', 'mlp', 'embed') -> ((1,), (2,));
    ('layers', 'embed') and ('vocab', 'embed') -> None.
    """
    if spec.dims[:1] != ("layers",):
        return None
    dims = [d for d, name in enumerate(spec.dims) if name not in COUNTING_DIMS]
    if len(dims) < 2:
        return None
    if spec.dims[dims[0]] == "embed":
        return tuple(dims[:1]), tuple(dims[1:])
    if spec.dims[dims[-1]] == "embed":
        return tuple(dims[:-1]), tuple(dims[-1:])
    return None


def muon(config: OptimizerConfig, specs: Specs, dtype: Any) -> UpdateRule:
    """Muon with Nesterov momentum `config.momentum`, for parameters that all have `matrix_sides`. Slot `momentum`.

    The momentum is the bias-corrected mean m <- momentum * m + (1 - momentum) * g; its scale is lost in orthogonalising.
    """
    sides = {path: matrix_sides(spec) for path, spec in specs.items()}
    transform = optax.contrib.scale_by_muon(
        beta=config.momentum, nesterov=True,
        weight_dimension_numbers={path: optax.contrib.MuonDimensionNumbers(*both) for path, both in sides.items()})
    scale = {path: UPDATE_RMS * math.sqrt(max(math.prod(specs[path].true_shape[d] for d in side) for side in both))
             for path, both in sides.items()}

    def step(grads, slots, params, updates):
        state = transform.init({})._replace(count=updates, mu=slots["momentum"])
        directions, state = transform.update(grads, state, params)
        return {path: scale[path] * d for path, d in directions.items()}, dict(momentum=state.mu)

    return on_true_shapes(UpdateRule(tuple(specs), dict(momentum=moments(specs, dtype)), step), specs)
