"""XLA's flags: known to XLA, set only for NVIDIA GPUs, never over the user's."""

import os
import subprocess
import sys

from jaxlm import commandline, xla_flags
from jaxlm.xla_flags import GPU_FLAGS, SIMULATION_FLAGS, add, apply, nvidia_gpu_expected


def start_backend(flags):
    return subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], capture_output=True, text=True,
                          env=dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"))


def test_xla_knows_every_flag_and_would_refuse_another():
    done = start_backend(" ".join(f"--{name}={value}" for name, value, _ in GPU_FLAGS + SIMULATION_FLAGS))
    assert done.returncode == 0, done.stderr
    refused = start_backend("--xla_gpu_no_such_flag=1")
    assert refused.returncode != 0 and "xla_gpu_no_such_flag" in refused.stderr


def test_every_flag_has_a_reason():
    assert all(reason and name.startswith("xla_gpu_") for name, _, reason in GPU_FLAGS)
    assert all(reason and name.startswith("xla_cpu_") for name, _, reason in SIMULATION_FLAGS)


def test_simulated_devices_are_given_time_unless_the_user_says_otherwise():
    environ = {"XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=7"}
    add(SIMULATION_FLAGS, environ)
    words = environ["XLA_FLAGS"].split()
    assert words[0].endswith("=7") and len(words) == len(SIMULATION_FLAGS)


def test_on_a_cpu_nothing_is_set():
    environ = {}
    assert apply("cpu", environ) is None and environ == {}


def test_without_a_gpu_or_its_plugin_none_is_expected(monkeypatch):
    monkeypatch.setattr(xla_flags.importlib.util, "find_spec", lambda name: None)
    assert not nvidia_gpu_expected()


def test_on_a_gpu_all_are_set_and_the_line_shows_them():
    environ = {}
    line = apply("cuda", environ)
    assert all(f"--{name}={value}" in environ["XLA_FLAGS"].split() for name, value, _ in GPU_FLAGS)
    assert line == f"XLA_FLAGS: {environ['XLA_FLAGS']}"


def test_what_the_user_has_set_stands():
    environ = {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false --xla_dump_to=somewhere"}
    apply("cuda,cpu", environ)
    words = environ["XLA_FLAGS"].split()
    assert words[:2] == ["--xla_gpu_enable_latency_hiding_scheduler=false", "--xla_dump_to=somewhere"]
    assert sum("latency_hiding" in word for word in words) == 1 and len(words) == 1 + len(GPU_FLAGS)


def test_applying_twice_is_applying_once():
    environ = {}
    assert apply("gpu", environ) == apply("gpu", environ)


def test_a_cuda_plugin_without_a_gpu_is_not_started(monkeypatch):
    """It is there to compile for GPUs elsewhere; starting it prints a stack trace."""
    monkeypatch.setattr(xla_flags, "has_nvidia_gpu", lambda: False)
    for plugin, given, expected in ((True, {}, {"JAX_PLATFORMS": "cpu"}), (False, {}, {}),
                                    (True, {"JAX_PLATFORMS": "cuda"}, {"JAX_PLATFORMS": "cuda"})):
        monkeypatch.setattr(xla_flags, "has_cuda_plugin", lambda plugin=plugin: plugin)
        environ = dict(given)
        commandline.skip_cuda_without_gpu(environ)
        assert environ == expected
    monkeypatch.setattr(xla_flags, "has_nvidia_gpu", lambda: True)
    environ = {}
    commandline.skip_cuda_without_gpu(environ)
    assert environ == {}
