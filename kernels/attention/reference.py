"""Attention in plain XLA: the meaning of the contract, for every platform and every call.

Scores exist only for a block of queries at a time, against the keys that this block can see: a causal mask leaves half of
the square (plus half a block) unneeded, and static slices skip most of it. A few long blocks beat many short ones in
compile time and lose little: four save 37.5% of the square, infinitely many would save 50%.

Query heads that share a key head stay a dimension of their own (R) beside it (G): repeating the keys would cost memory,
and lose the sharding of the heads.
"""

import jax
import jax.numpy as jnp

from kernels.attention.call import Call
from kernels.attention.mask import Mask
from kernels.matmul import einsum

PER_DEVICE = False                             # the compiler partitions it
NUM_BLOCKS = 4
MIN_BLOCK = 64                                 # shorter blocks cost more to compile than they save
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)   # finite: a row of -inf would give NaN


def is_supported(call: Call) -> str | None:
    """Everything is."""
    return None


def not_by_itself(call: Call) -> str | None:
    """The last resort is always a choice."""
    return None


def attention(q_BTHK, k_BSGK, v_BSGV, mask: Mask, call: Call):
    """Output and log-sum-exp (None unless the call wants it); see `kernels.attention.attention`."""
    (B, T, H, K), (S, G) = q_BTHK.shape, k_BSGK.shape[1:3]
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
    outputs, sums = [], []
    for start, stop, first, last in visible_blocks(T, S, mask.causal, mask.window, mask.query_offset):
        scores_BGTRS = call.scale * einsum("btgrk,bsgk->bgtrs", q_BTGRK[:, start:stop], k_BSGK[:, first:last], jnp.float32)
        if call.softcap is not None:
            scores_BGTRS = call.softcap * jnp.tanh(scores_BGTRS / call.softcap)
        seen_BGTRS = mask.seen(start, stop, first, last)[:, None, :, None]
        scores_BGTRS = jnp.where(seen_BGTRS, scores_BGTRS, HIDDEN)
        weights_BGTRS = jax.nn.softmax(scores_BGTRS, axis=-1)
        if call.leaves_out:                    # only then can a query see nothing at all
            weights_BGTRS = jnp.where(seen_BGTRS, weights_BGTRS, 0.0)
        outputs.append(jnp.einsum("bgtrs,bsgv->btgrv", weights_BGTRS.astype(v_BSGV.dtype), v_BSGV[:, first:last]))
        if call.with_lse:
            lse_BGTR = jax.nn.logsumexp(scores_BGTRS, axis=-1)
            sums.append(jnp.where(jnp.any(seen_BGTRS, axis=-1), lse_BGTR, -jnp.inf) if call.leaves_out else lse_BGTR)
    out_BTGRV = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)
    lse_BHT = jnp.moveaxis(jnp.concatenate(sums, axis=2), 2, 3).reshape(B, H, T) if call.with_lse else None
    return out_BTGRV.reshape(B, T, H, -1), lse_BHT


def visible_blocks(T: int, S: int, causal: bool, window, query_offset) -> list[tuple[int, int, int, int]]:
    """(start, stop, first, last): queries [start, stop) see no key outside [first, last)."""
    if not causal or isinstance(query_offset, jax.Array):
        return [(0, T, 0, S)]
    block = max(MIN_BLOCK, -(-T // NUM_BLOCKS))
    out = []
    for start in range(0, T, block):
        stop = min(start + block, T)
        first = max(0, query_offset + start - window + 1) if isinstance(window, int) else 0
        last = min(S, query_offset + stop)
        out.append((start, stop, min(first, last - 1), last))
    return out
