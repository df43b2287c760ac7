"""A backward in two halves gives what the whole gives, and no matmul is done twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partitioning.halves import Halves

LAYERS, ROWS, WIDTH = 3, 4, 8


def layer(x, weights, key):
    y = jnp.tanh(x @ weights["up"])
    y = jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y, 0)
    return x + jax.nn.silu(y) @ weights["down"]


def looped(remat, weights, x, key):
    def turn(x, each):
        weights, number = each
        return layer(x, weights, jax.random.fold_in(key, number)), None

    turn = jax.checkpoint(turn, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable) if remat else turn
    return jax.lax.scan(turn, x, (weights, jnp.arange(LAYERS)))[0]


def unrolled(weights, x, key):
    for number in range(LAYERS):
        x = layer(x, jax.tree.map(lambda w: w[number], weights), jax.random.fold_in(key, number))
    return x


MODELS = {"loop": functools.partial(looped, False), "loop, remat": functools.partial(looped, True), "unrolled": unrolled}


@pytest.mark.parametrize("model", MODELS)
def test_the_halves_give_what_the_whole_gives(model):
    def backward(again, once):
        weights, x, key = again
        _, pull = jax.vjp(lambda weights, x: MODELS[model](weights, x, key), weights, x)
        of_weights, of_x = pull(once)
        return of_x, of_weights

    rng = np.random.default_rng(0)
    weights = {"up": jnp.array(rng.normal(size=(LAYERS, WIDTH, 2 * WIDTH)), jnp.float32),
               "down": jnp.array(rng.normal(size=(LAYERS, 2 * WIDTH, WIDTH)), jnp.float32)}
    x, gradient = (jnp.array(rng.normal(size=(ROWS, WIDTH)), jnp.float32) for _ in range(2))
    again = weights, x, jax.random.key(1)
    split = Halves(backward, again, gradient)
    now, kept = jax.jit(split.first)(again, gradient)
    later = jax.jit(split.second)(again, kept)
    for ours, theirs in zip(jax.tree.leaves((now, later)), jax.tree.leaves(backward(again, gradient)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    turns = LAYERS if model == "unrolled" else 1
    whole, first, second = (str(jax.make_jaxpr(function)(*arguments)).count("dot_general") for function, arguments in (
        (backward, (again, gradient)), (split.first, (again, gradient)), (split.second, (again, kept))))
    assert second == 2 * turns                 # one for each weight
    assert first + second <= whole             # which also computes what nobody uses
