"""Mistral 7B (v0.1): 7,241,732,096 parameters.

The shape is of Jiang et al. 2023, "Mistral 7B" (arXiv:2310.06825), table 1: every layer looks back 4,096 tokens.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=32_000, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14_336, window_pattern=(4096,),
        max_positions=32_768)
