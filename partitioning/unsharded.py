"""A model without a mesh: what a Layout offers to model code, with nothing to do but cast."""

from typing import Any

import jax
import jax.numpy as jnp


class Unsharded:
    """Takes the place of a bound Layout where there is no mesh."""

    def constrain(self, x: jax.Array, dims: tuple[str | None, ...]) -> jax.Array:
        """`x` itself."""
        del dims
        return x

    def use(self, params: Any, prefix: str, dtype: Any, stacked: bool = False) -> Any:
        """`params` in `dtype`, the floating ones; vectors stay as they are."""
        del prefix, stacked
        return cast(params, dtype)


UNSHARDED = Unsharded()


def cast(params: Any, dtype: Any) -> Any:
    """A pytree with its floating arrays in their `dtype_in_use`."""
    return jax.tree.map(lambda x: x.astype(dtype_in_use(x, dtype)), params)


def dtype_in_use(x: jax.Array, dtype: Any) -> Any:
    """What `x` is cast to for a computation in `dtype`: vectors (gains and offsets of norms, which are computed in float32)
    and what is no float stay as they are."""
    return dtype if x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
