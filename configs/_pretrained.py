"""What configurations of models that others have trained share: values for going on from their weights.

A small rate that suits fine-tuning (AdamW, 2e-5, cosine to a tenth), bfloat16 products, sequences of
2,048 tokens, everything sharded over all devices. Weights and tokenizer come from a folder:

    --config=NAME --config.checkpoint.restore_from=FOLDER --config.data.tokenizer=FOLDER
"""

from jaxlm.config import default_config


def get_config(**model):
    config = default_config()
    config.model.update(model)
    config.mesh.fsdp = -1
    config.data.sequence_length = 2048
    config.optimizer.update(learning_rate=2e-5, warmup_steps=50, weight_decay=0.1, beta1=0.9, beta2=0.95, clip_norm=1.0)
    config.precision.compute = "bfloat16"
    config.train.update(steps=1000, global_batch_size=64, remat=("full",))
    return config
