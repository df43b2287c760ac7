"""Qwen2.5 7B: 7,615,616,512 parameters.

The shape is of the Qwen team 2024, "Qwen2.5" (arXiv:2412.15115), table 1; biases on queries, keys and values.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=152_064, num_layers=28, embed_dim=3584, num_heads=28, num_kv_heads=4, mlp_dim=18_944, norm_epsilon=1e-6,
        rope_theta=1_000_000.0, qkv_bias=True, max_positions=131_072)
