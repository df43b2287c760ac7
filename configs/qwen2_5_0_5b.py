"""Qwen2.5 0.5B: 494,032,768 parameters.

The shape is of the Qwen team 2024, "Qwen2.5" (arXiv:2412.15115), table 1; biases on queries, keys and values.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=151_936, num_layers=24, embed_dim=896, num_heads=14, num_kv_heads=2, mlp_dim=4864, norm_epsilon=1e-6,
        rope_theta=1_000_000.0, qkv_bias=True, max_positions=32_768, tie_embeddings=True)
