"""Sampling: each rule keeps exactly the tokens that it says, and padding of the prompt changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.job import build_job
from jaxlm.sampling import Sampler, choose, generation_layout
from partitioning.declaration import DeclarationError
from tests.system.curves import config_of

LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.3, 0.15, 0.05]))


def drawn(temperature=1.0, top_k=None, top_p=None, count=4000):
    draw = functools.partial(choose, temperature=temperature, top_k=top_k, top_p=top_p)
    ids = jax.jit(jax.vmap(lambda key: draw(LOGITS, key)))(jax.random.split(jax.random.key(0), count))
    return np.bincount(np.asarray(ids), minlength=5) / count


def test_without_rules_the_frequencies_are_the_probabilities():
    np.testing.assert_allclose(drawn(), [0.1, 0.4, 0.3, 0.15, 0.05], atol=0.03)


@pytest.mark.parametrize("top_k, kept", [(1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (9, {0, 1, 2, 3, 4})])
def test_top_k_keeps_the_k_likeliest(top_k, kept):
    assert set(np.flatnonzero(drawn(top_k=top_k))) == kept


@pytest.mark.parametrize(
    "top_p, kept", [(0.01, {1}), (0.39, {1}), (0.41, {1, 2}), (0.69, {1, 2}), (0.71, {1, 2, 3}), (1.0, {0, 1, 2, 3, 4})]
)
def test_top_p_keeps_the_likeliest_that_first_add_up_to_p(top_p, kept):
    assert set(np.flatnonzero(drawn(top_p=top_p))) == kept


def test_a_high_temperature_flattens_and_a_low_one_sharpens():
    squared = np.square([0.1, 0.4, 0.3, 0.15, 0.05])
    np.testing.assert_allclose(drawn(temperature=0.5), squared / squared.sum(), atol=0.03)
    assert drawn(temperature=5.0)[4] > 0.12


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-40])
def test_the_lowest_temperatures_take_the_likeliest(temperature):
    assert int(choose(jnp.array([1.0, 5.0, 4.9, -3.0]), jax.random.key(0), temperature=temperature, top_k=None, top_p=None)) == 1


@functools.cache
def sampler():
    job = build_job(config_of(mesh__data=1, model__max_positions=64), 1).on_devices(jax.devices()[:1])
    return job, Sampler(job.model, generation_layout(job)), job.initialise()["params"]


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_greedy_text_is_that_of_the_whole_forward_pass_whatever_the_prompts_length(length):
    job, generator, params = sampler()
    prompt = [int(x) for x in np.random.default_rng(length).integers(0, 256, length)]
    ids = list(generator.generate(params, prompt, max_new_tokens=4, temperature=0.0))
    tokens = prompt + ids
    logits = job.model.logits(params, jnp.array([tokens]))[0]
    assert ids == [int(x) for x in jnp.argmax(logits[length - 1 : -1], axis=-1)]


def test_the_end_token_ends_the_text_and_is_not_part_of_it():
    _, generator, params = sampler()
    ids = list(generator.generate(params, [5], max_new_tokens=6, temperature=0.0))
    assert list(generator.generate(params, [5], max_new_tokens=6, temperature=0.0, ends={ids[2]})) == ids[: ids.index(ids[2])]


def test_the_text_ends_where_the_models_positions_do(capsys):
    _, generator, params = sampler()
    assert len(list(generator.generate(params, [5] * 60, max_new_tokens=10, temperature=0.0))) == 4
    assert "max_positions" in capsys.readouterr().err
    with pytest.raises(DeclarationError, match="64"):
        next(generator.generate(params, [5] * 64, max_new_tokens=1))
