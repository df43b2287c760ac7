"""Products that accumulate in float32."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels.matmul import einsum_float32


def test_bfloat16_operands_give_float32_sums_and_bfloat16_gradients():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((5, 300), (300, 7)))
    out, vjp = jax.vjp(lambda a, b: einsum_float32("ij,jk->ik", a, b), a, b)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, np.asarray(a, np.float64) @ np.asarray(b, np.float64), atol=1e-4)
    cotangent = rng.standard_normal((5, 7)).astype(np.float32)
    d_a, d_b = vjp(cotangent)
    assert d_a.dtype == d_b.dtype == jnp.bfloat16
    np.testing.assert_allclose(d_a.astype(np.float32), cotangent @ np.asarray(b, np.float32).T, atol=0.15)
    np.testing.assert_allclose(d_b.astype(np.float32), np.asarray(a, np.float32).T @ cotangent, atol=0.15)


def test_no_product_of_the_backward_pass_mixes_dtypes():
    a, b = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(lambda a, b: jnp.sin(einsum_float32("ij,jk->ik", a, b)).sum(), (0, 1)))(a, b)
    dots = [e for e in _equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(dots) >= 3 and all(v.aval.dtype == jnp.bfloat16 for e in dots for v in e.invars)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from _equations(getattr(inner, "jaxpr", inner))
