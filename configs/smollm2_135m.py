"""SmolLM2 135M: 134,515,008 parameters.

The shape is of Allal et al. 2025, "SmolLM2" (arXiv:2502.02737); vocabulary, width and RoPE base as released.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=49_152, num_layers=30, embed_dim=576, num_heads=9, num_kv_heads=3, mlp_dim=1536, rope_theta=100_000.0,
        max_positions=8192, tie_embeddings=True)
