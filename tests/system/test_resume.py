"""Stopping and going on: the curve and the parameters are those of a run that was never stopped, bit for bit."""

import json
import shutil
import signal

import jax
import numpy as np
import pytest

from jaxlm.checkpoints import Checkpoints
from jaxlm.config import CheckpointConfig
from jaxlm.errors import RunError
from jaxlm.job import build_job
from jaxlm.logs import read_rows
from tests.system.commands import TINY, run, start
from tests.system.curves import config_of

KEYS = ("--config.train.steps=12", "--config.train.log_every=1", "--config.checkpoint.every=4", "--config.model.dropout=0.1")


def arrays(folder, step):
    """Path to array of everything that a checkpoint holds."""
    reader = Checkpoints(folder / "checkpoints")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {}
    for path, (shape, dtype) in reader.shapes(step).items():
        *parents, name = path.split("/")
        place = abstract
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=device)
    state = reader.restore(step, abstract)
    return {jax.tree_util.keystr(keys): np.asarray(x) for keys, x in jax.tree_util.tree_leaves_with_path(state)}


def losses(folder):
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in read_rows(folder / "metrics.jsonl") if "loss" in row}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run("train", f"--config={TINY}", f"--workdir={folder}", *KEYS)
    return folder


def same_bits(a, b):
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)


def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(whole, tmp_path):
    run("train", f"--config={TINY}", f"--workdir={tmp_path}", *KEYS, "--config.train.stop_at=5")
    out = run("train", f"--config={TINY}", f"--workdir={tmp_path}", *KEYS)
    assert "the checkpoint of step 5" in out
    assert losses(tmp_path) == losses(whole)
    assert same_bits(arrays(tmp_path, 12), arrays(whole, 12))


def test_a_run_resumed_on_another_mesh_stays_on_the_curve(whole, tmp_path):
    run("train", f"--config={TINY}", f"--workdir={tmp_path}", *KEYS, "--config.train.stop_at=5")
    run(
        "train",
        f"--config={TINY}",
        f"--workdir={tmp_path}",
        *KEYS,
        "--simulate_devices=4",
        "--config.mesh.fsdp=2",
        "--config.mesh.tensor=2",
    )
    ours, theirs = (np.array([losses(f)[s] for s in range(1, 13)]) for f in (tmp_path, whole))
    assert np.abs(ours[:, 0] - theirs[:, 0]).max() <= 1e-5


def test_the_tree_on_disk_has_plain_names(whole):
    names = {
        path.split("/")[0] + "/" + path.split("/")[1] for path in Checkpoints(whole / "checkpoints").shapes(12)
    }
    assert {"params/embed", "params/layers", "params/final_norm", "optimizer/mu", "optimizer/nu", "counters/step"} <= names
    about = Checkpoints(whole / "checkpoints").about(12)
    assert about["step"] == 12 and about["data"]["next_batch"] == 12 and about["mesh"]["fsdp"] == 1


def test_rows_past_the_restored_step_are_dropped(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12")
    run("train", f"--config={TINY}", f"--workdir={tmp_path / 'run'}", *KEYS)
    steps = [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, 13))
    assert losses(tmp_path / "run") == losses(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_exits_with_3(number, tmp_path):
    process = start(
        "train", f"--config={TINY}", f"--workdir={tmp_path}", "--config.train.steps=100000", "--config.train.log_every=1"
    )
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(number)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "Traceback" not in err and "saved. To go on:" in err and f"--workdir={tmp_path}" in err
    saved = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert read_rows(tmp_path / "metrics.jsonl")[-1]["step"] == saved >= 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step_ends_the_command_at_once(number, tmp_path):
    process = start("train", f"--config={TINY}", f"--workdir={tmp_path}", JAX_ENABLE_COMPILATION_CACHE="false")
    for line in process.stdout:
        if line.startswith("weights:"):  # compiling now
            process.send_signal(number)
            break
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3 and "Traceback" not in err and "interrupted" in err
    assert not (tmp_path / "metrics.jsonl").exists()


def test_parameters_start_from_another_run_when_asked(whole, tmp_path):
    out = run(
        "train",
        f"--config={TINY}",
        f"--workdir={tmp_path}",
        "--config.train.steps=1",
        "--config.train.log_every=1",
        "--config.optimizer.warmup_steps=0",
        f"--config.checkpoint.restore_from={whole}",
        "--config.model.dropout=0.1",
    )
    count = len(jax.tree.leaves(build_job(config_of(), 1).model.specs))
    assert f"weights: {whole}, step 12 ({count} arrays: parameters alone)" in out
    assert losses(tmp_path)[1][0] < losses(whole)[3][0]  # not the loss of random weights


def test_a_whole_state_goes_on_from_another_run_at_its_step(whole, tmp_path):
    """The rows past step 4 are those of the run that the state came from: data, schedule and counters stand at one step."""
    source = f"--config.checkpoint.restore_from={whole}/checkpoints/8"
    out = run("train", f"--config={TINY}", f"--workdir={tmp_path}", *KEYS, source, "--config.checkpoint.restore=all")
    assert "step 8 (" in out and "arrays: the whole state)" in out
    assert losses(tmp_path) == {step: row for step, row in losses(whole).items() if step > 8}
    assert same_bits(arrays(tmp_path, 12), arrays(whole, 12))


def test_other_data_on_a_resume_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be. " * 400)
    keys = (f"--config={TINY}", f"--workdir={tmp_path}/run", *KEYS, f"--config.data.train={text}")
    run("train", *keys, "--config.train.stop_at=4")
    text.write_text("To be, or not to me. " * 400)
    assert "train_sha256" in run("train", *keys, status=2)
    assert "step 12/12" in run("train", *keys, "--allow_change")


def test_a_save_that_the_disk_has_no_room_for_does_not_begin(whole, tmp_path, monkeypatch):
    import jaxlm.checkpoints as module

    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    state = {"params": {"kernel": jax.numpy.zeros((1024, 1024))}}
    checkpoints.save(1, state, {})
    checkpoints.wait()
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**30, 2**30, 2**20))
    with pytest.raises(RunError, match=r"step 2 could not be written .* 4\.0 MiB, and 1\.0 MiB are free.* whole: 1\."):
        checkpoints.save(2, state, {})
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"1"}


def test_a_disk_that_fills_is_status_1_and_what_was_saved_stays_whole(whole, tmp_path):
    """Files may not grow past a limit: what a full disk is to a program, without filling one."""
    run("train", f"--config={TINY}", f"--workdir={tmp_path}", *KEYS, "--config.train.stop_at=5")
    before = arrays(tmp_path, 5)
    import resource
    import subprocess
    import sys

    from tests.system.commands import environment

    limited = subprocess.run(
        [sys.executable, "-m", "jaxlm.train", f"--config={TINY}", f"--workdir={tmp_path}", *KEYS],
        capture_output=True,
        text=True,
        env=environment(JAX_COMPILATION_CACHE_DIR=""),
        preexec_fn=lambda: (
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        ),
    )
    assert limited.returncode == 1, limited.stderr
    message = [line for line in limited.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in limited.stderr
    assert len(message) == 1 and "could not be written" in message[0] and "Checkpoints that are whole: 4, 5." in message[0]
    assert same_bits(arrays(tmp_path, 5), before)
    run("train", f"--config={TINY}", f"--workdir={tmp_path}", *KEYS)
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 12
