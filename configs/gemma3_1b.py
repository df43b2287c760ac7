"""Gemma 3 1B: 999,885,952 parameters.

The shape is of the Gemma team 2025, "Gemma 3" (arXiv:2503.19786): five local layers of 512 tokens, whose RoPE has a
base of its own, to each global one; norms of queries and keys instead of caps.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=262_144, num_layers=26, embed_dim=1152, num_heads=4, num_kv_heads=1, head_dim=256, mlp_dim=6912,
        norm_epsilon=1e-6, norm_placement="both", norm_unit_offset=True, activation="geglu", qk_norm=True,
        window_pattern=(512, 512, 512, 512, 512, None), rope_theta=1_000_000.0, rope_local_theta=10_000.0,
        attention_scale=256**-0.5, embed_scale=1152**0.5, max_positions=32_768, tie_embeddings=True)
