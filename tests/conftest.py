"""Eight CPU devices for every test, a compile cache that outlives the run, and light compiling: it dominates test time.

XLA's flags where some are given stand: `XLA_FLAGS=--xla_backend_optimization_level=3 bash scripts/test.sh` compiles as XLA does
by itself.
"""

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

# Both change how machine code is made of a program, not what the partitioner makes of it. Steps take as long, compiling a third.
LIGHT = (("xla_backend_optimization_level", "1", ""), ("xla_backend_extra_options", "xla_cpu_disable_new_fusion_emitters", ""))
if "XLA_FLAGS" not in os.environ:
    xla_flags.add(LIGHT)
xla_flags.add(xla_flags.SIMULATION_FLAGS)
