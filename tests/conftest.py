"""Eight CPU devices for every test, and a compile cache that outlives the run (compiling dominates test time)."""

import os
import pathlib
import signal

ROOT = pathlib.Path(__file__).parent.parent
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs this in the background hides it from children

from jaxlm import xla_flags  # noqa: E402 - imports no JAX

xla_flags.add(xla_flags.SIMULATION_FLAGS)
