"""The embedded default: a byte-level model of nine plays of Shakespeare, made for a laptop's CPU.

Trained for about three minutes on two cores it scores below 1.65 nats per byte on the held-out last tenth of the text
(`docs/benchmarks.md`). Sizes are such that it also runs on eight simulated devices under many meshes.
"""

from jaxlm.config import default_config


def get_config():
    config = default_config()
    config.model.vocab_size = 264              # 256 bytes, the end token, and room to divide by 8
    config.model.num_layers = 4
    config.model.embed_dim = 192
    config.model.num_heads = 4
    config.model.mlp_dim = 768
    config.model.activation = "relu_squared"
    config.model.qk_norm = True
    config.data.sequence_length = 256
    config.train.steps = 740
    config.train.global_batch_size = 8
    config.train.log_every = 20
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.007
    config.optimizer.adam_learning_rate = 0.003
    config.optimizer.weight_decay = 0.3
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 15
    config.optimizer.final_fraction = 0.0
    return config
