"""Llama 3 8B: 8,030,261,248 parameters.

Shape and peak learning rate are of Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3
(32 layers, width 4,096, 14,336 in the MLP, 32 heads over 8 key and value heads, RoPE base 500,000, rate 3e-4); the
vocabulary of 128,256 and the epsilon of 1e-5 are of the released weights. A step has 4 million tokens, the first
batch size of that paper's section 3.4.1, in sequences of 8,192, the length of the later ones; the number of steps is the
user's to choose.

Text and tokenizer are the packaged ones until `data.train` and `data.tokenizer` say otherwise.
"""

from jaxlm.config import default_config


def get_config():
    config = default_config()
    config.model.update(
        vocab_size=128_256, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14_336,
        norm="rmsnorm", norm_epsilon=1e-5, activation="swiglu", position="rope", rope_theta=500_000.0, max_positions=8192)
    config.mesh.fsdp = -1
    config.data.sequence_length = 8192
    config.optimizer.update(learning_rate=3e-4, warmup_steps=8000, weight_decay=0.1, beta1=0.9, beta2=0.95, clip_norm=1.0)
    config.precision.compute = "bfloat16"
    config.train.update(steps=100_000, global_batch_size=512, remat=("full",))
    return config
