"""Qwen3 8B: 8,190,735,360 parameters.

The shape is of the Qwen team 2025, "Qwen3" (arXiv:2505.09388), table 1; norms of queries and keys instead of biases.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=151_936, num_layers=36, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=12_288,
        norm_epsilon=1e-6, rope_theta=1_000_000.0, qk_norm=True, max_positions=40_960)
