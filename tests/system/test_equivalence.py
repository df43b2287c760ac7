"""One answer: in float32 every mesh, ZeRO stage and form of the step trains to the curve of one device."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxlm import train_step
from jaxlm.train_step import loss_and_gradients
from partitioning import layout
from tests.system.curves import compare, config_of, curve, is_equal

REMAT_NONE = dict(train__remat=("none",))
FORMS = {
    "data": (8, dict(mesh__data=8)),
    "fsdp": (8, dict(mesh__fsdp=8)),
    "tensor": (2, dict(mesh__tensor=2)),
    "data and fsdp": (8, dict(mesh__data=2, mesh__fsdp=4)),
    "data and tensor": (8, dict(mesh__data=4, mesh__tensor=2)),
    "fsdp and tensor": (8, dict(mesh__fsdp=4, mesh__tensor=2)),
    "all three": (8, dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)),
    "ZeRO 0": (4, dict(mesh__fsdp=4, sharding__zero=0)),
    "ZeRO 1": (4, dict(mesh__fsdp=4, sharding__zero=1)),
    "ZeRO 2": (4, dict(mesh__fsdp=4, sharding__zero=2)),
    "accumulation": (1, dict(train__gradient_accumulation=4)),
    "accumulation on a mesh": (4, dict(mesh__fsdp=2, mesh__tensor=2, train__gradient_accumulation=2)),
    "no remat": (1, REMAT_NONE),
    "full remat": (1, dict(train__remat=("full",))),
    "unrolled": (1, dict(model__scan_layers=False)),
    "unrolled on a mesh": (4, dict(mesh__fsdp=2, mesh__tensor=2, model__scan_layers=False)),
}


@functools.cache
def one_device(dropout: float = 0.0):
    return curve(config_of(model__dropout=dropout, mesh__data=1), 1)


def test_the_reference_curve_falls_by_more_than_a_nat():
    loss, _ = one_device()
    assert loss[0] - loss[-1] > 1


@pytest.mark.parametrize("form", FORMS)
def test_the_curve_is_that_of_one_device(form):
    devices, leaves = FORMS[form]
    figures = compare(curve(config_of(**leaves), devices), one_device())
    assert is_equal(figures), figures


def test_dropout_masks_do_not_depend_on_the_mesh_or_the_microbatches():
    sharded = config_of(model__dropout=0.1, mesh__data=2, mesh__fsdp=2, mesh__tensor=2, train__gradient_accumulation=2)
    figures = compare(curve(sharded, 8), one_device(0.1))
    assert is_equal(figures), figures


def test_initial_parameters_are_the_same_bits_on_every_mesh():
    from jaxlm.job import build_job

    def initial(devices, **leaves):
        job = build_job(config_of(**leaves), devices).on_devices(jax.devices()[:devices])
        return jax.device_get(job.initialise()["params"])

    reference = initial(1, mesh__data=1)
    for leaves in (dict(mesh__fsdp=8), dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2), dict(mesh__data=8)):
        same = jax.tree.map(lambda a, b: (a.view("uint32") == b.view("uint32")).all(), reference, initial(8, **leaves))
        assert all(jax.tree.leaves(same))


# Each of these breaks the promise on purpose: the comparison must see it.


def mean_of_means(objective, params, batch, *, accumulation, dtype):
    """Gradient accumulation as it is often done wrong: each microbatch by its own target count, then averaged."""
    total = jnp.sum(batch["mask"].astype(jnp.float32))

    def own_mean(params, microbatch):
        own = jnp.sum(microbatch["mask"].astype(jnp.float32))
        value, sums = objective(params, microbatch)
        return value * total / own / accumulation, sums * total / own / accumulation

    return loss_and_gradients(own_mean, params, batch, accumulation=accumulation, dtype=dtype)


def doubled_gradient(backward):
    """The backward of a parameter's gather, counting each gradient twice, as a replica too many would."""

    def broken(*args):
        return tuple(2 * gradient for gradient in backward(*args))

    return broken


def lost_rows(objective, params, batch, *, accumulation, dtype):
    """One shard's rows never reach the sum."""
    kept = jnp.arange(batch["mask"].shape[0]) >= batch["mask"].shape[0] // 4
    return loss_and_gradients(
        objective, params, {**batch, "mask": batch["mask"] & kept[:, None]}, accumulation=accumulation, dtype=dtype
    )


@pytest.mark.parametrize("broken", [mean_of_means, lost_rows])
def test_the_comparison_sees_a_wrong_sum(broken, monkeypatch):
    monkeypatch.setattr(train_step, "loss_and_gradients", broken)
    assert not is_equal(compare(curve(config_of(train__gradient_accumulation=4), 1, 20), tuple(c[:20] for c in one_device())))


def test_the_comparison_sees_a_gradient_that_is_counted_twice(monkeypatch):
    original = layout._gather
    gather = jax.custom_vjp(lambda *a: original(*a), nondiff_argnums=(1, 2, 3, 4, 5))
    gather.defvjp(lambda *a: (original(*a), None), doubled_gradient(layout._gather_backward))
    monkeypatch.setattr(layout, "_gather", gather)
    figures = compare(curve(config_of(mesh__fsdp=2), 2, 20), tuple(c[:20] for c in one_device()))
    assert not is_equal(figures), figures
