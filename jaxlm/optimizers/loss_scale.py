"""Dynamic loss scaling for float16 gradients.

Small gradients vanish in float16. Multiplying the loss by a scale lifts all of them; dividing the gradients by it, in float32,
gives back their values. The scale is as large as it can be: it doubles after a run of finite steps and halves when a gradient
overflows, and that step is left out (Micikevicius et al., arXiv:1710.03740, section 3.2). Scales are the first one times a power
of two, so that with a power of two for the first, as is the default, scaling itself rounds nothing.

State: `scale`, float32, and `good_steps`, int32, the finite steps since the scale last changed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.config import PrecisionConfig

SMALLEST = 1.0
LARGEST = 2.0 ** 24


def init(config: PrecisionConfig) -> dict[str, jax.Array]:
    """The state before the first step."""
    return dict(scale=jnp.float32(config.loss_scale_initial), good_steps=jnp.int32(0))


def unscale(gradients: Any, scale: jax.typing.ArrayLike) -> Any:
    """Gradients of the scaled loss, any dtype, to float32 gradients of the loss."""
    return jax.tree.map(lambda g: g.astype(jnp.float32) / scale, gradients)


def adjust(state: dict[str, jax.Array], finite: jax.Array, config: PrecisionConfig) -> dict[str, jax.Array]:
    """The state after a step whose loss and gradient norm were finite (bool scalar) or not.

    The scale stays between 1 and 2^24, and is not moved by a bound that `loss_scale_initial` already lies beyond.
    """
    scale, good_steps = state["scale"], jnp.where(finite, state["good_steps"] + 1, 0)
    grows = good_steps >= config.loss_scale_growth_steps
    larger = jnp.maximum(scale, jnp.minimum(2 * scale, LARGEST))
    smaller = jnp.minimum(scale, jnp.maximum(scale / 2, SMALLEST))
    return dict(scale=jnp.where(finite, jnp.where(grows, larger, scale), smaller), good_steps=jnp.where(grows, 0, good_steps))
