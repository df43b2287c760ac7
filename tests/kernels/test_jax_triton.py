"""The kernels in Triton's own language: values and gradients, through Triton's interpreter, and what is said without Triton."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import kernels.attention
from kernels.attention import UnsupportedError, triton_kernels
from tests.kernels import grid

needs_triton = pytest.mark.skipif(triton_kernels.triton is None, reason="Triton is not installed (pip install '.[gpu]')")
CASES = [case for case in grid.covering() if max(case.lengths) <= 200 and case.width <= 128][::4]     # it is slow


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_those_of_numpy_in_float64(case):
    errors = grid.errors(case, "jax_triton", interpret=True)
    assert grid.is_right(errors), errors


@needs_triton
@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed (pip install '.[gpu]')")
@pytest.mark.parametrize("kind, dtype", [("A100-SXM4-80GB", "bfloat16"), ("H200", "bfloat16"), ("H200", "float32")])
def test_forward_and_backward_lower_and_compile_for_gpus_that_are_not_here(kind, dtype):
    x = jax.ShapeDtypeStruct((1, 200, 4, 64), jnp.dtype(dtype))
    device = AbstractDevice(device_kind=f"NVIDIA {kind}", num_cores=108, platform="gpu")
    step = jax.grad(lambda *x: kernels.attention.attention(*x, backend="jax_triton").astype(jnp.float32).sum(), (0, 1, 2))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(step).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"triton_kernel_call", text)) == 3


def test_without_triton_the_backend_says_so_and_how_to_get_it(monkeypatch):
    monkeypatch.setattr(triton_kernels, "triton", None)
    monkeypatch.setattr(kernels.attention, "choose", kernels.attention.choose.__wrapped__)
    x = np.zeros((1, 4, 2, 16), np.float32)
    with pytest.raises(UnsupportedError, match=r"'jax_triton'.*triton is not installed.*jaxlm\[gpu\]"):
        kernels.attention.attention(x, x, x, backend="jax_triton")
