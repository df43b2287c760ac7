"""Dropout whose masks are a function of (step, layer, example, site), and of nothing else.

Each example draws its own mask, from the step's key with the layer, the example's number in the global batch and the
place in the block folded in. A mask therefore does not depend on the mesh, on how the batch is cut into microbatches, or
on whether the layers are scanned, and recomputation in the backward pass draws it again.
"""

import dataclasses

import jax
import jax.numpy as jnp

EMBEDDING, ATTENTION, MLP = range(3)           # sites


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Masks for one step; `rate` 0 or `key` None drops nothing and costs nothing.

    Attributes:
      rate: probability that an element is dropped.
      key: the step's key.
      example_B: int32, each row's number in the global batch.
    """
    rate: float = 0.0
    key: jax.Array | None = None
    example_B: jax.Array | None = None

    def __call__(self, x_BLD: jax.Array, layer, site: int) -> jax.Array:
        """x with elements zeroed and the rest scaled by 1 / (1 - rate). `layer`: an int or a traced int32."""
        if self.key is None or self.rate == 0:
            return x_BLD
        layer_key = jax.random.fold_in(self.key, layer)

        def keep(example):
            key = jax.random.fold_in(jax.random.fold_in(layer_key, example), site)
            return jax.random.bernoulli(key, 1 - self.rate, x_BLD.shape[1:])

        scaled_BLD = x_BLD * jnp.asarray(1 / (1 - self.rate), x_BLD.dtype)
        return jnp.where(jax.vmap(keep)(self.example_B), scaled_BLD, jnp.zeros((), x_BLD.dtype))
