"""A configuration small enough to compile in seconds, on real text, with everything that makes meshes differ: four layers,
grouped queries, and batches whose shards hold different numbers of targets."""

from jaxlm.config import default_config


def get_config():
    config = default_config()
    config.model.num_layers = 4
    config.model.embed_dim = 32
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_dim = 64
    config.data.sequence_length = 32
    config.train.steps = 50
    config.train.global_batch_size = 8
    config.train.log_every = 10
    config.train.eval_steps = 2
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 5
    config.checkpoint.every = 0
    config.log.tensorboard = False
    return config
