"""One answer: in float32 every mesh, ZeRO stage and form of the step trains to the curve of one device.

`test_broken_reductions` breaks the promise on purpose; padding has its own matrix in `test_padding`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.job import build_job
from jaxlm.models import language_model
from jaxlm.models.dropout import Dropout
from jaxlm.train_step import split_microbatches
from partitioning.paths import flatten, unflatten
from tests.system.curves import compare, config_of, curve, is_equal, one_device

SEQUENCE = dict(sharding__activations=dict(rules=dict(stream_length="tensor")))
FORMS = {
    "data": (8, dict(mesh__data=8)),
    "fsdp": (8, dict(mesh__fsdp=8)),
    "tensor": (2, dict(mesh__tensor=2)),
    "data and fsdp": (8, dict(mesh__data=2, mesh__fsdp=4)),  # hybrid: sharded inside, replicated across
    "data and tensor": (8, dict(mesh__data=4, mesh__tensor=2)),
    "fsdp and tensor": (8, dict(mesh__fsdp=4, mesh__tensor=2)),
    "all three": (8, dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)),
    "sequence": (2, dict(mesh__tensor=2, **SEQUENCE)),
    "sequence and data": (4, dict(mesh__data=2, mesh__tensor=2, **SEQUENCE)),
    "sequence and fsdp": (4, dict(mesh__fsdp=2, mesh__tensor=2, **SEQUENCE)),
    "sequence and both": (8, dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, **SEQUENCE)),
    "ZeRO 0": (4, dict(mesh__fsdp=4, sharding__zero=0)),  # over data that is "data", and ZeRO 3 is "fsdp"
    "ZeRO 1": (4, dict(mesh__fsdp=4, sharding__zero=1)),
    "ZeRO 2": (4, dict(mesh__fsdp=4, sharding__zero=2)),
    "ZeRO 1 over data": (4, dict(mesh__data=4, sharding__zero=1, sharding__zero_axes=("data",))),
    "ZeRO 2 over data": (4, dict(mesh__data=4, sharding__zero=2, sharding__zero_axes=("data",))),
    "ZeRO 3 over data": (4, dict(mesh__data=4, sharding__zero=3, sharding__zero_axes=("data",))),
    "hybrid, optimizer over data too": (4, dict(mesh__data=2, mesh__fsdp=2, sharding__optimizer=dict(spread="data"))),
    "accumulation": (1, dict(train__gradient_accumulation=4)),
    "accumulation, fsdp": (4, dict(mesh__fsdp=4, train__gradient_accumulation=2)),
    "accumulation, sequence": (2, dict(mesh__tensor=2, train__gradient_accumulation=4, **SEQUENCE)),
    "accumulation, hybrid": (4, dict(mesh__data=2, mesh__fsdp=2, train__gradient_accumulation=2)),
    "no remat": (4, dict(mesh__fsdp=2, mesh__tensor=2, train__remat=("none",))),
    "full remat": (4, dict(mesh__fsdp=2, mesh__tensor=2, train__remat=("full",))),
    "unrolled": (4, dict(mesh__fsdp=2, mesh__tensor=2, model__scan_layers=False)),
}


def test_the_reference_curve_falls_by_more_than_a_nat():
    loss, _ = one_device()
    assert loss[0] - loss[-1] > 1


@pytest.mark.parametrize("form", FORMS)
def test_the_curve_is_that_of_one_device(form):
    devices, leaves = FORMS[form]
    figures = compare(curve(config_of(**leaves), devices), one_device())
    assert is_equal(figures), figures


def test_the_curve_of_a_model_like_gpt_2_with_dropout_is_that_of_one_device():
    """Offsets of norms and biases, one table at both ends, and the masks of every microbatch, forward and recomputed."""
    model = dict(model__norm="layernorm", model__activation="gelu", model__position="learned", model__bias=True,
                 model__tie_embeddings=True, model__dropout=0.1)
    devices, leaves = FORMS["sequence and both"]
    figures = compare(curve(config_of(**model, **leaves, train__gradient_accumulation=2), devices), one_device(**model))
    assert is_equal(figures), figures


INITIAL = ("fsdp", "all three", "ZeRO 0", "ZeRO 3 over data", "hybrid, optimizer over data too", "sequence and both")


def test_the_first_state_has_the_same_bits_on_every_mesh():
    def initial(devices, **leaves):
        job = build_job(config_of(**leaves), devices).on_devices(jax.devices()[:devices])
        return jax.device_get(job.initialise())

    reference = initial(1, mesh__data=1)
    for devices, leaves in (FORMS[form] for form in INITIAL):
        same = jax.tree.map(lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes(), reference, initial(devices, **leaves))
        assert all(jax.tree.leaves(same)), leaves


# Masks, read off a model whose residual stream adds up nothing else: every token starts as 1, and the two parts of layer i
# add 4 * 4^i and 2 * 4^i wherever they are not dropped. At a rate of 1/2 the sums are exact, and each tells its masks.


def mask_model(job):
    """Parameters with which the logits of the first ids are the residual stream after the final norm."""
    specs = flatten(job.model.specs)
    params = {path: jnp.zeros(spec.shape, spec.dtype) for path, spec in specs.items()}
    doubling = jnp.broadcast_to(4.0 ** jnp.arange(job.config.model.num_layers)[:, None], specs["layers/mlp/down/bias"].shape)
    params |= {
        "embed/embedding": params["embed/embedding"] + 1,
        "layers/attention/output/bias": 2 * doubling,
        "layers/mlp/down/bias": 4 * doubling,
        "final_norm/scale": params["final_norm/scale"] + 1,
        "lm_head/kernel": jnp.eye(*specs["lm_head/kernel"].shape),
    }
    return unflatten(params)


def masks_as_logits(devices, **leaves):
    """Float32 [B, L, D]: what the model above says of each element, in the order of the examples."""
    config = config_of(model__dropout=0.5, model__bias=True, **leaves)
    job = build_job(config, devices).on_devices(jax.devices()[:devices])
    size, count = config.train.global_batch_size, config.train.gradient_accumulation
    example = jnp.arange(size, dtype=jnp.int32) + 3

    def forward(params, batch):
        def of(microbatch):
            return job.model.logits(params, microbatch["inputs"], dropout=(jax.random.key(7), microbatch["example"]),
                                    shard=job.layout)[..., :config.model.embed_dim]
        logits = jax.lax.map(of, split_microbatches(batch, count))
        return jnp.moveaxis(logits, 0, 1).reshape(size, *logits.shape[2:])

    at = job.batch_shardings()
    batch = {"inputs": jnp.zeros((size, config.data.sequence_length), jnp.int32), "example": example}
    batch = {name: jax.device_put(x, at[name]) for name, x in batch.items()}
    return np.asarray(jax.jit(forward)(jax.device_put(mask_model(job), job.shardings()["params"]), batch))


@functools.cache
def masks_on_one_device():
    return masks_as_logits(1, mesh__data=1)


MASKS = {
    **{form: FORMS[form] for form in ("data", "fsdp and tensor", "sequence", "sequence and both", "accumulation, sequence")},
    "accumulation, sequence and both": (8, dict(FORMS["sequence and both"][1], train__gradient_accumulation=2)),
    "length over everything": (8, dict(mesh__fsdp=4, mesh__tensor=2, sharding__activations=dict(
        rules=dict(batch="data", stream_length=("fsdp", "tensor"))))),
    "unrolled": FORMS["unrolled"],
}


@pytest.mark.parametrize("form", MASKS)
def test_dropout_masks_have_the_same_bits_in_every_layer_on_every_mesh(form):
    devices, leaves = MASKS[form]
    assert len(np.unique(masks_on_one_device())) > 1000  # of all the sums that 9 masks can make
    assert masks_as_logits(devices, **leaves).tobytes() == masks_on_one_device().tobytes()


class RowsOfAShard(Dropout):
    """Each of two shards counts its rows from 0."""

    def __call__(self, x_BLD, layer, site):
        own = self.example_B - jnp.where(jnp.arange(x_BLD.shape[0]) < x_BLD.shape[0] // 2, 0, x_BLD.shape[0] // 2)
        return Dropout(self.rate, self.key, own)(x_BLD, layer, site)


class LengthOfAShard(Dropout):
    """Each of two shards draws for its own part of the length, from the same key."""

    def __call__(self, x_BLD, layer, site):
        halves = jnp.split(x_BLD, 2, axis=1)
        return jnp.concatenate([Dropout(self.rate, self.key, self.example_B)(half, layer, site) for half in halves], axis=1)


@pytest.mark.parametrize("broken", [RowsOfAShard, LengthOfAShard])
def test_masks_that_depend_on_the_shard_are_seen(broken, monkeypatch):
    monkeypatch.setattr(language_model, "Dropout", broken)
    devices, leaves = MASKS["sequence"]
    assert masks_as_logits(devices, **leaves).tobytes() != masks_on_one_device().tobytes()
