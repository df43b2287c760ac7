"""One answer, through pipelines: every schedule trains to the curve of one device, whatever lies beside it on the mesh.

The mistakes that a pipeline can make are then made on purpose, and the comparison sees them.
"""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm import job as jobs
from jaxlm.job import build_job
from jaxlm.train import compile_train_step
from partitioning import executor
from partitioning.declaration import DeclarationError
from partitioning.paths import flatten
from partitioning.schedules import plan
from partitioning.schedules.arrays import CODES
from tests.system.commands import TINY, run
from tests.system.curves import compare, config_of, curve, is_equal, one_device

LAYERS = 8                                     # two for each of four stages, one for each half of them
MODEL = dict(model__num_layers=LAYERS, optimizer__learning_rate=1e-3)     # faster, so many layers make much of how sums round
BESIDE = {"alone": {}, "data": dict(mesh__data=2), "fsdp": dict(mesh__fsdp=2), "tensor": dict(mesh__tensor=2)}
GPT2 = dict(model__norm="layernorm", model__activation="gelu", model__position="learned", model__bias=True,
            model__tie_embeddings=True, model__dropout=0.1, optimizer__z_loss=1e-3)


def leaves_of(schedule, stages, microbatches=4, **more):
    return dict(**MODEL, mesh__pipe=stages, pipeline__schedule=schedule, pipeline__num_microbatches=microbatches, **more)


def compared(leaves, devices, steps=50, **model):
    ours = curve(config_of(**model, **leaves), devices, steps)
    reference = one_device(**MODEL, **model)
    return compare(ours, [figures[:steps] for figures in reference])


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v"])
def test_the_curve_is_that_of_one_device(schedule, stages, beside):
    residuals = "saved" if (stages, beside) in ((2, "alone"), (4, "data"), (2, "fsdp"), (4, "tensor")) else "recompute"
    leaves = leaves_of(schedule, stages, pipeline__residuals=residuals, **BESIDE[beside])
    figures = compared(leaves, stages * (1 if beside == "alone" else 2))
    assert is_equal(figures), figures


OTHERS = {
    "all axes, saved": (8, leaves_of("one_f_one_b", 2, 2, mesh__fsdp=2, mesh__tensor=2, mesh__data=1,
                                     pipeline__residuals="saved")),
    "sequence, hybrid": (8, leaves_of("one_f_one_b", 2, 2, mesh__fsdp=2, mesh__tensor=2, mesh__data=1, sharding__activations=dict(
        rules=dict(stream_length="tensor")))),
    "ZeRO 0": (4, leaves_of("one_f_one_b", 2, mesh__fsdp=2, sharding__zero=0)),
    "ZeRO 1": (4, leaves_of("one_f_one_b", 2, mesh__fsdp=2, sharding__zero=1)),
    "ZeRO 2": (4, leaves_of("zero_bubble", 2, mesh__fsdp=2, sharding__zero=2)),
    "ZeRO 3 over data": (4, leaves_of("one_f_one_b", 2, mesh__data=2, sharding__zero_axes=("data",))),
    "ends shared over the stages": (2, leaves_of("one_f_one_b", 2, sharding__zero_axes=("pipe",))),
    "one piece per tick": (4, leaves_of("one_f_one_b_alternating", 4, 8)),
    "late weight halves": (4, leaves_of("zero_bubble_paired", 4, 8, pipeline__residuals="saved")),
    "more chunks": (2, leaves_of("interleaved", 2, pipeline__chunks_per_stage=4)),
    "no remat, saved": (4, leaves_of("one_f_one_b", 2, mesh__fsdp=2, train__remat=("none",), pipeline__residuals="saved")),
    "full remat, saved": (2, leaves_of("one_f_one_b", 2, train__remat=("full",), pipeline__residuals="saved")),
    "unrolled": (2, leaves_of("one_f_one_b", 2, model__scan_layers=False)),
    "accumulation": (2, leaves_of("one_f_one_b", 2, 2, train__gradient_accumulation=2)),
}


@pytest.mark.parametrize("form", OTHERS)
def test_so_it_is_in_every_form_of_the_step(form):
    devices, leaves = OTHERS[form]
    figures = compared(leaves, devices)
    assert is_equal(figures), figures


@pytest.mark.parametrize("schedule, residuals", [("one_f_one_b", "recompute"), ("zero_bubble_v", "saved")])
def test_the_curve_of_a_model_like_gpt_2_with_dropout_is_that_of_one_device(schedule, residuals):
    """One table at both ends, a penalty in the head, biases, and the masks of every microbatch, forward and recomputed."""
    sequence = {}
    if residuals == "saved":
        sequence = dict(mesh__tensor=2, sharding__activations=dict(rules=dict(stream_length="tensor")))
    leaves = leaves_of(schedule, 2, 2, mesh__fsdp=2, train__gradient_accumulation=2, pipeline__residuals=residuals, **sequence)
    figures = compared(leaves, 8 if sequence else 4, **GPT2)
    assert is_equal(figures), figures


def test_layers_with_windows_of_their_own_keep_them():
    model = dict(model__window_pattern=(8, None, 4))
    figures = compared(leaves_of("interleaved", 2), 2, steps=10, **model)
    assert is_equal(figures), figures


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_half_precision_trains_alike(compute):
    precision = dict(precision__compute=compute, precision__loss_scale_initial=256.0)       # nothing overflows
    loss, norm = curve(config_of(**leaves_of("one_f_one_b", 2, pipeline__residuals="saved", **precision)), 2, 20)
    reference, _ = one_device(**MODEL, **precision)
    assert np.isfinite(norm).all() and np.abs(loss - reference[:20]).max() < 2e-2


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_saved_residuals_hold_no_weights_even_without_remat(compute):
    """With few tokens to a microbatch the weights, or what they are cast to, would be most of what is kept."""
    def temporary(microbatches):
        leaves = leaves_of("gpipe", 2, microbatches, train__global_batch_size=microbatches, train__remat=("none",),
                           pipeline__residuals="saved", precision__compute=compute, model__mlp_dim=512)
        job = build_job(config_of(**{**leaves, "data__sequence_length": 4}), 2).on_devices(jax.devices()[:2])
        layers = sum(spec.bytes for spec in flatten(job.model.specs["layers"]).values()) // 2
        return compile_train_step(job).memory_analysis().temp_size_in_bytes, layers

    (few, weights), (many, _) = temporary(4), temporary(20)
    assert (many - few) / 16 < weights * jnp.dtype(compute).itemsize / 4 / 2


# What a checkpoint holds.

def test_a_checkpoint_has_no_trace_of_the_pipeline():
    def saved(devices, **leaves):
        job = build_job(config_of(**leaves), devices).on_devices(jax.devices()[:devices])
        return {path: (x.shape, x.dtype) for path, x in flatten(job.abstract_saved()).items()}, job

    without, _ = saved(1, **MODEL, mesh__data=1)
    for schedule in ("one_f_one_b", "interleaved", "zero_bubble_v"):
        assert saved(4, **leaves_of(schedule, 4))[0] == without


def test_initial_parameters_have_the_same_bits_on_every_stage():
    def initial(devices, **leaves):
        return jax.device_get(build_job(config_of(**leaves), devices).on_devices(jax.devices()[:devices]).initialise())

    same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), initial(1, **MODEL, mesh__data=1),
                        initial(4, **leaves_of("one_f_one_b", 4)))
    assert all(jax.tree.leaves(same))


def test_a_run_goes_on_under_another_schedule_and_without_one(tmp_path):
    """As a user does it, with evaluations on the way."""
    def losses(name, *parts):
        common = (f"--config={TINY}", f"--workdir={tmp_path / name}", "--config.train.log_every=1", "--config.train.steps=9",
                  "--config.train.eval_every=3", f"--config.model.num_layers={LAYERS}")
        for stop, devices, flags in parts:
            run("train", *common, f"--config.train.stop_at={stop}", f"--simulate_devices={devices}", *flags)
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [[row[key] for row in rows if key in row] for key in ("loss", "eval_loss")]

    def pipeline(stages, schedule):
        return f"--config.mesh.pipe={stages}", f"--config.pipeline.schedule={schedule}", "--config.pipeline.num_microbatches=4"

    moved = losses("moved", (3, 4, (*pipeline(2, "interleaved"), "--config.mesh.fsdp=2")), (6, 1, ()),
                   (9, 4, pipeline(4, "zero_bubble_v")))
    for ours, theirs in zip(moved, losses("whole", (9, 1, ()))):
        assert len(ours) == len(theirs)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert "is a pipeline, which only training uses" in run("evaluate", tmp_path / "moved", "--simulate_devices=2")


@pytest.mark.parametrize("leaves, words", [
    (dict(pipeline__num_microbatches=3), "global_batch_size = 8 is not a multiple of 3"),
    (dict(model__num_layers=6, mesh__pipe=4), "config.model.num_layers = 6 cannot be shared out evenly: mesh.pipe = 4 stages"),
    (dict(pipeline__schedule="interleaved", pipeline__num_microbatches=3), "The nearest that work: 2 or 4"),
    (dict(pipeline__chunks_per_stage=2), "config.pipeline.chunks_per_stage = 2, but the schedule one_f_one_b is for 1"),
    (dict(pipeline__schedule="pipedream"), "is no schedule"),
    (dict(pipeline__num_microbatches=4, mesh__fsdp=4), "config.train.global_batch_size = 16")])
def test_what_does_not_fit_is_answered_with_what_does(leaves, words):
    leaves = {**leaves_of("one_f_one_b", 2), **leaves}
    with pytest.raises(DeclarationError, match=re.escape(words)):
        build_job(config_of(**leaves), leaves["mesh__pipe"] * leaves.get("mesh__fsdp", 1))


def test_the_schedule_is_said_and_drawn(tmp_path):
    flags = (f"--config={TINY}", "--simulate_devices=2", "--config.mesh.pipe=2", "--config.pipeline.num_microbatches=4")
    out = run("explain", *flags, "--schedule", f"--html={tmp_path / 'page.html'}")
    assert "pipeline: one_f_one_b: 2 stages, 4 microbatches, 6 ticks" in out and "stage 1 |. |F0 B0|" in out
    assert "Pipeline schedule" in (tmp_path / "page.html").read_text()
    found = json.loads(run("explain", *flags, "--schedule", "--json"))["schedule"]
    assert found["name"] == "one_f_one_b" and found["ticks"] == 6 and found["live"] == [3, 1]
    assert "config.mesh.pipe = 1" in run("explain", f"--config={TINY}", "--simulate_devices=2", "--schedule", status=2)


# Mistakes.

STEPS = 10


def lost_microbatch(monkeypatch):
    """No stage goes back through microbatch 1."""
    def lossy(*args, **kwargs):
        arrays = plan(*args, **kwargs)
        lost = (arrays.kind == CODES["B"]) & (arrays.microbatch == 1)
        return dataclasses.replace(arrays, kind=np.where(lost, 0, arrays.kind))

    monkeypatch.setattr(executor, "plan", lossy)


def stale_activation(monkeypatch):
    """Neighbours exchange what the tick before gave, one tick too late."""
    table = jobs.read_table
    monkeypatch.setattr(jobs, "read_table", lambda *args: dataclasses.replace(table(*args), latency=2))
    monkeypatch.setattr(executor, "plan", lambda table, **kwargs: plan(dataclasses.replace(table, latency=1), **kwargs))


def ends_not_summed(monkeypatch):
    """Each stage keeps its own gradients of the embedding and the head, which are one table."""
    monkeypatch.setattr(executor, "over_stages", lambda sums, of_ends: (jax.lax.psum(sums, executor.AXIS), of_ends))


def gradients_of_another_chunk(monkeypatch):
    """Gradients lie in the order in which stages hold the layers."""
    monkeypatch.setattr(executor, "to_rest", lambda tree, *_: tree)


@pytest.mark.parametrize("mistake, schedule", [
    (lost_microbatch, "one_f_one_b"), (stale_activation, "one_f_one_b"), (ends_not_summed, "gpipe"),
    (gradients_of_another_chunk, "interleaved")])
def test_the_comparison_sees_what_pipelines_get_wrong(mistake, schedule, monkeypatch):
    tied = dict(model__tie_embeddings=True)
    one_device(**MODEL, **tied)                # computed while nothing is broken yet
    mistake(monkeypatch)
    figures = compared(leaves_of(schedule, 2), 2, STEPS, **tied)
    assert not is_equal(figures), figures


def test_without_mistakes_those_curves_are_equal():
    for schedule in ("one_f_one_b", "gpipe", "interleaved"):
        figures = compared(leaves_of(schedule, 2), 2, STEPS, model__tie_embeddings=True)
        assert is_equal(figures), figures


def test_a_microbatch_without_targets_adds_nothing():
    config = config_of(**leaves_of("one_f_one_b", 2))
    job = build_job(config, 2).on_devices(jax.devices()[:2])
    tokens = np.random.default_rng(0).integers(0, 257, (config.train.global_batch_size, config.data.sequence_length + 1))
    tokens, rows = tokens.astype(np.int32), np.arange(len(tokens), dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "example": rows,
             "mask": np.broadcast_to((rows % 4 != 1)[:, None], tokens[:, 1:].shape)}
    _, metrics = compile_train_step(job)(job.initialise(), jax.device_put(batch, job.batch_shardings()))
    assert jnp.isfinite(metrics["loss"]) and jnp.isfinite(metrics["grad_norm"])
    assert metrics["targets"] == batch["mask"].sum()
