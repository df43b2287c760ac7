"""Phi-3 mini (4k): 3,821,079,552 parameters.

The shape is of Abdin et al. 2024, "Phi-3" (arXiv:2404.14219), section 2; window and widths as released.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=32_064, num_layers=32, embed_dim=3072, num_heads=32, mlp_dim=8192, window_pattern=(2047,), max_positions=4096)
