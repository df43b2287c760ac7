"""A model without a mesh: what a Layout offers to model code, with nothing to do but cast."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


class Unsharded:
    """Takes the place of a bound Layout where there is no mesh."""

    mesh = None

    def activation(self, dims: tuple[str | None, ...]) -> PartitionSpec:
        """Of an activation that lies on one device."""
        del dims
        return PartitionSpec()

    def constrain(self, x: jax.Array, dims: tuple[str | None, ...]) -> jax.Array:
        """`x` itself."""
        del dims
        return x

    def stack(self, params: Any, prefix: str) -> Any:
        """`params` themselves."""
        del prefix
        return params

    def use(self, params: Any, prefix: str, dtype: Any, gradients: Any = None) -> Any:
        """`params` in `dtype`, the floating ones; vectors stay as they are. For `gradients` see `Layout.use`."""
        del prefix
        return cast(params, dtype, gradients)

    def copies(self, path: str, param_dtype: Any, dtype: Any) -> bool:
        """Whether `use` casts."""
        del path
        return jnp.dtype(param_dtype) != jnp.dtype(dtype)


UNSHARDED = Unsharded()


def cast(params: Any, dtype: Any, gradients: Any = None) -> Any:
    """A pytree with its floating arrays in their `dtypes_in_use`."""
    def one(x):
        rounded, carrier = dtypes_in_use(x, dtype, gradients)
        return x.astype(rounded).astype(carrier)
    return jax.tree.map(one, params)


def dtypes_in_use(x: jax.Array, dtype: Any, gradients: Any = None) -> tuple[Any, Any]:
    """What `x` is rounded to for a computation in `dtype`, and the dtype that then carries it, and so its gradient: the
    wider of the two. Vectors (gains and offsets of norms, which are computed in float32) are not rounded, and what is no
    float stays as it is."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.dtype(x.dtype), jnp.dtype(x.dtype)
    rounded = jnp.dtype(x.dtype if x.ndim < 2 else dtype)
    carries = gradients is not None and jnp.dtype(gradients).itemsize > rounded.itemsize
    return rounded, jnp.dtype(gradients) if carries else rounded
