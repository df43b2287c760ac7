"""Model FLOPs and peaks: the formula against counts by hand and by brute force, and against published figures."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from jaxlm.config import ModelConfig
from jaxlm.flops import matmul_parameters, mean_keys, model_flops_per_token, peak_flops

LLAMA3_8B = ModelConfig(vocab_size=128_256, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14_336,
                        max_positions=8192)
GPT2 = ModelConfig(vocab_size=50_257, num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072, activation="gelu", bias=True,
                   tie_embeddings=True, position="learned", norm="layernorm", max_positions=1024)


def test_matmul_parameters_are_all_but_the_lookup_the_norms_and_the_biases():
    # Published totals: Llama 3 8B has 8,030,261,248 parameters, GPT-2 small 124,439,808.
    assert matmul_parameters(LLAMA3_8B) == 8_030_261_248 - 128_256 * 4096 - (2 * 32 + 1) * 4096
    biases_and_norms = 12 * (2 * 2 * 768 + 4 * 768 + 3072 + 768) + 2 * 768
    assert matmul_parameters(GPT2) == 124_439_808 - 1024 * 768 - biases_and_norms


def test_the_output_matrix_counts_once_tied_or_not():
    assert matmul_parameters(GPT2) == matmul_parameters(dataclasses.replace(GPT2, tie_embeddings=False))


def test_the_forward_pass_by_the_compilers_count_is_a_third_of_the_formula():
    model = ModelConfig(vocab_size=64, num_layers=1, embed_dim=32, num_heads=2, mlp_dim=48, activation="gelu")
    length = 16

    def forward(x_LD):
        q_LD, k_LD, v_LD = (x_LD @ jnp.zeros((32, 32)) for _ in range(3))
        scores_HLL = jnp.einsum("lhk,shk->hls", q_LD.reshape(length, 2, 16), k_LD.reshape(length, 2, 16))
        mixed_LD = jnp.einsum("hls,shk->lhk", scores_HLL, v_LD.reshape(length, 2, 16)).reshape(length, 32)
        return mixed_LD @ jnp.zeros((32, 32)) @ jnp.zeros((32, 48)) @ jnp.zeros((48, 32)) @ jnp.zeros((32, 64))

    def matmul_flops(jaxpr):
        total = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                size = 2 * equation.outvars[0].aval.size
                for dim in contracted:
                    size *= equation.invars[0].aval.shape[dim]
                total += size
            for inner in jaxprs_in_params(equation.params):
                total += matmul_flops(inner)
        return total

    counted = matmul_flops(jax.make_jaxpr(forward)(jnp.zeros((length, 32))).jaxpr)
    causal_half = 2 * 2 * length * length * 32 / 2
    assert 3 * (counted - causal_half) == model_flops_per_token(model, length) * length


def test_attention_adds_its_causal_half():
    extra = model_flops_per_token(LLAMA3_8B, 8192) - 6 * matmul_parameters(LLAMA3_8B)
    assert extra == 12 * 32 * 4096 * 8192 / 2


@pytest.mark.parametrize("length, window", [(4096, 512), (1000, 999), (4096, None), (4096, 8192)])
def test_a_window_needs_the_keys_that_it_shows(length, window):
    exact = sum(min(place + 1, window or length) for place in range(length)) / length
    assert mean_keys(length, window) == pytest.approx(exact, abs=0.5)      # half a key: a token's own counts half


def test_windowed_layers_count_by_the_pattern():
    alternating = dataclasses.replace(LLAMA3_8B, window_pattern=(1024, None))
    extra = model_flops_per_token(alternating, 8192) - 6 * matmul_parameters(alternating)
    assert extra == 12 * 4096 * (16 * 4096 + 16 * mean_keys(8192, 1024))


@pytest.mark.parametrize("kind, dtype, expected", [
    ("NVIDIA H200", "bfloat16", 989e12), ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12), ("NVIDIA H100 PCIe", "float16", 756e12),
    ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12), ("NVIDIA A100-SXM4-40GB", "float32", 156e12),
    ("NVIDIA L4", "bfloat16", 121e12), ("NVIDIA L40S", "bfloat16", 362e12),
    ("Tesla V100-SXM2-16GB", "bfloat16", None), ("TPU v5 lite", "bfloat16", 197e12),
    ("TPU v5", "bfloat16", 459e12), ("TPU v6 lite", "bfloat16", 918e12), ("NVIDIA GB200", "bfloat16", 2500e12),
    ("cpu", "float32", None), ("NVIDIA of the future", "bfloat16", None)])
def test_the_peak_is_the_vendors_dense_figure_for_the_device_and_none_if_unknown(kind, dtype, expected):
    assert peak_flops(kind, dtype) == expected
