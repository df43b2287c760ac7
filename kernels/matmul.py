"""Products that accumulate in float32, whatever their operands are, forwards and backwards.

`jnp.einsum(..., preferred_element_type=float32)` on bfloat16 operands has a float32 cotangent, so that JAX's own backward
pass multiplies float32 by bfloat16: a matmul at a fraction of the speed, which nobody asked for. Here the cotangent is
rounded to the operands' dtype first, as it is for every other matmul of a model.
"""

import functools

import jax
import jax.numpy as jnp


def einsum_float32(pattern: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The einsum of two arrays of one dtype, as float32; the gradients have the operands' dtype."""
    if a.dtype == b.dtype == jnp.float32:
        return jnp.einsum(pattern, a, b)
    return _einsum(pattern, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum(pattern, a, b):
    return jnp.einsum(pattern, a, b, preferred_element_type=jnp.float32)


def _forward(pattern, a, b):
    return _einsum(pattern, a, b), (a, b)


def _backward(pattern, operands, cotangent):
    _, vjp = jax.vjp(functools.partial(jnp.einsum, pattern), *operands)
    return vjp(cotangent.astype(operands[0].dtype))


_einsum.defvjp(_forward, _backward)
