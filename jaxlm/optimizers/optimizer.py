"""The optimizer: clip, find directions, decay, step.

    g    <- gradients * min(1, clip_norm / norm)        norm over all gradients, float32
    d    <- update rule(g)                              AdamW, Lion, ...: `update_rules.py`, `adafactor.py`, `muon.py`
    p    <- p - rate * (d + weight_decay * p)           decay where the mask says (Loshchilov and Hutter, arXiv:1711.05101)

State is plain: named slots of arrays by parameter path, and one counter of applied updates that the caller keeps. All
mathematics is float32, whatever the formats of parameters, gradients and slots; a result is rounded once, when it is stored.
Arrays are global under jit, so the norm is that of one device on any mesh.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.config import OptimizerConfig, PrecisionConfig
from jaxlm.optimizers.adafactor import adafactor
from jaxlm.optimizers.muon import matrix_sides, muon
from jaxlm.optimizers.nonfinite import update_if
from jaxlm.optimizers.schedules import make_schedule
from jaxlm.optimizers.update_rules import Arrays, UpdateRule, adam, lion, sgd
from jaxlm.optimizers.weight_decay import decayed
from partitioning.declaration import DeclarationError
from partitioning.paths import flatten, unflatten

Tree = dict[str, Any]                          # nested dicts


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """What `make_optimizer` returns.

    Attributes:
      specs: slot name to nested dict of ArraySpec; each has a subset of the parameters' paths.
      rules: update rules, each with the name of its rate; every parameter has exactly one.
      rates: name of a rate to its schedule; `learning_rate` is always there.
    """
    specs: dict[str, Tree]
    rules: tuple[tuple[UpdateRule, str], ...]
    rates: dict[str, Callable[[jax.typing.ArrayLike], jax.Array]]
    clip_norm: float | None
    weight_decay: float
    decayed: frozenset[str]

    def init(self, params: Tree) -> dict[str, Tree]:
        """Slots of zeros for `params` (nested dict of arrays); traceable."""
        self._check(flatten(params), "parameters")
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), self.specs)

    def update(self, grads: Tree, slots: dict[str, Tree], params: Tree, *, step: jax.typing.ArrayLike,
               updates: jax.typing.ArrayLike, accept: Callable[[jax.Array], jax.Array] | None = None,
               ) -> tuple[Tree, dict[str, Tree], dict[str, jax.Array]]:
        """One step.

        Args:
          grads: as `params`, of any floating dtype, already unscaled and averaged.
          slots: from `init` or the previous update.
          params: nested dict of arrays, of any floating dtype.
          step: int32 scalar, the position in the run; drives the schedule.
          updates: int32 scalar, the number of updates applied before this one; drives bias correction.
          accept: from the gradient norm to a bool scalar. Where it says False, parameters and slots stay as they are, to the
            bit; the caller then leaves `updates` as it is too. None: always update.

        Returns:
          New params and slots with the dtypes of the old, and scalars: `learning_rate` (muon: `adam_learning_rate` too) and
          `grad_norm`, the norm before clipping, float32; with `accept`, `applied`, bool.
        """
        grads = flatten(grads)
        self._check(flatten(params), "parameters")
        self._check(grads, "gradients")
        norm = global_norm(grads)
        facts = {name: schedule(step) for name, schedule in self.rates.items()}

        def move(old):
            return self._move(grads, norm, facts, jnp.asarray(updates, jnp.int32), *old)

        old = (params, slots)
        if accept is None:
            params, slots = move(old)
        else:
            facts["applied"] = accept(norm)
            params, slots = update_if(facts["applied"], move, old)
        return params, slots, dict(facts, grad_norm=norm)

    def _move(self, grads: Arrays, norm: jax.Array, rates: dict[str, jax.Array], updates: jax.Array, params: Tree,
              slots: dict[str, Tree]) -> tuple[Tree, dict[str, Tree]]:
        params, slots = flatten(params), {name: flatten(arrays) for name, arrays in slots.items()}
        # The factor is 1 exactly below the bound, and NaN where the norm is: a bad gradient spoils everything, visibly.
        shrink = 1.0 if self.clip_norm is None else self.clip_norm / jnp.maximum(norm, self.clip_norm)
        new_params: Arrays = {}
        new_slots: dict[str, Arrays] = {name: {} for name in self.specs}
        for rule, rate in self.rules:
            wide = {path: _float32(params[path]) for path in rule.paths}
            directions, held = rule.step(
                {path: _float32(grads[path]) * shrink for path in rule.paths},
                {name: {path: _float32(slots[name][path]) for path in arrays} for name, arrays in rule.slots.items()},
                wide, updates)
            for path, direction in directions.items():
                if path in self.decayed:
                    direction = direction + self.weight_decay * wide[path]
                new_params[path] = (wide[path] - rates[rate] * direction).astype(params[path].dtype)
            for name, arrays in held.items():
                new_slots[name].update({path: array.astype(rule.slots[name][path].dtype) for path, array in arrays.items()})
        # Rules go through the parameters in their own order; the trees keep the order of the old ones.
        return (unflatten({path: new_params[path] for path in params}),
                {name: unflatten({path: new_slots[name][path] for path in arrays}) for name, arrays in slots.items()})

    def _check(self, arrays: dict[str, Any], what: str) -> None:
        known = {path for rule, _ in self.rules for path in rule.paths}
        if arrays.keys() != known:
            raise ValueError(f"the optimizer was made for other {what}: missing {sorted(known - arrays.keys())}, "
                             f"unknown {sorted(arrays.keys() - known)}")


def make_optimizer(config: OptimizerConfig, precision: PrecisionConfig, steps: int, specs: Tree) -> Optimizer:
    """The optimizer that the configuration declares.

    Args:
      config, precision: those sections; slots are held in `precision.optimizer`.
      steps: steps of the whole run, for the schedule.
      specs: the parameters, as a nested dict of ArraySpec. Dims tell stacked layers and the sides of a matrix.

    Raises:
      DeclarationError: a pattern of `decay_mask` matches nothing; float16 second moments; a schedule longer than the run.
    """
    flat, dtype = flatten(specs), jnp.dtype(precision.optimizer)
    mask = decayed(config.decay_mask, flat)    # a pattern that matches nothing is an error even if nothing decays
    rates = dict(learning_rate=make_schedule(config, steps))
    if dtype == jnp.float16 and config.name not in ("lion", "sgd"):
        raise DeclarationError(
            f"config.precision.optimizer = 'float16' with config.optimizer.name = {config.name!r}: squared gradients below 6e-8 "
            "become 0 in float16, and the step divides by their root; use 'float32' or 'bfloat16'.")
    if config.name == "muon":
        matrices = {path: spec for path, spec in flat.items() if matrix_sides(spec)}
        others = {path: spec for path, spec in flat.items() if path not in matrices}
        rates["adam_learning_rate"] = make_schedule(config, steps, peak=config.adam_learning_rate)
        rules = ((muon(config, matrices, dtype), "learning_rate"), (adam(config, others, dtype), "adam_learning_rate"))
    else:
        rule = dict(adamw=adam, adafactor=adafactor, lion=lion, sgd=sgd)[config.name]
        rules = ((rule(config, flat, dtype), "learning_rate"),)
    return Optimizer(
        specs={name: unflatten(arrays) for rule, _ in rules for name, arrays in rule.slots.items()},
        rules=rules, rates=rates, clip_norm=config.clip_norm, weight_decay=config.weight_decay,
        decayed=mask if config.weight_decay else frozenset())


def global_norm(tree: Any) -> jax.Array:
    """The Euclidean norm of all arrays of a pytree together, summed in float32; a float32 scalar."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(_float32(x))) for x in jax.tree.leaves(tree)))


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
