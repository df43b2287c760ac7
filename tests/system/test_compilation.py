"""A run compiles its step once, and reads nothing from the devices but where it logs."""

import subprocess
import sys

import pytest

from tests.system.commands import TINY, environment

COUNT = """
import sys, jax
from jaxlm import commandline, train
names = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **facts: names.append(facts.get("fun_name")) if name.endswith("backend_compile_duration") else None)
reads = []
get = jax.device_get
jax.device_get = lambda x: (reads.append(1), get(x))[1]
status = commandline.run(train.main, train.arguments(), sys.argv[1:])
print("compiled", sum(1 for name in names if name and "train_step" in name), "read", len(reads), "status", status)
"""


def counted(*arguments):
    out = subprocess.run(
        [sys.executable, "-c", COUNT, *arguments],
        capture_output=True,
        text=True,
        env=environment(JAX_ENABLE_COMPILATION_CACHE="false"),
    )
    assert "compiled" in out.stdout, out.stderr
    words = out.stdout.split("compiled ")[1].split()
    return int(words[0]), int(words[2]), int(words[4])


@pytest.mark.parametrize("mesh", [(), ("--simulate_devices=4", "--config.mesh.fsdp=2", "--config.mesh.tensor=2")])
def test_the_step_is_compiled_once_and_numbers_are_read_at_logged_steps_only(mesh, tmp_path):
    compiled, reads, status = counted(
        f"--config={TINY}",
        f"--workdir={tmp_path}",
        "--config.train.steps=20",
        "--config.train.log_every=10",
        "--config.data.eval_fraction=0.0",
        *mesh,
    )
    assert (compiled, status) == (1, 0)
    assert reads == 3  # steps 1, 10 and 20
