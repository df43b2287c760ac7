"""Several processes train as one: the same numbers for any number of them, and an end of one is an end of all, soon and said."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxlm.logs import read_rows
from tests.system.commands import ROOT, TINY, environment, run, start

pytestmark = pytest.mark.slow
MESH = ("--config.mesh.data=2", "--config.mesh.fsdp=2")
KEYS = (f"--config={TINY}", "--config.train.log_every=2", "--config.optimizer.warmup_steps=2")
SIX = (*KEYS, *MESH, "--config.train.steps=6")


def processes(count, *arguments, each=()):
    """Starts the training command in `count` processes with four devices in all; `each` has one more argument for each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {
        "JAXLM_COORDINATOR": f"localhost:{port}",
        "JAXLM_NUM_PROCESSES": str(count),
        "JAX_NUM_CPU_DEVICES": str(4 // count),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    return [start("train", *arguments, *each[i:i + 1], **shared, JAXLM_PROCESS_ID=str(i)) for i in range(count)]


def finish(started, patience=120):
    """Exit statuses and (stdout, stderr) of each; all must end within so many seconds."""
    deadline = time.monotonic() + patience
    try:
        ends = [process.communicate(timeout=max(deadline - time.monotonic(), 1)) for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], ends


def when(process, beginning):
    """Reads a process's lines up to one with this beginning."""
    for line in process.stdout:
        if line.startswith(beginning):
            return
    pytest.fail(f"no line {beginning!r}: {process.stderr.read()}")


def losses(folder):
    return {row["step"]: row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row}


def on_the_curve(folder, whole):
    """Whether all losses of a run are those of the whole one, and the last evaluation too."""
    ours, theirs = losses(folder), losses(whole)
    evaluations = [read_rows(place / "metrics.jsonl")[-1]["eval_loss"] for place in (folder, whole)]
    both = ours.keys() & theirs.keys()
    return (both >= {2, 4, 6} and all(ours[step] == pytest.approx(theirs[step], abs=1e-5) for step in both)
            and evaluations[0] == pytest.approx(evaluations[1], abs=1e-5))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run("train", *SIX, "--simulate_devices=4", f"--workdir={folder}")
    return folder


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    codes, ends = finish(processes(4, *SIX, "--config.train.stop_at=4", f"--workdir={folder}"))
    assert codes == [0] * 4, ends
    return folder


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_four_processes_saved_any_number_goes_on_with_to_the_numbers_of_one(count, alone, saved_by_four, tmp_path):
    shutil.copytree(saved_by_four, tmp_path / "run")
    codes, ends = finish(processes(count, *SIX, f"--workdir={tmp_path / 'run'}"))
    assert codes == [0] * count, "\n".join(map("".join, ends))
    assert "the checkpoint of step 4" in ends[0][0] and on_the_curve(tmp_path / "run", alone)
    assert "step 6/6" in ends[0][0] and all("step 6/6" not in out for out, _ in ends[1:])      # only process 0 prints


def test_one_device_goes_on_with_what_four_processes_saved(alone, saved_by_four, tmp_path):
    shutil.copytree(saved_by_four, tmp_path / "run")
    run("train", *KEYS, "--config.train.steps=6", "--config.mesh.data=1", f"--workdir={tmp_path / 'run'}")
    assert on_the_curve(tmp_path / "run", alone)


def test_a_signal_to_one_process_stops_all_of_them_after_saving(tmp_path):
    """Though nothing is logged or saved meanwhile, at which they could meet."""
    keys = ("--config.train.steps=100000", "--config.train.log_every=100000")
    started = processes(2, *KEYS, *MESH, *keys, f"--workdir={tmp_path}")
    when(started[0], "step 1/")
    started[1].send_signal(signal.SIGTERM)
    codes, ends = finish(started, 60)
    assert codes == [3, 3] and "SIGTERM to process 1: stopped after step" in ends[0][1], ends
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [str(read_rows(tmp_path / "metrics.jsonl")[-1]["step"])]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_one_process_before_the_first_step_ends_all_of_them(victim, tmp_path):
    started = processes(2, *KEYS, *MESH, f"--workdir={tmp_path}")
    when(started[0], "weights:")
    started[victim].send_signal(signal.SIGTERM)
    codes, ends = finish(started, 60)
    assert codes == [3, 3], ends
    assert f"process {1 - victim} stops because process {victim} has ended: interrupted" in ends[1 - victim][1]
    assert not any("Traceback" in err for _, err in ends) and not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_process_is_killed_the_other_ends_with_the_reason(victim, tmp_path):
    keys = ("--config.train.steps=100000", "--config.distributed.heartbeat_timeout=10")
    started = processes(2, *KEYS, *MESH, *keys, f"--workdir={tmp_path}")
    when(started[0], "step 2/")
    started[victim].kill()
    codes, ends = finish(started, 60)
    assert codes[1 - victim] not in (0, 2, 3), ends
    assert re.search("another process, which has probably died|another task died", ends[1 - victim][1])


def test_an_error_of_one_process_ends_the_others_with_its_reason(tmp_path):
    """One that cannot see the run's files, as on a machine where the file system is not mounted."""
    run("train", *SIX, "--simulate_devices=4", "--config.train.stop_at=2", f"--workdir={tmp_path / 'run'}")
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "elsewhere" / "checkpoints")
    started = processes(2, *SIX, each=[f"--workdir={tmp_path / 'run'}", f"--workdir={tmp_path / 'elsewhere'}"])
    codes, ends = finish(started, 60)
    assert codes == [1, 1], ends
    said = "process 1 has another list of checkpoints than process 0: none, not 2. All processes must see"
    assert all(said in err for _, err in ends)
    assert losses(tmp_path / "run").keys() == {1, 2} and not any("Traceback" in err for _, err in ends)


def test_a_process_that_alone_cannot_write_ends_the_others_with_its_reason(tmp_path):
    """Orbax would have each wait for the other for twenty minutes."""
    shell = f"[ $JAXLM_PROCESS_ID = 1 ] && ulimit -f 20; exec {sys.executable} -m jaxlm.train"
    keys = (*KEYS, *MESH, "--config.train.steps=9", "--config.checkpoint.every=3", f"--workdir={tmp_path}")
    command = [sys.executable, str(ROOT / "scripts" / "launch_local.py"), "-n", "2", "--cpu-devices=2", "--grace=60", "--",
               "bash", "-c", f"{shell} {' '.join(keys)}"]
    done = subprocess.run(command, env=environment(JAX_ENABLE_COMPILATION_CACHE="false"), capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 1 and "killing" not in done.stderr
    assert "[1] error: the checkpoint of step 3 could not be written" in done.stderr and "a file may not grow" in done.stderr
    assert "process 0 stops because process 1 has ended: error: the checkpoint of step 3 could not be written" in done.stderr


def launch(count, *flags, folder):
    """The launcher with the training command, one device to a process."""
    return [sys.executable, str(ROOT / "scripts" / "launch_local.py"), "-n", str(count), "--cpu-devices=1", *flags, "--",
               sys.executable, "-m", "jaxlm.train", *KEYS, "--config.mesh.data=-1", f"--workdir={folder}"]


def test_a_job_that_loses_a_process_goes_on_with_those_that_are_left(tmp_path):
    """Four processes lose one; a batch of 8 does not divide over three; two go on, with the curve of the undisturbed run."""
    keys = ("--config.train.steps=60", "--config.checkpoint.every=4", "--config.checkpoint.keep=100")
    run("train", *KEYS, *keys, "--simulate_devices=4", "--config.mesh.data=-1", f"--workdir={tmp_path / 'whole'}")
    command = [*launch(4, "--min-processes=2", folder=tmp_path / "run"), *keys]
    job = subprocess.Popen(command, env=environment(JAX_ENABLE_COMPILATION_CACHE="false"), text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)
    pids = {}
    for line in job.stderr:
        if found := re.match(r"launch: process (\d) has pid (\d+)", line):
            pids[int(found[1])] = int(found[2])
        if len(pids) == 4:
            break
    for line in job.stdout:
        if line.startswith("[0] step 10/"):
            os.kill(pids[2], signal.SIGKILL)
            break
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    assert "process 2 was killed by SIGKILL" in err and "3 processes do not suit the declaration" in err
    assert "starting again with 3 process(es)" in err and "devices: 2 x cpu" in out and "the checkpoint of step" in out
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert ours.keys() >= theirs.keys() and all(ours[step] == pytest.approx(theirs[step], abs=1e-5) for step in theirs)
    rates = [{row["step"]: row["learning_rate"] for row in read_rows(tmp_path / name / "metrics.jsonl") if "loss" in row}
             for name in ("run", "whole")]
    assert all(rates[0][step] == rates[1][step] for step in theirs)
