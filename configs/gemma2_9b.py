"""Gemma 2 9B: 9,241,705,984 parameters.

The shape is of the Gemma team 2024, "Gemma 2" (arXiv:2408.00118), table 1: norms before and after each part, local and global
layers in turn, caps on scores and logits.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=256_000, num_layers=42, embed_dim=3584, num_heads=16, num_kv_heads=8, head_dim=256, mlp_dim=14_336,
        norm_epsilon=1e-6, norm_placement="both", norm_unit_offset=True, activation="geglu", window_pattern=(4096, None),
        attention_scale=256**-0.5, attention_softcap=50.0, logit_softcap=30.0, embed_scale=3584**0.5, max_positions=8192,
        tie_embeddings=True)
