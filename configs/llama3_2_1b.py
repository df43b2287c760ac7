"""Llama 3.2 1B: 1,235,814,400 parameters.

The shape is of the released weights' configuration; the architecture is of Grattafiori et al. 2024 (arXiv:2407.21783).
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=128_256, num_layers=16, embed_dim=2048, num_heads=32, num_kv_heads=8, mlp_dim=8192, rope_theta=500_000.0,
        rope_scaling=dict(kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
        max_positions=131_072, tie_embeddings=True)
