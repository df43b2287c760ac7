"""A parameter tree with every kind of array that a model has, small, and its gradients."""

import jax
import numpy as np

from partitioning.array import ArraySpec
from partitioning.paths import map_paths

LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 3, 16, 4, 2, 4, 24, 32


def specs(dtype="float32", embed=EMBED, mlp=MLP, vocab=VOCAB):
    def array(*dims):
        sizes = dict(layers=LAYERS, embed=embed, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, mlp=mlp, vocab=vocab)
        return ArraySpec(tuple(sizes[d] for d in dims), dtype, dims)
    return {
        "embed": {"embedding": array("vocab", "embed")},
        "layers": {
            "attention": {
                "query": {"kernel": array("layers", "embed", "heads", "head_dim"), "bias": array("layers", "heads", "head_dim")},
                "key": {"kernel": array("layers", "embed", "kv_heads", "head_dim")},
                "output": {"kernel": array("layers", "heads", "head_dim", "embed"), "bias": array("layers", "embed")},
            },
            "mlp": {"up": {"kernel": array("layers", "embed", "mlp")}, "down": {"kernel": array("layers", "mlp", "embed")}},
            "norm": {"scale": array("layers", "embed")},
        },
        "final_norm": {"scale": array("embed")},
        "lm_head": {"kernel": array("embed", "vocab")},
    }


def arrays(tree_of_specs, seed, size=0.1):
    """Random arrays for the specs; layers differ in magnitude, so that mixing them shows."""
    def one(path, spec):
        rng = np.random.default_rng([seed, *path.encode()])
        x = size * rng.standard_normal(spec.shape)
        if spec.dims[:1] == ("layers",):
            x *= (10.0 ** np.arange(spec.shape[0])).reshape(-1, *[1] * (x.ndim - 1))
        return x.astype(np.float32)
    return jax.tree.map(lambda x, s: jax.device_put(x.astype(s.dtype)), map_paths(one, tree_of_specs), tree_of_specs)


def unstack(tree):
    """The same parameters with each layer's arrays on their own: 'layers' becomes a dict of layers."""
    layers = {f"layer{i}": jax.tree.map(lambda x: np.asarray(x)[i], tree["layers"]) for i in range(LAYERS)}
    return {**{k: v for k, v in tree.items() if k != "layers"}, "layers": layers}
