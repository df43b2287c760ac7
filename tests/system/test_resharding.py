"""A checkpoint written under any mesh, ZeRO stage, pipeline, form of layers and padding is read bit for bit under any other."""

import functools

import jax
import numpy as np
import pytest

from jaxlm.checkpoints import Checkpoints
from jaxlm.config import CheckpointConfig
from jaxlm.job import build_job
from jaxlm.train import compile_train_step
from partitioning.paths import flatten
from tests.system.curves import config_of

MODEL = dict(model__vocab_size=266, model__num_heads=6, model__num_kv_heads=3, model__embed_dim=48)      # 266: not over 4
PAD = dict(sharding__pad=("vocab", "heads"))
FORMS = {
    "one device": (1, dict(mesh__data=1)),
    "data": (8, dict(mesh__data=8, sharding__zero=0)),
    "ZeRO 1 over data": (8, dict(mesh__data=8, sharding__zero=1, sharding__zero_axes=("data",))),
    "ZeRO 2 over data": (8, dict(mesh__data=8, sharding__zero=2, sharding__zero_axes=("data",))),
    "fsdp": (8, dict(mesh__fsdp=8)),
    "tensor, padded": (4, dict(mesh__data=1, mesh__tensor=4, **PAD)),
    "hybrid, optimizer over all": (8, dict(mesh__data=2, mesh__fsdp=4, sharding__optimizer=dict(spread="data"))),
    "three axes, unrolled": (8, dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, model__scan_layers=False, **PAD)),
    "six devices": (6, dict(mesh__fsdp=6, train__global_batch_size=12)),
    "layers over fsdp": (4, dict(mesh__fsdp=4, sharding__rules=dict(layers="fsdp"))),
    "pipeline of 4": (4, dict(mesh__pipe=4, mesh__data=1, pipeline__num_microbatches=8)),
    "pipeline of 2, interleaved": (4, dict(mesh__pipe=2, mesh__fsdp=2, pipeline__schedule="interleaved",
                                           pipeline__num_microbatches=4)),
}
PAIRS = [("fsdp", "one device"), ("one device", "fsdp"), ("data", "tensor, padded"), ("tensor, padded", "data"),
         ("ZeRO 1 over data", "fsdp"), ("fsdp", "ZeRO 2 over data"), ("ZeRO 2 over data", "three axes, unrolled"),
         ("three axes, unrolled", "hybrid, optimizer over all"), ("hybrid, optimizer over all", "six devices"),
         ("six devices", "layers over fsdp"), ("layers over fsdp", "ZeRO 1 over data"),
         ("tensor, padded", "three axes, unrolled"), ("pipeline of 4", "fsdp"), ("fsdp", "pipeline of 4"),
         ("pipeline of 4", "pipeline of 2, interleaved"), ("pipeline of 2, interleaved", "three axes, unrolled")]


def job_of(form, **more):
    devices, leaves = FORMS[form]
    return build_job(config_of(**MODEL, **leaves, **more), devices).on_devices(jax.devices()[:devices])


@functools.cache
def written(folder, form):
    """A checkpoint after two steps under a form, and its arrays as they are on disk."""
    job = job_of(form)
    state, step = job.initialise(), compile_train_step(job)
    rows, length = job.config.train.global_batch_size, job.config.data.sequence_length
    rng = np.random.default_rng(0)
    for _ in range(2):
        tokens = rng.integers(0, 257, (rows, length + 1)).astype(np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((rows, length), bool)}
        batch["example"] = np.arange(rows)
        state, _ = step(state, jax.device_put(batch, job.batch_shardings()))
    checkpoints = Checkpoints(folder / form / "checkpoints", CheckpointConfig())
    checkpoints.save(2, job.to_saved(state), {"format": 2})
    checkpoints.close()
    return folder / form / "checkpoints", flatten(jax.device_get(job.to_saved(state)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("forms")


@pytest.mark.parametrize("there, here", PAIRS)
def test_every_array_has_the_bits_that_it_was_written_with(there, here, folder):
    place, expected = written(folder, there)
    job = job_of(here)
    state = job.from_saved(Checkpoints(place).restore(2, job.abstract_saved()))
    for path, x in flatten(state).items():
        assert x.sharding == flatten(job.shardings())[path]
    found = flatten(jax.device_get(job.to_saved(state)))
    assert found.keys() == expected.keys() and any(np.any(x) for path, x in found.items() if path.startswith("optimizer/"))
    for path, x in found.items():
        np.testing.assert_array_equal(x, expected[path], err_msg=path, strict=True)


def test_optimizer_state_is_read_into_another_precision(folder):
    place, expected = written(folder, "fsdp")
    job = job_of("three axes, unrolled", precision__optimizer="bfloat16")
    found = flatten(jax.device_get(job.to_saved(job.from_saved(Checkpoints(place).restore(2, job.abstract_saved())))))
    for path, x in found.items():
        assert x.dtype == (jax.numpy.bfloat16 if path.startswith("optimizer/") else expected[path].dtype)
        np.testing.assert_array_equal(x, expected[path].astype(x.dtype), err_msg=path)


def test_a_difference_of_one_bit_would_be_seen(folder):
    _, expected = written(folder, "fsdp")
    x = expected["params/embed/embedding"]
    other = x.copy()
    other.view(np.uint32)[0, 0] ^= 1
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(x, other, strict=True)
