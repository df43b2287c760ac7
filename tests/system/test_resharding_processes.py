"""A checkpoint that some processes have written is read by another number of them, bit for bit, and verified by all together."""

import os
import socket
import subprocess
import sys

import pytest

from jaxlm.checkpoints import Checkpoints
from tests.system.commands import ROOT, TINY, environment, run
from tests.system.test_resume import arrays, same_bits

pytestmark = pytest.mark.slow
# Number of processes, devices of each, mesh.
JOBS = {
    "one": (1, 1, ("mesh.data=1", "mesh.fsdp=1")),
    "two": (2, 2, ("mesh.data=2", "mesh.fsdp=2", "sharding.zero=1", "sharding.zero_axes=data")),
    "two, tensor": (2, 1, ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=2")),
    "four": (4, 1, ("mesh.data=1", "mesh.fsdp=4")),
    "four, pipeline": (4, 1, ("mesh.data=1", "mesh.fsdp=2", "mesh.pipe=2")),
}


def rewrite(source, to, job):
    """The checkpoint of step 6 of `source`, read and written by a job; exit statuses and what each process said."""
    count, devices, keys = JOBS[job]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if count > 1:
        shared |= {"JAXLM_COORDINATOR": f"localhost:{port}", "JAXLM_NUM_PROCESSES": str(count)}
    words = [sys.executable, str(ROOT / "tests" / "system" / "rewrite.py"), str(source), str(to), "6", *keys]
    started = [subprocess.Popen(words, env=environment(**shared, JAXLM_PROCESS_ID=str(i)) if count > 1 else environment(**shared),
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for i in range(count)]
    said = [process.communicate(timeout=240)[0] for process in started]
    return [process.returncode for process in started], said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run("train", f"--config={TINY}", f"--workdir={folder}", "--config.train.steps=6")
    return folder


def test_four_processes_to_two_to_one_to_two(whole, tmp_path):
    expected, source = arrays(whole, 6), whole
    for number, job in enumerate(("four", "two, tensor", "four, pipeline", "one", "two")):
        to = tmp_path / str(number)
        codes, said = rewrite(source, to, job)
        assert codes == [0] * JOBS[job][0], said
        assert Checkpoints(to / "checkpoints").damage(6) == []
        assert same_bits(arrays(to, 6), expected), job
        source = to


def test_damage_that_one_process_finds_is_known_to_all(whole, tmp_path):
    codes, said = rewrite(whole, tmp_path / "four", "four")
    assert codes == [0] * 4, said
    files = [path for path in (tmp_path / "four" / "checkpoints" / "6").rglob("*") if path.is_file() and path.parent.name == "d"]
    largest = max(files, key=os.path.getsize)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    codes, said = rewrite(tmp_path / "four", tmp_path / "two", "two")
    assert codes == [1, 1] and all("AssertionError" in words for words in said), said
    assert not (tmp_path / "two").exists()
