"""Padding changes nothing: a run whose vocabulary, heads and hidden units are padded is the run of one device without it."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.checkpoints import Checkpoints
from jaxlm.config import CheckpointConfig
from jaxlm.job import build_job
from jaxlm.logs import read_rows
from jaxlm.models import count_parameters
from jaxlm.sampling import Sampler, generation_layout
from jaxlm.train import compile_train_step
from kernels import cross_entropy
from partitioning import memory_per_device
from partitioning.padding import cut
from tests.system.commands import TINY, run
from tests.system.curves import compare, config_of, curve, is_equal

STEPS = 30
MODEL = dict(model__vocab_size=262, model__num_heads=6, model__num_kv_heads=3, model__head_dim=8, model__mlp_dim=66)
GPT2 = dict(MODEL, model__norm="layernorm", model__activation="gelu", model__position="learned", model__bias=True,
            model__tie_embeddings=True, model__num_kv_heads=None)
PAD = dict(sharding__pad=("vocab", "heads", "mlp"))
FORMS = {
    "tensor": (4, MODEL, dict(mesh__tensor=4)),
    "fsdp and tensor": (8, MODEL, dict(mesh__fsdp=2, mesh__tensor=4, optimizer__z_loss=1e-3, optimizer__weight_decay=1.0)),
    "ZeRO 1": (8, MODEL, dict(mesh__fsdp=2, mesh__tensor=4, sharding__zero=1)),
    "as GPT-2": (8, GPT2, dict(mesh__fsdp=2, mesh__tensor=4)),
    "heads over everything": (8, MODEL, dict(mesh__fsdp=2, mesh__tensor=4, sharding__params=dict(
        rules=dict(heads=("tensor", "fsdp"), vocab=("fsdp", "tensor"))))),
    "Muon": (4, MODEL, dict(mesh__tensor=4, optimizer__name="muon")),
}


@functools.cache
def one_device(form):
    _, model, leaves = FORMS[form]
    shared = {key: value for key, value in leaves.items() if key.startswith("optimizer")}
    return curve(config_of(**model, **shared, mesh__data=1), 1, STEPS)


def padded_job(form, **more):
    devices, model, leaves = FORMS[form]
    job = build_job(config_of(**model, **leaves, **PAD, **more), devices)
    return job.on_devices(jax.devices()[:devices])


@pytest.mark.parametrize("form", FORMS)
def test_the_curve_is_that_of_one_device_without_padding(form):
    devices, model, leaves = FORMS[form]
    figures = compare(curve(config_of(**model, **leaves, **PAD), devices, STEPS), one_device(form))
    assert is_equal(figures), figures
    assert one_device(form)[0][0] - one_device(form)[0][-1] > 0.5


def test_the_comparison_sees_padded_logits_that_have_a_probability(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_without_padding", lambda logits, targets, size: (logits, targets))
    devices, model, leaves = FORMS["tensor"]
    figures = compare(curve(config_of(**model, **leaves, **PAD), devices, STEPS), one_device("tensor"))
    assert not is_equal(figures), figures


def test_padded_parameters_and_their_optimizer_state_stay_zero_and_the_rest_starts_with_the_same_bits():
    job = padded_job("as GPT-2", train__gradient_accumulation=2)
    plain = build_job(config_of(**GPT2, mesh__data=1), 1).on_devices(jax.devices()[:1])
    state = job.initialise()
    ours, theirs = (jax.device_get(x) for x in (job.to_saved(state), plain.initialise()))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), ours, theirs)
    step = compile_train_step(job)
    rng = np.random.default_rng(0)
    for _ in range(3):
        tokens = rng.integers(0, 262, (8, 33)).astype(np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((8, 32), bool), "example": np.arange(8)}
        state, _ = step(state, jax.device_put(batch, job.batch_shardings()))
    padded = {path: x for path, x in named(state).items() if path in job.layout.padded}
    assert {path.split("/")[-1] for path in padded} == {"embedding", "kernel", "bias"} and len(padded) == 3 * 11
    for path, x in padded.items():
        true = np.asarray(cut(x, job.layout.padded[path].true_shape))
        assert np.count_nonzero(true) and np.count_nonzero(x) == np.count_nonzero(true), path


def named(tree):
    return {"/".join(str(key.key) for key in keys): np.asarray(x) for keys, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("form", ["fsdp and tensor", "heads over everything"])
def test_a_checkpoint_has_the_true_sizes_and_is_read_on_any_mesh(form, tmp_path):
    job = padded_job(form)
    state = job.initialise()
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(1, job.to_saved(state), {})
    checkpoints.close()
    plain = build_job(config_of(**MODEL, mesh__data=1), 1).on_devices(jax.devices()[:1])
    reader = Checkpoints(tmp_path / "checkpoints")
    assert {path: tuple(shape) for path, (shape, _) in reader.shapes(1).items()} == {
        path: x.shape for path, x in named(plain.initialise()).items()}
    there = reader.restore(1, plain.abstract_state())
    again = job.from_saved(reader.restore(1, job.abstract_saved()))
    for path, x in named(state).items():
        np.testing.assert_array_equal(named(again)[path], x, strict=True)
        np.testing.assert_array_equal(named(there)[path], cut(x, named(there)[path].shape))
    assert jax.tree.map(lambda x: x.sharding, again) == job.shardings()


def test_greedy_and_drawn_text_is_that_of_the_model_without_padding():
    texts = []
    for job in (padded_job("fsdp and tensor"), build_job(config_of(**MODEL, mesh__data=1), 1).on_devices(jax.devices()[:1])):
        sampler, params = Sampler(job.model, generation_layout(job)), job.initialise()["params"]
        texts.append([list(sampler.generate(params, [5, 9, 2], max_new_tokens=8, temperature=temperature, top_k=top_k))
                      for temperature, top_k in ((0.0, None), (1.5, None), (1.0, 400))])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
def test_predicted_bytes_are_those_of_the_compiled_steps_arguments_and_counts_are_true(layers):
    # With dropout every array of a batch is used; the compiler drops arguments that are not.
    job = padded_job("fsdp and tensor", model__scan_layers=layers == "scanned", model__dropout=0.1)
    predicted = memory_per_device(job.layout)
    state = job.abstract_state()
    held = compile_train_step(job).memory_analysis().argument_size_in_bytes
    rest = sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
               for x in jax.tree.leaves([state["counters"], job.abstract_batch()]))
    assert held == predicted["params"] + predicted["optimizer"] + rest
    assert count_parameters(job.model.specs) == count_parameters(build_job(config_of(**MODEL), 1).model.specs)


def test_an_id_in_the_padding_is_outside_the_table_and_outside_the_targets():
    job = padded_job("as GPT-2")
    params = jax.tree.map(lambda x: x + 0.1, job.initialise()["params"])
    batch = {"inputs": jnp.array([[1, 2, 3]]), "targets": jnp.array([[2, 263, 4]]), "mask": jnp.ones((1, 3), bool)}
    logits = jax.jit(lambda p, x: job.model.logits(p, x))(params, jnp.array([[261], [262], [263]]))
    assert logits.shape == (3, 1, 262)
    assert np.isfinite(logits[0]).all() and np.isnan(logits[1:]).all()
    assert np.isnan(jax.jit(job.model.loss)(params, batch).loss)
    masked = {**batch, "mask": jnp.array([[True, False, True]])}
    loss, gradients = jax.jit(jax.value_and_grad(lambda p: job.model.loss(p, masked).loss))(params)
    assert np.isfinite(loss)
    for path, x in named({"params": gradients}).items():  # though the padded parameters are not 0 here
        if path in job.layout.padded:
            assert np.count_nonzero(x) == np.count_nonzero(cut(x, job.layout.padded[path].true_shape)), path


KEYS = ("--config.train.steps=12", "--config.train.log_every=1", "--config.model.vocab_size=262", "--config.model.num_heads=6",
        "--config.model.num_kv_heads=3", "--config.model.head_dim=8", "--config.train.eval_steps=1")
MESH = ("--simulate_devices=8", "--config.mesh.fsdp=2", "--config.mesh.tensor=4", "--config.sharding.pad=vocab,kv_heads")


def losses(folder):
    return np.array([(row["loss"], row["grad_norm"]) for row in read_rows(folder / "metrics.jsonl") if "loss" in row])


def test_a_run_goes_on_without_padding_and_with_it_and_is_evaluated_and_continued_either_way(tmp_path):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    run("train", f"--config={TINY}", f"--workdir={whole}", *KEYS)
    out = run("train", f"--config={TINY}", f"--workdir={moved}", *KEYS, *MESH, "--config.train.stop_at=4")
    assert "note: config.sharding.pad: vocab is padded from 262 to 264." in out
    assert "note: config.sharding.pad: kv_heads is padded from 3 to 4." in out
    run("train", f"--config={TINY}", f"--workdir={moved}", *KEYS, "--config.train.stop_at=8")
    run("train", f"--config={TINY}", f"--workdir={moved}", *KEYS, *MESH)
    ours, theirs = losses(moved), losses(whole)
    assert np.abs(ours[:, 0] - theirs[:, 0]).max() <= 1e-5 and np.abs(ours[:, 1] / theirs[:, 1] - 1).max() <= 1e-4
    without, with_padding = (), ("--simulate_devices=8",)
    scored = [json.loads(next(line for line in run("evaluate", moved, "--json", *flags).splitlines() if line.startswith("{")))
              for flags in (without, with_padding)]
    assert abs(scored[0]["eval_loss"] - scored[1]["eval_loss"]) <= 1e-5
    texts = {run("generate", moved, "--prompt=To be", "--max_new_tokens=5", *flags).partition("the run's mesh")[0]
             for flags in (without, with_padding)}
    assert len(texts) == 1
