"""OLMo 2 7B: 7,298,617,344 parameters.

The shape is of OLMo team 2024, "2 OLMo 2 Furious" (arXiv:2501.00656), table 1: norms after each part alone,
and of all queries and keys of a token together.
How it is trained on is said in `_pretrained`.
"""

from configs import _pretrained


def get_config():
    return _pretrained.get_config(
        vocab_size=100_352, num_layers=32, embed_dim=4096, num_heads=32, mlp_dim=11_008, norm_epsilon=1e-6,
        norm_placement="after", qk_norm=True, qk_norm_over="all", rope_theta=500_000.0, max_positions=4096)
