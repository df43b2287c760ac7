"""GPT-2 small: 124,439,808 parameters.

The shape is that of Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2, as released
(vocabulary 50,257, 1,024 positions, LayerNorm, biases, tied embeddings, GELU in its tanh form). The paper gives no
optimizer figures; those here are of Brown et al. 2020 (arXiv:2005.14165), table 2.1 and appendix B, GPT-3 small:
rate 6e-4, half a million tokens per step, cosine to a tenth, Adam with 0.9 and 0.95, clipping at 1, weight decay 0.1.

Text and tokenizer are the packaged ones until `data.train` and `data.tokenizer` say otherwise.
"""

from jaxlm.config import default_config


def get_config():
    config = default_config()
    config.model.update(
        vocab_size=50_257, num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072, norm="layernorm", norm_epsilon=1e-5,
        activation="gelu", position="learned", max_positions=1024, bias=True, tie_embeddings=True)
    config.mesh.fsdp = -1
    config.data.sequence_length = 1024
    config.optimizer.update(learning_rate=6e-4, warmup_steps=700, weight_decay=0.1, beta1=0.9, beta2=0.95, clip_norm=1.0)
    config.precision.compute = "bfloat16"
    config.train.update(steps=20_000, global_batch_size=512)
    return config
