"""Products and biases whose results and gradients each have the dtype that they are wanted in. All accumulate in float32.

JAX ties the dtype of a gradient to that of its operand, and the dtypes of a product's operands to each other. Training in
bfloat16 wants neither: gradients of weights should leave the product in float32, because it is there that they are summed
over devices and microbatches; and logits and scores should come out in float32, but their cotangents should be rounded
before the backward products, which otherwise run in float32 at a fraction of the speed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def einsum(pattern: str, x: jax.Array, w: jax.Array, dtype: Any = None) -> jax.Array:
    """The einsum of two arrays, multiplied in the dtype of `x`.

    Args:
      pattern: 'a,b->c'; every index of one operand is in the other or in the result.
      x: an activation.
      w: an activation or a weight, of the same dtype or a wider one; it is rounded to that of `x`.
      dtype: of the result; None is that of `x`.

    Returns:
      The product. Backwards, the cotangent is rounded to the dtype of `x`, and each gradient is one product that comes
      out in the dtype of its own operand.
    """
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if x.dtype == w.dtype == dtype:
        return jnp.einsum(pattern, x, w)
    return _einsum(pattern, dtype, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum(pattern, dtype, x, w):
    return jnp.einsum(pattern, x, w.astype(x.dtype), preferred_element_type=dtype)


def _forward(pattern, dtype, x, w):
    rounded = w.astype(x.dtype)
    # An empty array remembers the dtype of w.
    return jnp.einsum(pattern, x, rounded, preferred_element_type=dtype), (x, rounded, jnp.zeros((0,), w.dtype))


def _backward(pattern, dtype, residuals, cotangent):
    x, w, like_w = residuals
    operands, _, result = pattern.partition("->")
    of_x, of_w = operands.split(",")
    cotangent = cotangent.astype(x.dtype)
    return (jnp.einsum(f"{result},{of_w}->{of_x}", cotangent, w),
            jnp.einsum(f"{of_x},{result}->{of_w}", x, cotangent, preferred_element_type=like_w.dtype))


_einsum.defvjp(_forward, _backward)


@jax.custom_vjp
def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias, in the dtype of `x`.

    Args:
      x: an activation.
      bias: of the last dims of `x`, and of its dtype or a wider one, in which its gradient is then summed over the first dims.
        (A bias that is rounded before it is broadcast has its gradient summed in the narrow dtype.)
    """
    return x + bias.astype(x.dtype)


def _add_forward(x, bias):
    return add_bias(x, bias), jnp.zeros((0,) * bias.ndim, bias.dtype)


def _add_backward(like_bias, cotangent):
    first = tuple(range(cotangent.ndim - like_bias.ndim))
    return cotangent, jnp.sum(cotangent, first, dtype=like_bias.dtype)


add_bias.defvjp(_add_forward, _add_backward)
