"""SmolLM2 1.7B: 1,711,376,384 parameters.

The shape is of Allal et al. 2025, "SmolLM2" (arXiv:2502.02737); vocabulary, width and RoPE base as released.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=49_152, num_layers=24, embed_dim=2048, num_heads=32, mlp_dim=8192, rope_theta=130_000.0, max_positions=8192,
        tie_embeddings=True)
