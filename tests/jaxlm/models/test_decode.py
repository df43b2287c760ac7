"""Decoding with a cache equals computing everything again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jaxlm.models.tiny import GPT2, LLAMA, B, batch, tiny

SHAPES = {"gpt2": GPT2, "llama": LLAMA, "windows": dict(LLAMA, window_pattern=(3, None), qk_norm=True),
          "local RoPE": dict(LLAMA, window_pattern=(3, None), rope_local_theta=7.0, rope_fraction=2 / 3, norm_placement="both",
                             embed_scale=4.0, attention_scale=0.3),
          "unrolled": dict(LLAMA, scan_layers=False, window_pattern=(3, None))}


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_text_with_the_cache_is_the_text_without(name):
    model, params = tiny(SHAPES[name])
    prompt = batch()["inputs"][:, :5]
    logits = jax.jit(model.logits)
    step = jax.jit(model.decode, donate_argnums=2)
    tokens, cache = prompt, model.init_cache(B, 16)
    out, cache = step(params, prompt, cache)
    for _ in range(8):
        # One padded length is one compile; causality hides what lies behind.
        again = logits(params, np.pad(tokens, ((0, 0), (0, 16 - tokens.shape[1]))))[:, tokens.shape[1] - 1]
        np.testing.assert_allclose(out[:, -1], again, atol=1e-5)
        chosen = np.argmax(out[:, -1], axis=-1).astype(np.int32)[:, None]
        assert np.array_equal(chosen[:, 0], np.argmax(again, axis=-1))
        tokens = np.concatenate([tokens, chosen], axis=1)
        out, cache = step(params, chosen, cache)
    assert np.array_equal(cache["length"], [13] * B)


def test_prompts_of_different_lengths_padded_at_their_end_decode_as_if_alone():
    model, params = tiny()
    tokens = batch()["inputs"]
    lengths = np.array([3, 8, 1, 5], np.int32)
    padded = np.where(np.arange(8) < lengths[:, None], tokens[:, :8], 0)
    out, cache = jax.jit(model.decode)(params, padded, model.init_cache(B, 12), length=lengths)
    following = tokens[:, 8:9]
    logits = jax.jit(model.logits)
    after, cache = jax.jit(model.decode)(params, following, cache)
    assert np.array_equal(cache["length"], lengths + 1)
    for row, length in enumerate(lengths):
        alone = logits(params, np.concatenate([tokens[row:row + 1, :length], following[row:row + 1]], axis=1))
        np.testing.assert_allclose(out[row, length - 1], alone[0, length - 1], atol=1e-5)
        np.testing.assert_allclose(after[row, 0], alone[0, length], atol=1e-5)


def test_a_padded_scalar_length_and_a_prompt_in_two_parts_give_the_same():
    model, params = tiny()
    tokens = batch()["inputs"][:1]
    decode = jax.jit(model.decode)
    whole, _ = decode(params, tokens[:, :9], model.init_cache(1, 16))
    padded = np.concatenate([tokens[:, :6], np.full((1, 2), 36, np.int32)], axis=1)
    _, cache = decode(params, padded, model.init_cache(1, 16), length=jnp.int32(6))
    rest, cache = decode(params, tokens[:, 6:9], cache)
    np.testing.assert_allclose(rest, whole[:, 6:], atol=1e-5)
    assert np.array_equal(cache["length"], [9])


def test_the_cache_has_the_compute_dtype_and_fills_to_its_end():
    model, params = tiny(build=dict(compute_dtype="bfloat16"))
    cache = model.init_cache(1, 4)
    assert cache["key"].dtype == jnp.bfloat16 and cache["key"].shape == (3, 1, 4, 2, 6)
    out, cache = model.decode(params, batch()["inputs"][:1, :4], cache)
    assert np.all(np.isfinite(out)) and np.all(np.any(np.asarray(cache["key"], np.float32), axis=-1))
