"""What the loop over layers keeps from the forward pass for the backward pass: no policy keeps copies of weights."""

import jax
import pytest

from jaxlm.job import build_job
from jaxlm.models.rematerialisation import NAMES
from jaxlm.train import compile_train_step
from partitioning.paths import flatten
from tests.system.curves import config_of

SIZES = dict(model__num_layers=4, model__embed_dim=64, model__num_heads=4, model__num_kv_heads=2, model__mlp_dim=512,
             data__sequence_length=8)
FSDP, ONE = dict(mesh__fsdp=8), dict(mesh__data=1)


def job_of(**leaves):
    devices = 1 if "mesh__data" in leaves else 8
    return build_job(config_of(**{**SIZES, **leaves}), devices).on_devices(jax.devices()[:devices])


def weights_of(job):
    return {spec.shape[1:] for spec in flatten(job.model.specs["layers"]).values() if len(spec.shape) > 2}


def kept(job):
    """Shape per layer of everything that the forward loop stacks up."""
    def loss(params, batch):
        return job.model.loss(params, batch, shard=job.layout).loss

    program = jax.make_jaxpr(jax.grad(loss))(job.abstract_state()["params"], job.abstract_batch())
    loop = next(equation for equation in program.eqns if equation.primitive.name == "scan")
    return [x.aval.shape[1:] for x in loop.outvars[1:]]  # the first is the residual stream


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", [("none",), ("dots",), ("full",), tuple(NAMES)])
def test_no_policy_keeps_gathered_weights(remat, compute):
    job = job_of(**FSDP, train__remat=remat, precision__compute=compute)
    assert len(weights_of(job)) == 5 and not weights_of(job) & set(kept(job))


def test_weights_that_are_cast_where_they_lie_are_not_kept_either():
    for mesh in (ONE, dict(**FSDP, sharding__zero=2)):
        job = job_of(**mesh, train__remat=("none",), precision__compute="bfloat16")
        assert not weights_of(job) & set(kept(job))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_without_remat_all_else_is_kept_as_on_one_device(compute):
    ours, theirs = (job_of(**mesh, train__remat=("none",), precision__compute=compute) for mesh in (FSDP, ONE))
    assert kept(ours) and sorted(kept(ours)) == sorted(shape for shape in kept(theirs) if shape not in weights_of(theirs))


def test_without_remat_more_layers_do_not_take_the_memory_of_their_gathered_weights():
    def temporary(layers):
        job = job_of(**FSDP, train__remat=("none",), model__num_layers=layers)
        return compile_train_step(job).memory_analysis().temp_size_in_bytes

    gathered = sum(spec.bytes for spec in flatten(job_of(**FSDP).model.specs["layers"]).values()) / 4
    assert temporary(12) - temporary(4) < 8 * gathered / 2
