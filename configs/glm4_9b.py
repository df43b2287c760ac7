"""GLM-4 9B: 9,399,951,360 parameters.

The shape is of the GLM team 2024, "ChatGLM" (arXiv:2406.12793); sizes as released: two key and value heads, RoPE on half of each
head.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=151_552, num_layers=40, embed_dim=4096, num_heads=32, num_kv_heads=2, head_dim=128, mlp_dim=13_696,
        norm_epsilon=1.5625e-7, rope_fraction=0.5, qkv_bias=True, max_positions=131_072)
