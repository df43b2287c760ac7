"""Flash attention as a function that can be differentiated, over kernels that are given: what all kernels of ours share.

The forward pass leaves its output and the log-sum-exp of each query's scores; the backward pass computes the scores again from
them (Dao 2023, arXiv:2307.08691). Gradients of queries and of keys and values are two kernels, each of which adds up what is
its own: nothing is added to memory by several programs at once, so the same call gives the same bits every time.

Few queries (decoding) would leave most of a GPU idle. Query heads that share a key head then become rows of one tile, and the
keys are cut into parts that are attended to apart and put together by their log-sum-exp.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels.attention.call import Call
from kernels.attention.chips import Tile, Tiles, capability, tiles_for
from kernels.attention.mask import Interval, Mask, key_tiles, query_tiles

# Names of what the backward pass needs of the forward pass, for a policy of rematerialisation that keeps it.
SAVED = ("flash_out", "flash_lse")
WIDEST = 256
FEW = 64                                       # rows, up to which a call is laid out as decoding
LEAST_PART = 256                               # keys of a part, when they are cut
PARTS_WANTED = 264                             # programs that fill a large GPU twice


@dataclasses.dataclass(frozen=True)
class Form:
    """What kernels are compiled for, besides shapes.

    Attributes:
      whole: tiles that are seen whole are told from those that need the mask.
      left: the mask cuts off keys before a query's interval, not only after it.
    """
    scale: float
    softcap: float | None
    tiles: Tiles
    segments: bool
    left: bool
    interpret: bool

    @property
    def whole(self) -> bool:
        return not self.segments


@dataclasses.dataclass(frozen=True)
class Engine:
    """The three kernels. Arrays are [B, T, H, K], [B, S, G, K] and [B, S, G, V]; lse and delta float32 [B, H, T]; the interval
    [B or 1, T]; ids None or those of queries and of keys; `tiles` int32 [B or 1, tiles of rows, numbers].

    Attributes:
      forward: (form, q, k, v, interval, tiles, ids) -> (out [B, T, H, V], lse).
      d_query: (form, q, k, v, d_out, lse, delta, interval, tiles, ids) -> d_q.
      d_key_value: the same, with tiles of queries for each tile of keys -> (d_k, d_v).
    """
    forward: Callable
    d_query: Callable
    d_key_value: Callable


def refusal(call: Call) -> str | None:
    """Why these kernels cannot serve a call, or None: they are for GPUs of NVIDIA from the Ampere generation on; interpreted they
    run anywhere."""
    if not call.interpret:
        known = capability(call.chip)
        if call.platform != "gpu" or not call.chip.startswith("NVIDIA"):
            return (f"its kernels are compiled for GPUs of NVIDIA, not for {call.platform} ({call.chip}); with "
                    "kernels.interpret=True they run anywhere, slowly")
        if known is not None and known < 8.0:
            return f"its kernels need compute capability 8.0; {call.chip} has {known}"
    if call.refusal:
        return call.refusal
    if call.dtype not in ("float32", "bfloat16", "float16"):
        return f"it takes float32, bfloat16 or float16, not {call.dtype}"
    if max(call.head_dim, call.value_dim) > WIDEST:
        return f"heads are {max(call.head_dim, call.value_dim)} wide; the most is {WIDEST}"
    return None


def not_by_itself(call: Call) -> str | None:
    """They are proved as far as that goes without a GPU, and nobody gets them unasked before they have run on one."""
    return "it has not run on a GPU yet, and has to be asked for by name"


def padded(size: int) -> int:
    """Columns of a tile for heads of `size`: a power of two, at least what a tensor core multiplies."""
    return max(16, 1 << (size - 1).bit_length())


def attention(engine: Engine, q_BTHK, k_BSGK, v_BSGV, mask: Mask, call: Call):
    """Output and log-sum-exp; see `kernels.attention.attention`."""
    T, S, R = q_BTHK.shape[1], k_BSGK.shape[1], call.group
    interval = mask.interval(T, S)
    ids = (mask.q_segment_ids_BT, mask.k_segment_ids_BS) if mask.segments else None
    width = max(call.head_dim, call.value_dim)
    form = Form(call.scale, call.softcap, tiles_for(call.chip, q_BTHK.dtype.itemsize, width, call.causal), mask.segments,
                mask.window is not None or mask.segments, call.interpret)
    if T * R <= FEW and T < S:
        return _few(engine, form, q_BTHK, k_BSGK, v_BSGV, interval, ids)
    return _flash(engine, form, q_BTHK, k_BSGK, v_BSGV, interval, ids)


def _few(engine, form, q_BTHK, k_BSGK, v_BSGV, interval, ids):
    """Few queries against many keys."""
    (B, T, H, K), (S, G, V) = q_BTHK.shape, v_BSGV.shape[1:]
    R, parts = H // G, _parts(S, B * G)
    small = 1 << max(4, (T * R - 1).bit_length())           # the least that a tensor core multiplies is 16 rows
    tile = dataclasses.replace(form.tiles.forward, q=min(small, form.tiles.forward.q), warps=4)
    form = dataclasses.replace(form, tiles=dataclasses.replace(form.tiles, forward=tile))
    rows = q_BTHK.reshape(B, T, G, R, K).transpose(0, 1, 3, 2, 4).reshape(B, T * R, G, K)

    def each_part(x):                          # [B, ...] as [B * parts, ...]
        return jnp.repeat(x, parts, axis=0) if x.shape[0] == B else jnp.tile(x, (B * parts,) + (1,) * (x.ndim - 1))

    offset = jnp.tile(jnp.arange(parts, dtype=jnp.int32) * (S // parts), B)[:, None]
    start, end = (jnp.clip(each_part(jnp.repeat(x, R, axis=1)) - offset, 0, S // parts) for x in interval)
    some = end > start
    cut = Interval(jnp.where(some, start, 0), jnp.where(some, end, 0))
    if ids is not None:
        ids = each_part(jnp.repeat(ids[0], R, axis=1)), ids[1].reshape(B * parts, -1)
    out, lse = _flash(engine, form, each_part(rows), k_BSGK.reshape(B * parts, -1, G, K), v_BSGV.reshape(B * parts, -1, G, V),
                      cut, ids)
    out, lse = out.reshape(B, parts, T, R, G, V), lse.reshape(B, parts, G, T, R)
    total = jax.nn.logsumexp(lse, axis=1)
    none = total == -jnp.inf
    share = jnp.exp(lse - jnp.where(none, 0.0, total)[:, None])
    out = jnp.sum(out.astype(jnp.float32) * share.transpose(0, 1, 3, 4, 2)[..., None], axis=1)        # [B, T, R, G, V]
    return (out.transpose(0, 1, 3, 2, 4).reshape(B, T, H, V).astype(q_BTHK.dtype),
            total.transpose(0, 1, 3, 2).reshape(B, H, T))


def _parts(S: int, programs: int) -> int:
    """Into how many equal parts to cut the keys."""
    parts = 1
    while S % (2 * parts) == 0 and S // (2 * parts) >= LEAST_PART and parts * programs < PARTS_WANTED:
        parts *= 2
    return parts


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(engine, form: Form, q, k, v, interval, ids):
    tile = form.tiles.forward
    tiles = key_tiles(interval, tile.q, tile.k, form.whole)
    return engine.forward(form, q, k, v, interval, _with_end(tiles, interval, tile), ids)


def _forward(engine, form, q, k, v, interval, ids):
    out, lse = _flash(engine, form, q, k, v, interval, ids)
    out, lse = checkpoint_name(out, SAVED[0]), checkpoint_name(lse, SAVED[1])
    return (out, lse), (q, k, v, interval, ids, out, lse)


def _backward(engine, form, residuals, cotangents):
    q, k, v, interval, ids, out, lse = residuals
    d_out, d_lse = cotangents
    d_out = d_out.astype(q.dtype)
    delta = jnp.einsum("bthv,bthv->bht", out.astype(jnp.float32), d_out.astype(jnp.float32)) - d_lse
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)         # of queries that see nothing: their weights are then 0
    given = form, q, k, v, d_out, lse, delta, interval
    tile = form.tiles.d_query
    d_q = engine.d_query(*given, _with_end(key_tiles(interval, tile.q, tile.k, form.whole), interval, tile), ids)
    tile = form.tiles.d_key_value
    d_k, d_v = engine.d_key_value(*given, query_tiles(interval, k.shape[1], tile.q, tile.k, form.whole).stacked(), ids)
    return d_q, d_k, d_v, None, None


_flash.defvjp(_forward, _backward)


def _with_end(tiles, interval, tile: Tile) -> jax.Array:
    """int32 [B or 1, tiles, 5]: the tiles, and past the last key that a tile of queries sees."""
    over = -interval.end.shape[1] % tile.q
    ends = jnp.pad(interval.end, ((0, 0), (0, over))).reshape(interval.end.shape[0], -1, tile.q)
    return jnp.concatenate([tiles.stacked(), jnp.max(ends, axis=-1)[..., None]], axis=-1)
