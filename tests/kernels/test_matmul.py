"""Products that accumulate in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.matmul import add_bias, einsum


def test_bfloat16_operands_give_float32_sums_and_bfloat16_gradients():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((5, 300), (300, 7)))
    out, vjp = jax.vjp(lambda a, b: einsum("ij,jk->ik", a, b, jnp.float32), a, b)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, np.asarray(a, np.float64) @ np.asarray(b, np.float64), atol=1e-4)
    cotangent = rng.standard_normal((5, 7)).astype(np.float32)
    d_a, d_b = vjp(cotangent)
    assert d_a.dtype == d_b.dtype == jnp.bfloat16
    np.testing.assert_allclose(d_a.astype(np.float32), cotangent @ np.asarray(b, np.float32).T, atol=0.15)
    np.testing.assert_allclose(d_b.astype(np.float32), np.asarray(a, np.float32).T @ cotangent, atol=0.15)


def test_no_product_of_the_backward_pass_mixes_dtypes():
    a, b = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(lambda a, b: jnp.sin(einsum("ij,jk->ik", a, b, jnp.float32)).sum(), (0, 1)))(a, b)
    dots = [e for e in _equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(dots) >= 3 and all(v.aval.dtype == jnp.bfloat16 for e in dots for v in e.invars)


def test_a_wider_weight_is_rounded_and_its_gradient_is_not():
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((400, 5), (5, 7)))
    out, vjp = jax.vjp(lambda x, w: einsum("ij,jk->ik", x, w), x, w.astype(jnp.float32) * (1 + 1e-4))
    assert out.dtype == jnp.bfloat16 and np.array_equal(out, x @ w)
    cotangent = jnp.asarray(rng.standard_normal((400, 7)), jnp.bfloat16)
    d_x, d_w = vjp(cotangent)
    assert (d_x.dtype, d_w.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(d_w, np.asarray(x, np.float64).T @ np.asarray(cotangent, np.float64), atol=1e-3)


@pytest.mark.parametrize("pattern", ["bld,dhk->blhk", "blhk,hkd->bld", "bld,vd->blv", "btgrk,bsgk->bgtrs"])
def test_gradients_are_those_of_the_plain_einsum(pattern):
    rng = np.random.default_rng(2)
    sizes = dict(zip("bldhkvtgrs", (2, 3, 4, 5, 6, 7, 3, 2, 2, 5)))
    a, b = (jnp.asarray(rng.standard_normal([sizes[i] for i in word]), jnp.float16).astype(jnp.float32)
            for word in pattern.partition("->")[0].split(","))
    ours = jax.grad(lambda a, b: einsum(pattern, a.astype(jnp.float16), b, jnp.float32).sum(), (0, 1))(a, b)
    plain = jax.grad(lambda a, b: jnp.einsum(pattern, a, b).sum(), (0, 1))(a, b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=5e-3), ours, plain)


def test_a_bias_is_added_in_the_dtype_of_its_activation_and_its_gradient_summed_in_its_own():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((40, 50, 2, 3)), jnp.bfloat16)
    bias = jnp.asarray(rng.standard_normal((2, 3)), jnp.float32)
    out, vjp = jax.vjp(add_bias, x, bias)
    assert out.dtype == jnp.bfloat16 and np.array_equal(out, x + bias.astype(jnp.bfloat16))
    cotangent = jnp.asarray(rng.standard_normal(x.shape), jnp.bfloat16)
    d_x, d_bias = vjp(cotangent)
    assert np.array_equal(d_x, cotangent) and d_bias.dtype == jnp.float32
    np.testing.assert_allclose(d_bias, np.asarray(cotangent, np.float64).sum((0, 1)), atol=1e-4)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from _equations(getattr(inner, "jaxpr", inner))
