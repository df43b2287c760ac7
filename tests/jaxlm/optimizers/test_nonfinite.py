"""An update that is not accepted leaves everything as it was, to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.config import OPTIMIZERS, OptimizerConfig, PrecisionConfig
from jaxlm.optimizers import make_optimizer
from jaxlm.optimizers.nonfinite import _branch, _select
from partitioning.paths import flatten
from tests.jaxlm.optimizers import small_model


def bits(tree):
    return {path: np.asarray(x).tobytes() for path, x in flatten(tree).items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_one_bad_gradient_leaves_parameters_and_slots_bitwise_alone_and_the_next_good_one_moves_them(name, bad):
    tree = small_model.specs()
    optimizer = make_optimizer(OptimizerConfig(name=name), PrecisionConfig(), 10, tree)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, grads):
        params, slots, facts = optimizer.update(grads, state["slots"], state["params"], step=0, updates=state["updates"],
                                                accept=jnp.isfinite)
        return dict(params=params, slots=slots, updates=state["updates"] + facts["applied"]), facts

    params = small_model.arrays(tree, 0)
    params["final_norm"]["scale"] = params["final_norm"]["scale"].at[0].set(-0.0)
    state = dict(params=params, slots=optimizer.init(params), updates=jnp.int32(0))
    state, facts = update(state, small_model.arrays(tree, 1))
    assert facts["applied"]
    before = bits(state)
    poisoned = small_model.arrays(tree, 2)
    poisoned["layers"]["norm"]["scale"] = poisoned["layers"]["norm"]["scale"].at[1, 2].set(bad)
    state, facts = update(state, poisoned)
    assert not facts["applied"] and not np.isfinite(facts["grad_norm"])
    assert bits(state) == before
    state, facts = update(state, small_model.arrays(tree, 3))
    assert facts["applied"] and state["updates"] == 2
    after = bits(state)
    assert all(after[path] != before[path] for path in before if path.startswith("params/"))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_accepting_changes_nothing_about_a_good_update():
    tree = small_model.specs()
    optimizer = make_optimizer(OptimizerConfig(), PrecisionConfig(), 10, tree)
    params, grads = small_model.arrays(tree, 0), small_model.arrays(tree, 1)
    update = functools.partial(optimizer.update, step=0, updates=0)
    always = jax.jit(update)(grads, optimizer.init(params), params)
    guarded = jax.jit(functools.partial(update, accept=jnp.isfinite))(grads, optimizer.init(params), params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9), guarded[:2], always[:2])


def test_an_unguarded_update_lets_bad_numbers_show():
    tree = small_model.specs()
    optimizer = make_optimizer(OptimizerConfig(), PrecisionConfig(), 10, tree)
    params, grads = small_model.arrays(tree, 0), small_model.arrays(tree, 1)
    grads["final_norm"]["scale"] = grads["final_norm"]["scale"].at[0].set(np.nan)
    update = jax.jit(functools.partial(optimizer.update, step=0, updates=0))
    found, _, facts = update(grads, optimizer.init(params), params)
    assert np.isnan(facts["grad_norm"]) and np.isnan(found["final_norm"]["scale"][0])


@pytest.mark.parametrize("form", [_branch, _select])
@pytest.mark.parametrize("good", [True, False])
def test_both_forms_of_the_choice_agree(form, good):
    old = {"a": jnp.float32([-0.0, 1.0]), "b": jnp.int32(3)}
    update = lambda old: {"a": old["a"] / 0, "b": old["b"] + 1}              # noqa: E731
    found = jax.jit(functools.partial(form, update))(jnp.bool_(good), old)
    assert bits(found) == bits(jax.jit(update)(old) if good else old)
