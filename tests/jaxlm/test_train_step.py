"""The step: what bad numbers do, what precision means, and that it is compiled once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.faults import NOT_FINITE
from jaxlm.job import build_job
from jaxlm.train import compile_train_step
from jaxlm.train_step import split_microbatches
from tests.system.curves import config_of


@functools.cache
def compiled(**leaves):
    job = build_job(config_of(**leaves), 1).on_devices(jax.devices()[:1])
    return job, compile_train_step(job)


def state_of(job):
    return job.initialise()


def batch_of(job, seed=0, masked_rows=0):
    rng = np.random.default_rng(seed)
    shape = (job.config.train.global_batch_size, job.config.data.sequence_length)
    tokens = rng.integers(0, 256, (shape[0], shape[1] + 1), dtype=np.int32)
    mask = np.ones(shape, bool)
    mask[:masked_rows] = False
    batch = dict(inputs=tokens[:, :-1], targets=tokens[:, 1:], mask=mask, example=np.arange(shape[0], dtype=np.int32))
    return jax.device_put(batch, job.batch_shardings())


def host(tree):
    return jax.tree.map(np.asarray, tree)


def same_bits(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), a, b)))


def poisoned(state, value=jnp.nan):
    """The state with one parameter spoilt, so that the loss and all gradients are."""
    scale = state["params"]["final_norm"]["scale"]
    return {**state, "params": {**state["params"], "final_norm": {"scale": scale.at[0].set(value)}}}


@pytest.mark.parametrize("leaves", [{}, dict(precision__compute="bfloat16"), dict(train__gradient_accumulation=2)])
@pytest.mark.parametrize("on_nonfinite", ["stop", "skip", "rollback"])
def test_a_step_that_is_not_finite_changes_nothing_but_counters(leaves, on_nonfinite):
    job, step = compiled(mesh__data=1, faults__on_nonfinite=on_nonfinite, **leaves)
    bad = poisoned(state_of(job))
    before = host(bad)
    after, metrics = step(bad, batch_of(job))
    assert not np.isfinite(metrics["loss"])
    after = host(after)
    assert same_bits(after["params"], before["params"]) and same_bits(after["optimizer"], before["optimizer"])
    counters = {name: int(after["counters"][name]) for name in ("step", "updates", "skipped", "bad_step", "bad_kind")}
    waits = on_nonfinite != "skip"
    assert counters == dict(step=1, updates=0, skipped=1, bad_step=1 if waits else -1, bad_kind=NOT_FINITE if waits else 0)


@pytest.mark.parametrize("on_nonfinite, applied", [("stop", 0), ("rollback", 0), ("skip", 1)])
def test_after_a_bad_step_a_run_that_stops_is_frozen_and_one_that_skips_goes_on(on_nonfinite, applied):
    job, step = compiled(mesh__data=1, faults__on_nonfinite=on_nonfinite)
    state = state_of(job)
    good = jax.tree.map(jnp.copy, state["params"])
    state, _ = step(poisoned(state), batch_of(job))
    state, metrics = step({**state, "params": good}, batch_of(job, 1))
    assert np.isfinite(metrics["loss"]) and int(state["counters"]["updates"]) == applied


def test_an_overflow_in_float16_halves_the_scale_and_leaves_the_state():
    job, step = compiled(mesh__data=1, precision__compute="float16", precision__loss_scale_initial=2.0**15)
    state = state_of(job)
    state, metrics = step(state, batch_of(job))
    assert float(metrics["loss_scale"]) == 2.0**15 and int(metrics["skipped"]) == 0
    before = host(state)
    state = {**state, "counters": {**state["counters"], "loss_scale": jnp.float32(2.0**40)}}  # overflows float16
    state, metrics = step(state, batch_of(job, 1))
    after = host(state)
    assert same_bits(after["params"], before["params"]) and same_bits(after["optimizer"], before["optimizer"])
    assert float(metrics["loss_scale"]) == 2.0**39 and int(metrics["skipped"]) == 1 and int(after["counters"]["updates"]) == 1


def test_an_injected_infinity_is_skipped_in_float16():
    job, step = compiled(mesh__data=1, precision__compute="float16", precision__loss_scale_initial=2.0**15)
    bad = poisoned(state_of(job), jnp.inf)
    before = host(bad)
    after, metrics = step(bad, batch_of(job))
    after = host(after)
    assert same_bits(after["optimizer"], before["optimizer"]) and same_bits(after["params"], before["params"])
    assert float(metrics["loss_scale"]) == 2.0**14


@pytest.mark.parametrize("compute, close", [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_compute_in_fewer_bits_stays_near_float32_with_parameters_in_float32(compute, close):
    job, step = compiled(mesh__data=1, precision__compute=compute)
    reference, reference_step = compiled(mesh__data=1)
    state, metrics = step(state_of(job), batch_of(job))
    _, expected = reference_step(state_of(reference), batch_of(reference))
    assert abs(float(metrics["loss"]) - float(expected["loss"])) < close
    assert {x.dtype for x in jax.tree.leaves((state["params"], state["optimizer"]))} == {jnp.dtype("float32")}


def test_each_kind_of_state_has_the_dtype_that_is_declared():
    job, step = compiled(
        mesh__data=1, precision__params="bfloat16", precision__optimizer="bfloat16", precision__compute="bfloat16"
    )
    state, _ = step(state_of(job), batch_of(job))
    assert {x.dtype for x in jax.tree.leaves((state["params"], state["optimizer"]))} == {jnp.dtype("bfloat16")}


def test_a_microbatch_without_targets_adds_nothing():
    """Half of the rows have no targets; with all of them in one microbatch, the step is still that of the whole batch."""
    job, step = compiled(mesh__data=1)
    split_job, split_step = compiled(mesh__data=1, train__gradient_accumulation=2)
    batch = batch_of(job, masked_rows=4)
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # microbatch i takes every second row
    shuffled = jax.device_put({name: np.asarray(x)[order] for name, x in batch.items()}, split_job.batch_shardings())
    _, expected = step(state_of(job), batch)
    _, metrics = split_step(state_of(split_job), shuffled)
    assert np.isfinite(metrics["loss"]) and float(metrics["targets"]) == 4 * 32
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-5)


def test_a_batch_without_any_targets_gives_zero_not_nan():
    job, step = compiled(mesh__data=1)
    _, metrics = step(state_of(job), batch_of(job, masked_rows=8))
    assert float(metrics["loss"]) == 0 and float(metrics["grad_norm"]) == 0


def test_microbatches_take_rows_from_every_shard():
    batch = {"x": jnp.arange(8)}
    assert split_microbatches(batch, 2)["x"].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_the_state_is_donated():
    job, step = compiled(mesh__data=1)
    state = state_of(job)
    step(state, batch_of(job))
    assert all(x.is_deleted() for x in jax.tree.leaves((state["params"], state["optimizer"])))


def test_gains_of_norms_are_not_rounded_to_the_compute_dtype():
    """1 + 2^-10 is 1 in bfloat16; a model that computes in it must still see the difference."""
    job, _ = compiled(mesh__data=1, precision__compute="bfloat16")
    params = job.initialise()["params"]
    finer = {**params, "final_norm": {"scale": params["final_norm"]["scale"] * (1 + 2.0**-10)}}
    seen = job.layout.use(finer["final_norm"], "final_norm", "bfloat16")["scale"]
    assert seen.dtype == jnp.float32 and bool((seen != 1).all())


def test_the_gradient_is_that_of_the_mean_over_targets():
    """Written out by hand for an uneven batch, before clipping."""
    job, step = compiled(mesh__data=1, optimizer__clip_norm=None)
    batch = batch_of(job)
    mask = np.array(np.random.default_rng(1).random(batch["mask"].shape) < 0.3)
    batch = jax.device_put({**batch, "mask": mask}, job.batch_shardings())

    def mean(params):
        logits = job.model.logits(params, batch["inputs"])
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
        return -jnp.sum(scores * mask) / mask.sum()

    loss, gradients = jax.jit(jax.value_and_grad(mean))(job.initialise()["params"])
    norm = np.sqrt(sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(gradients)))
    _, metrics = step(state_of(job), batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


def test_a_run_that_diverges_in_float16_stops_when_the_scale_can_fall_no_further():
    job, step = compiled(mesh__data=1, precision__compute="float16", precision__loss_scale_initial=4.0)
    state = poisoned(state_of(job), jnp.inf)
    seen = []
    for seed in range(4):
        state, metrics = step(state, batch_of(job, seed))
        seen.append((float(metrics["loss_scale"]), int(metrics["bad_step"])))
    assert seen == [(2.0, -1), (1.0, -1), (1.0, 3), (1.0, 3)]


def test_by_default_matrices_decay_and_nothing_else():
    job, _ = compiled(mesh__data=1, model__bias=True, model__qk_norm=True)
    decayed = job.optimizer.decayed
    assert decayed and all(path.endswith("/kernel") for path in decayed)
    assert "layers/attention/query/kernel" in decayed and "embed/embedding" not in decayed
