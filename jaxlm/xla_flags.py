"""The XLA flags that we set, for NVIDIA GPUs and for simulated devices: a table each, with reasons.

XLA reads the variable XLA_FLAGS when the first backend starts, so `apply` comes before anything asks JAX for devices. What
the user has put into the variable stands. A name that XLA does not know ends the process, so a test tries all of these.
"""

import importlib.util
import os
import pathlib
from collections.abc import MutableMapping

# name                                            value           reason
GPU_FLAGS = (
    ("xla_gpu_enable_latency_hiding_scheduler",   "true",         "starts collectives early and waits for them late, "
                                                                  "so that they run beside the matmuls"),
    ("xla_gpu_all_gather_combine_threshold_bytes", str(1 << 28),  "one gather for the weights of a layer, not one per array"),
    ("xla_gpu_reduce_scatter_combine_threshold_bytes", str(1 << 28), "the same for the gradients of a layer"),
    ("xla_gpu_all_reduce_combine_threshold_bytes", str(1 << 28),  "the same for gradients that are replicated"),
    ("xla_gpu_all_reduce_splitter_ignore_profitability_check", "true", "with parameters spread over some axes of the batch, a "
                                                                  "gradient is scattered over those before the others sum it"),
)

# For simulated devices: they share the cores, so one that keeps the others waiting is slow, not stuck.
SIMULATION_FLAGS = (
    ("xla_cpu_collective_call_terminate_timeout_seconds", "1200", "XLA ends a process whose device waits longer"),
    ("xla_cpu_collective_call_warn_stuck_timeout_seconds", "120", "and warns of one that waits longer than this"),
)


def nvidia_gpu_expected(platforms: str | None = None) -> bool:
    """Whether JAX will find an NVIDIA GPU, told without starting a backend.

    Args:
      platforms: what `jax_platforms` says, if anything: a list such as 'cpu' or 'cuda,cpu'.
    """
    if platforms:
        return bool({"cuda", "gpu"} & set(platforms.split(",")))
    return has_nvidia_gpu() and has_cuda_plugin()


def has_nvidia_gpu() -> bool:
    """Whether the system shows one, here or through Windows."""
    return any(pathlib.Path("/dev").glob("nvidia[0-9]*")) or pathlib.Path("/dev/dxg").exists()


def has_cuda_plugin() -> bool:
    """Whether JAX's plugin for NVIDIA GPUs is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def apply(platforms: str | None = None, environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Adds the table's flags to XLA_FLAGS where an NVIDIA GPU is expected, but for those that the user has set.

    Returns:
      A line to print, or None where nothing is set.
    """
    if not nvidia_gpu_expected(platforms):
        return None
    add(GPU_FLAGS, environ)
    return f"XLA_FLAGS: {environ['XLA_FLAGS']}"


def add(flags: tuple, environ: MutableMapping[str, str] = os.environ) -> None:
    """Adds the flags of a table to XLA_FLAGS, but for those that are there already."""
    given = environ.get("XLA_FLAGS", "")
    taken = {word.lstrip("-").partition("=")[0] for word in given.split()}
    ours = [f"--{name}={value}" for name, value, _ in flags if name not in taken]
    environ["XLA_FLAGS"] = " ".join([given, *ours]).strip()
