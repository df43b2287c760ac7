"""NVIDIA's cuDNN through `jax.nn.dot_product_attention`, for the calls that it serves exactly.

It is never handed a mask as an array, which costs it most of its speed: what its own causal and window masks cannot say goes to
another backend. Nor is it asked for the log-sum-exp, which JAX rounds to the dtype of the output.
"""

import ctypes.util
import functools
import importlib.util
import os

import jax

from kernels.attention.call import Call
from kernels.attention.chips import capability

PER_DEVICE = True


def is_supported(call: Call) -> str | None:
    """16-bit inputs on a GPU of NVIDIA, with a mask that cuDNN knows."""
    major = capability(call.chip)
    if call.platform != "gpu" or not call.chip.startswith("NVIDIA"):
        return f"cuDNN runs on GPUs of NVIDIA, not on {call.platform} ({call.chip})"
    widest = 256 if major is not None and major >= 9.0 else 128
    checks = (
        (call.refusal, call.refusal),
        (call.interpret, "cuDNN cannot be interpreted"),
        (call.dtype not in ("bfloat16", "float16"), f"cuDNN's flash attention takes bfloat16 or float16, not {call.dtype}"),
        (call.segments, "it has no segment ids that need not be runs of places"),
        (call.softcap is not None, "it has no cap on scores"),
        (call.with_lse, "JAX rounds its log-sum-exp to the dtype of the output"),
        (call.decoding, "its queries and keys have to start and end together"),
        (call.window == "traced", "its window has to be known when the program is compiled"),
        (call.value_dim != call.head_dim, f"keys of width {call.head_dim} and values of width {call.value_dim} differ"),
        (call.head_dim % 8 or call.head_dim > widest,
         f"heads are {call.head_dim} wide; there it takes multiples of 8 up to {widest}"),
        (not _is_installed(), "cuDNN is not installed (pip install 'jaxlm[gpu]')"),
    )
    return next((reason for applies, reason in checks if applies), None)


# Either has XLA ask cuDNN for its deterministic backward pass (openxla/xla pull request 14125).
DETERMINISTIC = ("xla_gpu_exclude_nondeterministic_ops", "xla_gpu_deterministic_ops")


def not_by_itself(call: Call) -> str | None:
    """A resumed run is to repeat bit for bit."""
    words = os.environ.get("XLA_FLAGS", "").split()
    if any(f"--{name}{value}" in words for name in DETERMINISTIC for value in ("", "=true", "=1")):
        return None
    return (f"its backward pass repeats bit for bit only with XLA_FLAGS=--{DETERMINISTIC[0]}=true, and a resumed run is to; "
            "it can be asked for by name")


@functools.cache
def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None or ctypes.util.find_library("cudnn") is not None
    except ModuleNotFoundError:
        return False


def attention(q_BTHK, k_BSGK, v_BSGV, mask, call: Call):
    """Output and None; see `kernels.attention.attention`."""
    window = None if mask.window is None else (mask.window - 1, 0)
    return jax.nn.dot_product_attention(q_BTHK, k_BSGK, v_BSGV, scale=call.scale, is_causal=mask.causal,
                                        local_window_size=window, implementation="cudnn"), None
