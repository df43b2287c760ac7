"""The matrix of `test_equivalence` would see a reduction that is wrong: each kind is broken on purpose and compared as there.

Before that the pieces that are broken are compared unbroken, so that it is the mistake that is seen.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxlm import train_step
from jaxlm.job import build_job
from jaxlm.train_step import loss_and_gradients
from partitioning import layout
from tests.system import by_hand
from tests.system.curves import compare, config_of, curve, is_equal, one_device
from tests.system.test_equivalence import FORMS

STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def reference():
    """Computed while nothing is broken yet."""
    return one_device()


def figures_of(devices, leaves):
    return compare(curve(config_of(**leaves), devices, STEPS), [figures[:STEPS] for figures in one_device()])


def job_of(devices, leaves):
    return build_job(config_of(**leaves), devices).on_devices(jax.devices()[:devices])


ON_DATA = (2, dict(mesh__data=2))
ON_TENSOR = FORMS["sequence and fsdp"]
PIECES = (by_hand.row_split_matmul, by_hand.norm_gains, by_hand.vocabulary, by_hand.gradient_norm)


def test_the_pieces_by_hand_are_right_when_nothing_is_left_out(monkeypatch):
    job = job_of(*ON_TENSOR)
    for piece in PIECES:
        monkeypatch.setattr(*piece(job))
    figures = figures_of(*ON_TENSOR)
    assert is_equal(figures), figures


@pytest.mark.parametrize("piece, broken", [
    (by_hand.row_split_matmul, "not summed"), (by_hand.norm_gains, "not summed over tensor"),
    (by_hand.vocabulary, "own log_z"), (by_hand.vocabulary, "own target"),
    (by_hand.gradient_norm, "own blocks"), (by_hand.gradient_norm, "every copy"),
])
def test_the_comparison_sees_what_tensor_and_sequence_sharding_get_wrong(piece, broken, monkeypatch):
    monkeypatch.setattr(*piece(job_of(*ON_TENSOR), broken))
    figures = figures_of(*ON_TENSOR)
    assert not is_equal(figures), figures


@pytest.mark.parametrize("broken", ["", "not summed", "counted twice", "own counts"])
def test_the_comparison_sees_what_data_parallelism_gets_wrong(broken, monkeypatch):
    monkeypatch.setattr(layout, "_constrain", lambda x, mesh, spec: x)  # a device's own rows cannot be split by data again
    monkeypatch.setattr(*by_hand.rows(job_of(*ON_DATA), broken))
    figures = figures_of(*ON_DATA)
    assert is_equal(figures) == (not broken), figures


def mean_of_means(objective, params, batch, *, accumulation, dtype):
    """Gradient accumulation as it is often done wrong: each microbatch by its own target count, then averaged."""
    total = jnp.sum(batch["mask"].astype(jnp.float32))

    def own_mean(params, microbatch):
        own = jnp.sum(microbatch["mask"].astype(jnp.float32))
        value, sums = objective(params, microbatch)
        return value * total / own / accumulation, sums * total / own / accumulation

    return loss_and_gradients(own_mean, params, batch, accumulation=accumulation, dtype=dtype)


def test_the_comparison_sees_a_mean_of_the_microbatches_means(monkeypatch):
    monkeypatch.setattr(train_step, "loss_and_gradients", mean_of_means)
    figures = figures_of(*FORMS["accumulation"])
    assert not is_equal(figures), figures


def doubled_gradient(backward):
    """The backward of a parameter's gather, counting each gradient twice, as a replica too many would."""

    def broken(*args):
        return tuple(2 * gradient for gradient in backward(*args))

    return broken


def test_the_comparison_sees_a_gathered_parameters_gradient_that_is_counted_twice(monkeypatch):
    original = layout._gather
    gather = jax.custom_vjp(lambda *a: original(*a), nondiff_argnums=(1, 2, 3, 4, 5))
    gather.defvjp(lambda *a: (original(*a), None), doubled_gradient(layout._gather_backward))
    monkeypatch.setattr(layout, "_gather", gather)
    figures = figures_of(2, dict(mesh__fsdp=2))
    assert not is_equal(figures), figures
