"""Update rules: from gradients to the direction in which parameters move.

A rule is what distinguishes one optimizer from another: the slots that it keeps for some parameters, and a pure function from
(gradients, slots, parameters) to (directions, slots). What all share (clipping, the learning rate, weight decay, number
formats) is in `optimizer.py`. The mathematics is optax's; its state is taken apart into named slots on the way out and put
together on the way in, so that a slot's name says what it holds and nothing else. The one counter of optax that matters, how
many updates there have been, is an argument.

Inside a rule everything is float32 and keyed by path.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxlm.config import OptimizerConfig
from partitioning.array import ArraySpec
from partitioning.padding import cut, fill

Arrays = dict[str, jax.Array]                  # by path
Specs = dict[str, ArraySpec]


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """One rule for the parameters `paths`.

    Attributes:
      slots: slot name to the arrays it holds, by parameter path; a slot may have a subset of the paths.
      step: (gradients, slots, parameters, updates) -> (directions, new slots); `updates` int32 scalar, the number of updates so
        far. Parameters then move by -rate * direction.
    """
    paths: tuple[str, ...]
    slots: dict[str, Specs]
    step: Callable[[Arrays, dict[str, Arrays], Arrays, jax.Array], tuple[Arrays, dict[str, Arrays]]]


def moments(specs: Specs, dtype: Any) -> Specs:
    """Slot arrays that are shaped and laid out as their parameters."""
    return {path: dataclasses.replace(spec, dtype=dtype) for path, spec in specs.items()}


def on_true_shapes(rule: UpdateRule, specs: Specs) -> UpdateRule:
    """`rule`, given every array without its padding; what comes out of it is filled up with zeros again.

    For a rule that looks across the entries of an array: its means and norms must not see the padding. An elementwise rule
    needs none of this, for it leaves zeros with gradient zero where they are.
    """
    if not any(spec.is_padded for spec in specs.values()):
        return rule

    def trimmed(arrays: Arrays, of: Specs) -> Arrays:
        return {path: cut(array, of[path].true_shape) for path, array in arrays.items()}

    def filled(arrays: Arrays, of: Specs) -> Arrays:
        return {path: fill(array, of[path].shape) for path, array in arrays.items()}

    def step(grads, slots, params, updates):
        held = {name: trimmed(arrays, rule.slots[name]) for name, arrays in slots.items()}
        directions, held = rule.step(trimmed(grads, specs), held, trimmed(params, specs), updates)
        return filled(directions, specs), {name: filled(arrays, rule.slots[name]) for name, arrays in held.items()}

    return dataclasses.replace(rule, step=step)


def adam(config: OptimizerConfig, specs: Specs, dtype: Any) -> UpdateRule:
    """Adam with bias correction (Kingma and Ba, arXiv:1412.6980, algorithm 1). Slots `mu`, `nu`."""
    transform = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)

    def step(grads, slots, params, updates):
        state = optax.ScaleByAdamState(count=updates, mu=slots["mu"], nu=slots["nu"])
        directions, state = transform.update(grads, state, params)
        return directions, dict(mu=state.mu, nu=state.nu)

    return UpdateRule(tuple(specs), dict(mu=moments(specs, dtype), nu=moments(specs, dtype)), step)


def lion(config: OptimizerConfig, specs: Specs, dtype: Any) -> UpdateRule:
    """Lion: the sign of an interpolated momentum (Chen et al., arXiv:2302.06675, program 1). Slot `mu`."""
    transform = optax.scale_by_lion(config.beta1, config.beta2)

    def step(grads, slots, params, updates):
        directions, state = transform.update(grads, optax.ScaleByLionState(count=updates, mu=slots["mu"]), params)
        return directions, dict(mu=state.mu)

    return UpdateRule(tuple(specs), dict(mu=moments(specs, dtype)), step)


def sgd(config: OptimizerConfig, specs: Specs, dtype: Any) -> UpdateRule:
    """Gradient descent with heavy-ball momentum m <- g + momentum * m. Slot `momentum`; none if momentum is 0."""
    if config.momentum == 0:
        return UpdateRule(tuple(specs), {}, lambda grads, slots, params, updates: (grads, {}))
    transform = optax.trace(config.momentum)

    def step(grads, slots, params, updates):
        directions, state = transform.update(grads, optax.TraceState(trace=slots["momentum"]), params)
        return directions, dict(momentum=state.trace)

    return UpdateRule(tuple(specs), dict(momentum=moments(specs, dtype)), step)
