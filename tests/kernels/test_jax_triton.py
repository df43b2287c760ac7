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
from tests.kernels import oracle
from tests.kernels.test_attention import CASES, assert_close, runs

needs_triton = pytest.mark.skipif(triton_kernels.triton is None, reason="Triton is not installed (pip install '.[gpu]')")
SHORT = ("causal, one key head, wide values", "full, short queries", "full, short keys", "packed in pieces",
         "packed, window, cap, sinks", "window of one", "later queries", "queries past the keys")


@needs_triton
@pytest.mark.parametrize("case", SHORT)
def test_values_and_gradients_are_those_of_numpy_in_float64(case):
    (T, S, H, G, K, V), options, pattern = CASES[case]
    rng = np.random.default_rng(0)
    q, k, v, d_out = (rng.standard_normal((1, n, h, w)).astype(np.float32)
                      for n, h, w in ((T, H, K), (S, G, K), (S, G, V), (T, H, V)))
    d_lse, sinks = rng.standard_normal((1, H, T)).astype(np.float32), rng.standard_normal(H).astype(np.float32)
    options = dict(options)
    sinks = sinks if options.pop("sinks", False) else None
    ids = {} if pattern is None else dict(q_segment_ids_BT=runs(pattern, T), k_segment_ids_BS=runs(pattern, S))

    def loss(q, k, v):
        out, lse = kernels.attention.attention(q, k, v, sinks_H=sinks, return_lse=True, backend="jax_triton", interpret=True,
                                               **ids, **options)
        return jnp.sum(out * d_out) + jnp.sum(jnp.where(lse > -jnp.inf, lse * d_lse, 0)), (out, lse)

    (_, (out, lse)), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    want = oracle.attend(q, k, v, d_out, d_lse, sinks=sinks, **ids, **options)
    assert_close(out, want.out, 1e-5)
    assert np.array_equal(np.isfinite(lse), np.isfinite(want.lse))
    assert_close(np.where(np.isfinite(lse), lse, 0), np.where(np.isfinite(want.lse), want.lse, 0), 1e-5)
    for got, wanted in zip(gradients, (want.d_q, want.d_k, want.d_v)):
        assert_close(got, wanted, 1e-4)


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
