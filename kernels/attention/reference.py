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
from kernels.matmul import einsum

NUM_BLOCKS = 4
MIN_BLOCK = 64                                 # shorter blocks cost more to compile than they save
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)   # finite: a row of -inf would give NaN


def is_supported(call: Call) -> str | None:
    """Everything is."""
    return None


def attention(q_BTHK, k_BSGK, v_BSGK, *, causal, window, query_offset, q_segment_ids_BT, k_segment_ids_BS, softcap, scale):
    """See `kernels.attention.attention`."""
    (B, T, H, K), (S, G) = q_BTHK.shape, k_BSGK.shape[1:3]
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
    outputs = []
    for start, stop, first, last in visible_blocks(T, S, causal, window, query_offset):
        scores_BGTRS = scale * einsum("btgrk,bsgk->bgtrs", q_BTGRK[:, start:stop], k_BSGK[:, first:last], jnp.float32)
        if softcap is not None:
            scores_BGTRS = softcap * jnp.tanh(scores_BGTRS / softcap)
        seen = _seen(jnp.arange(start, stop), jnp.arange(first, last), causal, window, query_offset)
        if q_segment_ids_BT is not None:
            q_ids, k_ids = q_segment_ids_BT[:, start:stop, None], k_segment_ids_BS[:, None, first:last]
            seen = seen & (q_ids == k_ids) & (q_ids > 0)
        seen_BGTRS = seen[:, None, :, None]
        weights_BGTRS = jax.nn.softmax(jnp.where(seen_BGTRS, scores_BGTRS, HIDDEN), axis=-1)
        if q_segment_ids_BT is not None:       # only then can a query see nothing at all
            weights_BGTRS = jnp.where(seen_BGTRS, weights_BGTRS, 0.0)
        outputs.append(jnp.einsum("bgtrs,bsgk->btgrk", weights_BGTRS.astype(v_BSGK.dtype), v_BSGK[:, first:last]))
    out_BTGRK = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)
    return out_BTGRK.reshape(B, T, H, K)


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


def _seen(queries_T, keys_S, causal, window, query_offset):
    """Boolean [1 or B, T, S]: which keys the places alone let a query see."""
    q_T1 = jnp.expand_dims(jnp.atleast_1d(query_offset), (1, 2)) + queries_T[None, :, None]
    distance = q_T1 - keys_S
    if not causal:
        return jnp.ones_like(distance, dtype=bool)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
