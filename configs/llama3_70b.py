"""Llama 3 70B: 70,553,706,496 parameters.

Sources as for `llama3_8b`: Grattafiori et al. 2024 (arXiv:2407.21783), table 3 (80 layers, width 8,192, 28,672 in the
MLP, 64 heads over 8 key and value heads, rate 1.5e-4). The mesh puts tensor parallelism over the 8 devices of a node
and shards parameters and optimizer state over the rest.
"""

from configs import llama3_8b


def get_config():
    config = llama3_8b.get_config()
    config.model.update(num_layers=80, embed_dim=8192, num_heads=64, mlp_dim=28_672)
    config.mesh.tensor = 8
    config.optimizer.learning_rate = 1.5e-4
    return config
