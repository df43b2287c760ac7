"""Qwen3 0.6B: 596,049,920 parameters.

The shape is of the Qwen team 2025, "Qwen3" (arXiv:2505.09388), table 1; norms of queries and keys instead of biases.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=151_936, num_layers=28, embed_dim=1024, num_heads=16, num_kv_heads=8, head_dim=128, mlp_dim=3072,
        norm_epsilon=1e-6, rope_theta=1_000_000.0, qk_norm=True, max_positions=40_960, tie_embeddings=True)
