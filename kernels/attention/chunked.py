"""Attention in plain XLA with memory that grows with the length alone, on any platform.

The scores of a tile of queries against a tile of keys exist at a time, and the softmax is put together on the way (Milakov and
Gimelshein 2018, arXiv:1805.02867; Rabe and Staats 2021, arXiv:2112.05682). The backward pass computes them again from the
log-sum-exp (Dao et al. 2022, arXiv:2205.14135, section 3). Loops visit only the tiles that some query sees.

On a CPU each row of the batch and each key head goes through alone, so that its tiles stay in the cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels.attention.call import Call
from kernels.attention.flash import SAVED
from kernels.attention.mask import Mask, key_tiles

PER_DEVICE = True
BLOCK = 256                                    # of queries, and of keys
SHORT = 1024                                   # up to here plain XLA is as fast, and leaner to compile


def is_supported(call: Call) -> str | None:
    """Whatever can run on each device's block."""
    return call.refusal


def not_by_itself(call: Call) -> str | None:
    """Short sequences gain nothing."""
    if call.query_length < SHORT:
        return f"plain XLA serves {call.query_length} queries (below {SHORT}) as well"
    return None


@dataclasses.dataclass(frozen=True)
class _Form:
    """Sizes and static facts: tiles of `bq` queries in R heads against `bk` keys."""
    bq: int
    bk: int
    R: int
    K: int
    V: int
    scale: float
    softcap: float | None
    one_by_one: bool


def attention(q_BTHK, k_BSGK, v_BSGV, mask: Mask, call: Call):
    """Output and log-sum-exp; see `kernels.attention.attention`."""
    (B, T, H, K), (S, G, V) = q_BTHK.shape, v_BSGV.shape[1:]
    form = _Form(min(BLOCK, T), min(BLOCK, S), H // G, K, V, call.scale, call.softcap, call.platform == "cpu")
    interval = mask.interval(T, S)
    tiles = key_tiles(interval, form.bq, form.bk, whole=False)

    def per_batch(x, block):                   # int32 [B, tiles, block], for each key head
        x = jnp.broadcast_to(x, (B, x.shape[1]))
        return _tiled(x[..., None, None], block)[..., 0]

    facts = {"start": per_batch(interval.start, form.bq), "end": per_batch(interval.end, form.bq)}
    if mask.segments:
        facts |= {"q_ids": per_batch(mask.q_segment_ids_BT, form.bq), "k_ids": per_batch(mask.k_segment_ids_BS, form.bk)}
    facts = {name: jnp.repeat(x, G, axis=0) for name, x in facts.items()}
    first, last = (jnp.repeat(jnp.broadcast_to(x, (B, x.shape[1])), G, axis=0) for x in (tiles.first, tiles.last))
    facts |= {"first": first, "last": last}
    q_NTRK = _tiled(q_BTHK, form.bq, form.R)
    k_NSK, v_NSV = _tiled(k_BSGK, form.bk), _tiled(v_BSGV, form.bk)
    out, lse = _attend(form, q_NTRK, k_NSK, v_NSV, facts)
    lse = lse.reshape(B, G, -1, form.R, form.bq).transpose(0, 1, 3, 2, 4).reshape(B, H, -1)[..., :T]
    return _untiled(out, T, G, form.bq, form.R), lse


def _tiled(x_BTHK, block, R=1):
    """[B, T, G * R, K] as [B * G, tiles, R * block, K], zeros past the end."""
    B, T, H, K = x_BTHK.shape
    x = jnp.pad(x_BTHK, ((0, 0), (0, -T % block), (0, 0), (0, 0)))
    x = x.reshape(B, -1, block, H // R, R, K).transpose(0, 3, 1, 4, 2, 5)
    return x.reshape(B * (H // R), -1, R * block, K)


def _untiled(x, T, G, block, R=1):
    N, tiles, _, K = x.shape
    x = x.reshape(N // G, G, tiles, R, block, K).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(N // G, tiles * block, G * R, K)[:, :T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form, q, k, v, facts):
    return _each(form, functools.partial(_forward, form), q, k, v, facts)


def _attend_forward(form, q, k, v, facts):
    out, lse = (checkpoint_name(x, name) for x, name in zip(_attend(form, q, k, v, facts), SAVED))
    return (out, lse), (q, k, v, facts, out, lse)


def _attend_backward(form, residuals, cotangents):
    q, k, v, facts, out, lse = residuals
    d_out, d_lse = cotangents
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1) - d_lse
    return *_each(form, functools.partial(_backward, form), q, k, v, facts, d_out.astype(q.dtype), lse, delta), None


_attend.defvjp(_attend_forward, _attend_backward)


def _each(form, function, *arguments):
    """`function` of every row and key head, one after the other or all at once. It takes and gives arrays [tiles, ...]."""
    return jax.lax.map(lambda one: function(*one), arguments) if form.one_by_one else jax.vmap(function)(*arguments)


def _product(pattern, a, b):
    return jnp.einsum(pattern, a, b, preferred_element_type=jnp.float32)


def _scores(form, q, k, facts, i, j):
    """Scores of tile i of queries against tile j of keys, float32 [R * bq, bk], -inf where not seen; and before the cap."""
    raw = form.scale * _product("qk,sk->qs", q, k)
    scores = raw if form.softcap is None else form.softcap * jnp.tanh(raw / form.softcap)
    key = j * form.bk + jnp.arange(form.bk, dtype=jnp.int32)
    seen = (key >= facts["start"][i][:, None]) & (key < facts["end"][i][:, None])
    if "q_ids" in facts:
        seen = seen & (facts["q_ids"][i][:, None] == facts["k_ids"][j])
    seen = jnp.tile(seen, (form.R, 1)) if form.R > 1 else seen
    return jnp.where(seen, scores, -jnp.inf), scores


def _forward(form, q, k, v, facts):
    rows = form.R * form.bq

    def tile(i):
        def step(j, carry):
            top, total, out = carry
            scores, _ = _scores(form, q[i], k[j], facts, i, j)
            new = jnp.maximum(top, jnp.max(scores, axis=-1))
            safe = jnp.where(new == -jnp.inf, 0.0, new)
            weights = jnp.exp(scores - safe[:, None])
            shrink = jnp.exp(top - safe)
            out = out * shrink[:, None] + _product("qs,sv->qv", weights.astype(v.dtype), v[j])
            return new, total * shrink + jnp.sum(weights, axis=-1), out

        start = jnp.full((rows,), -jnp.inf), jnp.zeros((rows,)), jnp.zeros((rows, form.V))
        top, total, out = jax.lax.fori_loop(facts["first"][i], facts["last"][i], step, start)
        none = total == 0
        return (out / jnp.where(none, 1.0, total)[:, None]).astype(q.dtype), jnp.where(none, -jnp.inf, top + jnp.log(total))

    return jax.lax.map(tile, jnp.arange(q.shape[0]))


def _backward(form, q, k, v, facts, d_out, lse, delta):
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)         # of queries that see nothing: their weights are then 0

    def add(total, j, part):
        return jax.lax.dynamic_update_index_in_dim(total, total[j] + part, j, 0)

    def tile(i, carry):
        d_q, d_k, d_v = carry

        def step(j, carry):
            d_q_i, d_k, d_v = carry
            scores, capped = _scores(form, q[i], k[j], facts, i, j)
            weights = jnp.exp(scores - lse[i][:, None])
            d_v = add(d_v, j, _product("qs,qv->sv", weights.astype(v.dtype), d_out[i]))
            d_scores = weights * (_product("qv,sv->qs", d_out[i], v[j]) - delta[i][:, None])
            if form.softcap is not None:
                d_scores = d_scores * (1 - jnp.square(capped / form.softcap))
            d_scores = d_scores.astype(q.dtype)
            d_k = add(d_k, j, _product("qs,qk->sk", d_scores, q[i]))
            return d_q_i + _product("qs,sk->qk", d_scores, k[j]), d_k, d_v

        start = jnp.zeros((form.R * form.bq, form.K)), d_k, d_v
        d_q_i, d_k, d_v = jax.lax.fori_loop(facts["first"][i], facts["last"][i], step, start)
        return jax.lax.dynamic_update_index_in_dim(d_q, (form.scale * d_q_i).astype(q.dtype), i, 0), d_k, d_v

    zeros = jnp.zeros(q.shape, q.dtype), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    d_q, d_k, d_v = jax.lax.fori_loop(0, q.shape[0], tile, zeros)
    return d_q, (form.scale * d_k).astype(k.dtype), d_v.astype(v.dtype)
