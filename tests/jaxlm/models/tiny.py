"""Tiny models in the shapes of GPT-2 and Llama 3, with every parameter away from its special initial value."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import ModelConfig
from jaxlm.models import build_model

SIZES = dict(vocab_size=37, num_layers=3, embed_dim=16, num_heads=4, mlp_dim=24, max_positions=32)
GPT2 = dict(SIZES, norm="layernorm", activation="gelu", position="learned", bias=True, tie_embeddings=True)
LLAMA = dict(SIZES, num_kv_heads=2, head_dim=6, rope_theta=100.0)
B, L = 4, 12


def tiny(shape=LLAMA, *, build=None, **changes):
    """A model and its parameters: drawn, then moved at random so that gains differ from 1 and offsets from 0."""
    model = build_model(ModelConfig(**{**shape, **changes}), **(build or {}))
    params = jax.jit(model.init)(jax.random.key(0))
    rng = np.random.default_rng(1)
    return model, jax.tree.map(lambda x: x + jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype), params)


def batch(seed=0, length=L):
    """A batch whose rows have different numbers of targets."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, SIZES["vocab_size"], (B, length + 1)).astype(np.int32)
    mask = np.arange(length) < rng.integers(1, length + 1, (B, 1))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask, "example": np.arange(B, dtype=np.int32)}
