"""Several processes train as one: the same numbers, and a signal to any of them stops all of them after saving."""

import signal
import socket

import pytest

from jaxlm.logs import read_rows
from tests.system.commands import TINY, run, start

pytestmark = pytest.mark.slow
MESH = ("--config.mesh.data=2", "--config.mesh.fsdp=2")
KEYS = (f"--config={TINY}", "--config.train.log_every=2", "--config.optimizer.warmup_steps=2", *MESH)


def processes(count, *arguments):
    """Starts the training command in `count` processes with four devices in all."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {
        "JAXLM_COORDINATOR": f"localhost:{port}",
        "JAXLM_NUM_PROCESSES": str(count),
        "JAX_NUM_CPU_DEVICES": str(4 // count),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    return [start("train", *KEYS, *arguments, **shared, JAXLM_PROCESS_ID=str(i)) for i in range(count)]


def finish(started):
    ends = [process.communicate(timeout=240) for process in started]
    return [process.returncode for process in started], ends


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run("train", *KEYS, "--simulate_devices=4", "--config.train.steps=6", f"--workdir={folder}")
    return [row.get("loss", row.get("eval_loss")) for row in read_rows(folder / "metrics.jsonl")]


def test_two_processes_train_evaluate_and_resume_to_the_numbers_of_one(alone, tmp_path):
    first = finish(processes(2, "--config.train.steps=6", "--config.train.stop_at=4", f"--workdir={tmp_path}"))
    assert first[0] == [0, 0], first[1]
    second = finish(processes(2, "--config.train.steps=6", f"--workdir={tmp_path}"))
    assert second[0] == [0, 0], second[1]
    steps = {row["step"]: row["loss"] for row in read_rows(tmp_path / "metrics.jsonl") if "loss" in row}
    whole = dict(zip((1, 2, 4, 6), alone))
    assert steps.keys() >= whole.keys() and all(steps[s] == pytest.approx(whole[s], abs=1e-5) for s in whole)
    assert read_rows(tmp_path / "metrics.jsonl")[-1]["eval_loss"] == pytest.approx(alone[-1], abs=1e-5)
    assert "step 6/6" in second[1][0][0] and "step 6/6" not in second[1][1][0]      # only process 0 prints


def test_a_signal_to_one_process_stops_all_of_them_after_saving(tmp_path):
    started = processes(2, "--config.train.steps=100000", f"--workdir={tmp_path}")
    for line in started[0].stdout:
        if line.startswith("step 2/"):
            started[1].send_signal(signal.SIGTERM)
            break
    codes, ends = finish(started)
    assert codes == [3, 3], ends
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [str(read_rows(tmp_path / "metrics.jsonl")[-1]["step"])]
