"""Padding of a model's dims: which can be padded, to what size, and how the padding is kept from counting.

Padded parameters start as zeros. What the padding computes is zeroed where it would join the rest: the output of a padded
head, a padded hidden unit of the MLP. The logits of padded ids have no probability (`kernels.cross_entropy`). So nothing
depends on a padded parameter, its gradient is exactly 0, and it stays 0.
"""

import math
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp

from jaxlm.config import ModelConfig
from partitioning.padding import next_multiple

PADDABLE = ("vocab", "heads", "kv_heads", "mlp")


def padded_sizes(config: ModelConfig, pad: Collection[str], multiples: Mapping[str, int]) -> dict[str, int]:
    """Dim to padded size, for those that grow.

    Heads are padded by whole groups: one key and value head with all the query heads that read it, so that query head h reads
    key head h // (H / G) as before. So `heads` and `kv_heads` go together, whichever of them `pad` names.

    Args:
      config: with the true sizes.
      pad: the dims to pad, of PADDABLE.
      multiples: for each dim of PADDABLE what its size has to be a multiple of.
    """
    true = {"vocab": config.vocab_size, "mlp": config.mlp_dim, "heads": config.num_heads, "kv_heads": config.kv_heads}
    sizes = {dim: next_multiple(true[dim], multiples[dim]) for dim in ("vocab", "mlp") if dim in pad}
    if "heads" in pad or "kv_heads" in pad:
        group = config.num_heads // config.kv_heads
        step = math.lcm(multiples["kv_heads"], multiples["heads"] // math.gcd(multiples["heads"], group))
        sizes["kv_heads"] = next_multiple(config.kv_heads, step)
        sizes["heads"] = group * sizes["kv_heads"]
    return {dim: size for dim, size in sizes.items() if size != true[dim]}


def without_padding(x: jax.Array, dim: int, size: int) -> jax.Array:
    """`x` with zeros from `size` on along dimension number `dim`; itself if that is all of it."""
    if x.shape[dim] == size:
        return x
    return jnp.where(jnp.expand_dims(jnp.arange(x.shape[dim]) < size, range(1, x.ndim - dim)), x, jnp.zeros((), x.dtype))
