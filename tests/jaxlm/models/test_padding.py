"""What is padded to which size, and that nothing in the padding counts, even if it is not zero."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlm.config import ModelConfig
from jaxlm.models import build_model
from jaxlm.models.padding import PADDABLE, padded_sizes
from partitioning.padding import cut, fill
from tests.jaxlm.models.tiny import GPT2, LLAMA, batch, tiny

MULTIPLES = dict(vocab=5, heads=8, kv_heads=4, mlp=7)
SHAPES = {"llama": LLAMA, "gpt2": dict(GPT2), "qk_norm": dict(LLAMA, qk_norm=True, logit_softcap=5.0, tie_embeddings=True),
          "qk_norm over all heads": dict(LLAMA, qk_norm=True, qk_norm_over="all", norm_placement="both", norm_unit_offset=True,
                                         qkv_bias=True, rope_fraction=2 / 3),
          "relu": dict(LLAMA, activation="relu_squared", bias=True)}


def padding_of(shape):
    return padded_sizes(ModelConfig(**SHAPES[shape]), PADDABLE, MULTIPLES)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 16), st.integers(1, 16))
def test_heads_grow_by_whole_groups_and_no_more_than_they_need(kv_heads, group, heads_need, kv_need):
    config = ModelConfig(num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=4)
    sizes = padded_sizes(config, ("kv_heads",), dict(vocab=1, mlp=1, heads=heads_need, kv_heads=kv_need))
    H, G = sizes.get("heads", config.num_heads), sizes.get("kv_heads", config.kv_heads)
    assert H == G * group and H % heads_need == 0 and G % kv_need == 0
    assert not any(g * group % heads_need == 0 and g % kv_need == 0 for g in range(kv_heads, G))


def test_what_is_not_named_or_fits_already_is_not_padded():
    config = ModelConfig(vocab_size=50_257, num_heads=12, head_dim=4, mlp_dim=3072)
    eight = dict.fromkeys(PADDABLE, 8)
    assert padded_sizes(config, ("vocab", "mlp"), eight) == {"vocab": 50_264}
    assert padded_sizes(config, ("heads",), eight) == {"heads": 16, "kv_heads": 16}
    assert padded_sizes(config, (), eight) == {}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_padded_model_computes_the_same_and_its_padding_counts_for_nothing(shape):
    model, params = tiny(SHAPES[shape])
    padded = build_model(ModelConfig(**SHAPES[shape]), padding=padding_of(shape))
    zeros = jax.tree.map(lambda x, spec: fill(x, spec.shape), params, padded.specs)
    rng = np.random.default_rng(0)
    noise = jax.tree.map(lambda x, spec: x + np.where(fill(np.ones(spec.true_shape), spec.shape), 0, rng.random(spec.shape)
                                                      ).astype("float32"), zeros, padded.specs)

    def graded(model, params):
        return jax.jit(jax.value_and_grad(lambda p: sum(model.loss(p, batch(), z_loss=0.01)[:2])))(params)

    def is_close(a, b):                        # the gradient is of a sum: an array's rounding goes with its largest elements
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * max(5, np.abs(b).max()))

    loss, gradients = graded(model, params)
    for filling in (zeros, noise):
        ours, padded_gradients = graded(padded, filling)
        np.testing.assert_allclose(ours, loss, rtol=1e-6)
        true = jax.tree.map(lambda x, spec: cut(x, spec.true_shape), padded_gradients, padded.specs)
        jax.tree.map(is_close, true, gradients)
        if filling is zeros:
            jax.tree.map(lambda x, t: np.testing.assert_equal(np.count_nonzero(x), np.count_nonzero(t)), padded_gradients, true)


@pytest.mark.parametrize("shape", SHAPES)
def test_first_values_have_the_same_bits_and_padding_is_zero(shape):
    model, padded = (build_model(ModelConfig(**SHAPES[shape]), padding=padding) for padding in ({}, padding_of(shape)))
    ours, theirs = (jax.jit(m.init)(jax.random.key(1)) for m in (padded, model))
    theirs = jax.tree.map(lambda x, spec: fill(x, spec.shape), theirs, padded.specs)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), ours, theirs)
