"""Rematerialisation: what a block keeps for the backward pass; the rest is computed again there.

  none   everything is kept, but for copies of weights, gathered or cast; nothing else is recomputed.
  full   only the block's input is kept.
  dots   the outputs of the matmuls with weights are kept, and those of attention where a kernel computes it; attention scores,
         norms and activations are recomputed.
  names  of activations: only those are kept. A block names the points in NAMES.

('dots', the default, is often the fastest too: what it recomputes is cheaper than to write and read back.)
"""

from collections.abc import Callable, Collection

import jax
from jax.ad_checkpoint import checkpoint_name

from kernels.attention import SAVED
from partitioning.declaration import DeclarationError, nearest

NAMES = {
    "query": "queries after bias, norm and rotation",
    "key": "keys after bias, norm and rotation",
    "value": "values",
    "attention": "what the heads attended to, before the output matrix",
    "attention_out": "output of the attention part, before it is added",
    "mlp_gate": "output of the gate matrix (gated MLP only)",
    "mlp_up": "output of the up matrix",
    "mlp_hidden": "input of the down matrix",
    "mlp_out": "output of the MLP, before it is added",
}


def name(x: jax.Array, point: str) -> jax.Array:
    """Marks x as one of NAMES."""
    assert point in NAMES
    return checkpoint_name(x, point)


def check(policy: tuple[str, ...]) -> None:
    """Raises DeclarationError for an unknown policy or name."""
    alone = ("none", "full", "dots")
    if not policy or (len(policy) > 1 and set(policy) & set(alone)):
        raise DeclarationError(f"config.train.remat = {policy!r}; expected one of {', '.join(alone)} alone, or names of "
                               f"activations: {', '.join(NAMES)}.")
    for item in policy:
        if item not in alone and item not in NAMES:
            raise DeclarationError(f"config.train.remat has {item!r}, which is no policy and no name of an activation: "
                                   f"{nearest(item, (*alone, *NAMES))}")


def apply(block: Callable, policy: tuple[str, ...], *, looped: bool, copied: Collection[tuple[int, ...]] = ()) -> Callable:
    """`block` with the policy.

    Args:
      looped: it is the body of a scan, where the compiler cannot undo the recomputation.
      copied: shapes of the weights that the block uses copies of, gathered from where they rest or cast. Whatever the policy, no
        copy is kept: all layers' together would be the whole model on every device, or one for each microbatch of a pipeline.
    """
    policies = jax.checkpoint_policies
    if policy == ("none",):
        if not copied:
            return block
        kept = _all_but_copies(frozenset(copied))
    elif policy == ("full",):
        kept = policies.nothing_saveable
    elif policy == ("dots",):
        kept = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable,
                                                policies.save_only_these_names(*SAVED))
    else:
        kept = policies.save_only_these_names(*policy, *(SAVED if "attention" in policy else ()))
    return jax.checkpoint(block, policy=kept, prevent_cse=not looped)


def _all_but_copies(shapes: frozenset[tuple[int, ...]]) -> Callable:
    """Keeps what is computed, but not what comes from moving or rounding an array of one of these shapes. (Names would not do:
    what is not kept is made again from what went into it, and that, one constraint or cast earlier, is as large.)"""
    def is_kept(primitive, *operands, **_):
        return primitive.name not in ("sharding_constraint", "convert_element_type") or operands[0].shape not in shapes

    return is_kept
