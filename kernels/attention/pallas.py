"""Flash attention for GPUs of NVIDIA, written in Pallas and compiled by Triton.

What is used of Pallas' Triton primitives stands in the first part of this file, so that their removal from JAX would cost one
place. Programs of one head lie next to each other, the last tiles of queries first: under a causal mask they take longest.
Scores are in base 2, for exp2 is what the hardware has.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels.attention import flash
from kernels.attention.call import Call

PER_DEVICE = True
LOG2_E = math.log2(math.e)


is_supported, not_by_itself = flash.refusal, flash.not_by_itself


def attention(q_BTHK, k_BSGK, v_BSGV, mask, call: Call):
    """Output and log-sum-exp; see `kernels.attention.attention`."""
    return flash.attention(ENGINE, q_BTHK, k_BSGK, v_BSGV, mask, call)


# What is used of Pallas.

def _launch(kernel, grid, tile, interpret, inputs, outputs):
    """Runs a kernel. `inputs`: (array, block shape, index map); `outputs`: (shape and dtype, block shape, index map)."""
    return pl.pallas_call(
        kernel, grid=grid, in_specs=[pl.BlockSpec(*where) for _, *where in inputs],
        out_specs=[pl.BlockSpec(*where) for _, *where in outputs], out_shape=[shape for shape, *_ in outputs],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages), interpret=interpret,
    )(*(array for array, *_ in inputs))


def _rows(ref, start, count, width, high=None, head=None):
    """Rows [start, start + count) of a ref [any, padded width] or [any, heads, padded width]; zeros from row `high` on (None: all
    are there) and past the width."""
    block = ref.at[pl.ds(start, count), :] if head is None else ref.at[pl.ds(start, count), head, :]
    mask = None if high is None else (start + jnp.arange(count, dtype=jnp.int32) < high)[:, None]
    if ref.shape[-1] != width:
        columns = (jnp.arange(ref.shape[-1], dtype=jnp.int32) < width)[None]
        mask = columns if mask is None else mask & columns
    return plt.load(block) if mask is None else plt.load(block, mask=mask, other=0.0)


def _places(ref, start, count, other, high=None, head=None):
    """Places [start, start + count) of a ref [any] or [heads, any]; `other` from place `high` on (None: all are there)."""
    block = ref.at[pl.ds(start, count)] if head is None else ref.at[head, pl.ds(start, count)]
    if high is None:
        return plt.load(block)
    return plt.load(block, mask=start + jnp.arange(count, dtype=jnp.int32) < high, other=other)


def _save(ref, value, high, width=None):
    """Writes the rows of a block up to `high`, and of each row `width` columns."""
    mask = jnp.arange(value.shape[0], dtype=jnp.int32) < high
    if width is not None:
        mask = mask[:, None] & (jnp.arange(value.shape[1], dtype=jnp.int32) < width)[None]
    plt.store(ref, value.astype(ref.dtype), mask=mask)


def _product(a, b):
    """In float32 never by way of TF32, whatever precision JAX is set to: it would leave three digits."""
    return plt.dot(a, b, allow_tf32=False)


# The kernels. `numbers` of a tile are those of `mask.Tiles`, and past the last key that any of its queries sees.

def _score(form, a, b):
    """Scores of the rows of a against those of b, in base 2; and their tanh where they are capped (else None)."""
    raw = _product(a, b.T)
    if form.softcap is None:
        return raw * (form.scale * LOG2_E), None
    capped = jnp.tanh(raw * (form.scale / form.softcap))
    return capped * (form.softcap * LOG2_E), capped


def _hidden(form, scores, key, start, end, q_ids, k_ids, query_axis):
    """Scores with -inf where a query does not see a key. `key`: the keys' places."""
    key_axis = 1 - query_axis
    key, start, end = (jnp.expand_dims(x, axis) for x, axis in ((key, query_axis), (start, key_axis), (end, key_axis)))
    seen = key < end
    if form.left:
        seen = seen & (key >= start)
    if form.segments:
        seen = seen & (jnp.expand_dims(q_ids, key_axis) == jnp.expand_dims(k_ids, query_axis))
    return jnp.where(seen, scores, -jnp.inf)


def _over(form, tiles_ref, body, carry, masked_first):
    """The carry after all tiles to visit. `body(masked)` is the step of a loop; `masked_first`: tiles before those that are seen
    whole may need the mask."""
    first, inside, outside, last = (tiles_ref[n] for n in range(4))
    if form.whole:
        if masked_first:
            carry = jax.lax.fori_loop(first, inside, body(True), carry)
        carry = jax.lax.fori_loop(inside, outside, body(False), carry)
        first = outside
    return jax.lax.fori_loop(first, last, body(True), carry)


def _of_queries(form, tile, sizes, q_ref, start_ref, end_ref, tiles_ref, ids_refs):
    """What both kernels over tiles of queries begin with: (queries left from this tile on, its queries, a function that loads the
    keys and values of a tile, one that hides what is not seen)."""
    T, S, K, V, last_tile = sizes
    left = T - (last_tile - pl.program_id(0)) * tile.q
    q = _rows(q_ref, 0, tile.q, K, left)
    start, end = (_places(ref, 0, tile.q, 0, left) for ref in (start_ref, end_ref))
    q_ids = _places(ids_refs[0], 0, tile.q, 0, left) if form.segments else None
    high = tiles_ref[4]

    def load(k_ref, v_ref, j, masked):
        return (_rows(ref, j * tile.k, tile.k, width, high if masked else None) for ref, width in ((k_ref, K), (v_ref, V)))

    def hide(scores, j):
        key = j * tile.k + jnp.arange(tile.k, dtype=jnp.int32)
        k_ids = _places(ids_refs[1], j * tile.k, tile.k, 0, S) if form.segments else None
        return _hidden(form, scores, key, start, end, q_ids, k_ids, query_axis=0)

    return left, q, load, hide


def _forward_kernel(q_ref, k_ref, v_ref, start_ref, end_ref, tiles_ref, *refs, form, tile, sizes):
    left, q, load, hide = _of_queries(form, tile, sizes, q_ref, start_ref, end_ref, tiles_ref, refs)
    out_ref, lse_ref = refs[-2:]

    def body(masked):
        def step(j, carry):
            out, top, total = carry
            k, v = load(k_ref, v_ref, j, masked)
            scores, _ = _score(form, q, k)
            scores = hide(scores, j) if masked else scores
            new = jnp.maximum(top, jnp.max(scores, axis=1))
            safe = jnp.where(new == -jnp.inf, 0.0, new) if masked else new
            weights = jnp.exp2(scores - safe[:, None])
            shrink = jnp.exp2(top - safe)
            out = out * shrink[:, None] + _product(weights.astype(v.dtype), v)
            return out, new, total * shrink + jnp.sum(weights, axis=1)

        return step

    empty = (jnp.zeros((tile.q, v_ref.shape[-1]), jnp.float32), jnp.full((tile.q,), -jnp.inf, jnp.float32),
             jnp.zeros((tile.q,), jnp.float32))
    out, top, total = _over(form, tiles_ref, body, empty, form.left)
    none = total == 0.0
    total = jnp.where(none, 1.0, total)
    _save(out_ref, out / total[:, None], left, sizes[3])
    _save(lse_ref, jnp.where(none, -jnp.inf, top * (1 / LOG2_E) + jnp.log(total)), left)


def _d_query_kernel(q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, start_ref, end_ref, tiles_ref, *refs, form, tile, sizes):
    left, q, load, hide = _of_queries(form, tile, sizes, q_ref, start_ref, end_ref, tiles_ref, refs)
    d_out = _rows(d_out_ref, 0, tile.q, sizes[3], left)
    lse = _places(lse_ref, 0, tile.q, jnp.inf, left) * LOG2_E
    delta = _places(delta_ref, 0, tile.q, 0.0, left)

    def body(masked):
        def step(j, d_q):
            k, v = load(k_ref, v_ref, j, masked)
            scores, capped = _score(form, q, k)
            scores = hide(scores, j) if masked else scores
            d_scores = jnp.exp2(scores - lse[:, None]) * (_product(d_out, v.T) - delta[:, None])
            if form.softcap is not None:
                d_scores = d_scores * (1 - capped * capped)
            return d_q + _product(d_scores.astype(k.dtype), k)

        return step

    d_q = _over(form, tiles_ref, body, jnp.zeros((tile.q, q_ref.shape[-1]), jnp.float32), form.left)
    _save(refs[-1], d_q * form.scale, left, sizes[2])


def _d_key_value_kernel(q_ref, k_ref, v_ref, d_out_ref, lse_ref, delta_ref, start_ref, end_ref, tiles_ref, *refs,
                        form, tile, sizes):
    T, S, K, V, R = sizes
    here = pl.program_id(0) * tile.k
    k, v = _rows(k_ref, 0, tile.k, K, S - here), _rows(v_ref, 0, tile.k, V, S - here)
    k_ids = _places(refs[1], 0, tile.k, 0, S - here) if form.segments else None
    key = here + jnp.arange(tile.k, dtype=jnp.int32)

    def of_head(r, carry):
        def body(masked):
            high = T if masked else None

            def step(i, carry):
                d_k, d_v = carry
                at = i * tile.q, tile.q
                q, d_out = _rows(q_ref, *at, K, high, r), _rows(d_out_ref, *at, V, high, r)
                lse, delta = _places(lse_ref, *at, jnp.inf, high, r) * LOG2_E, _places(delta_ref, *at, 0.0, high, r)
                scores, capped = _score(form, k, q)
                if masked:
                    start, end = (_places(ref, *at, 0, T) for ref in (start_ref, end_ref))
                    q_ids = _places(refs[0], *at, 0, T) if form.segments else None
                    scores = _hidden(form, scores, key, start, end, q_ids, k_ids, query_axis=1)
                weights = jnp.exp2(scores - lse[None])
                d_v = d_v + _product(weights.astype(d_out.dtype), d_out)
                d_scores = weights * (_product(v, d_out.T) - delta[None])
                if form.softcap is not None:
                    d_scores = d_scores * (1 - capped * capped)
                return d_k + _product(d_scores.astype(q.dtype), q), d_v

            return step

        return _over(form, tiles_ref, body, carry, True)

    zeros = tuple(jnp.zeros((tile.k, ref.shape[-1]), jnp.float32) for ref in (k_ref, v_ref))
    d_k, d_v = jax.lax.fori_loop(0, R, of_head, zeros)
    _save(refs[-2], d_k * form.scale, S - here, K)
    _save(refs[-1], d_v, S - here, V)


# Where the blocks of a program lie. Grids are (tiles, heads, batch).

def _own(array, where, count):
    """A tile of an array [B or 1, places, ...]."""
    rest = array.shape[2:]
    return array, (None, count, *rest), lambda i, h, b: (b if array.shape[0] > 1 else 0, where(i), *(0 for _ in rest))


def _seen_inputs(interval, tiles, ids, q_tile, k_tile, where):
    """Intervals, numbers of tiles and ids; of queries and of keys a program has one tile, or (None) all."""
    def one(array, tile):
        return _own(array, where, tile) if tile else _own(array, lambda i: 0, array.shape[1])

    numbers = tiles, (None, None, tiles.shape[-1]), lambda i, h, b: (b if tiles.shape[0] > 1 else 0, where(i), 0)
    given = [one(interval.start, q_tile), one(interval.end, q_tile), numbers]
    return given if ids is None else [*given, one(ids[0], q_tile), one(ids[1], k_tile)]


def _over_queries(q, k, v, tile):
    """(grid, index of a tile of queries, sizes, function that gives the whole of an array's key head)."""
    (B, T, H, K), (S, G, V) = q.shape, v.shape[1:]
    count = pl.cdiv(T, tile.q)

    def head(array):
        return array, (None, S, None, flash.padded(array.shape[3])), lambda i, h, b: (b, 0, h // (H // G), 0)

    return (count, H, B), lambda i: count - 1 - i, (T, S, K, V, count - 1), head


def _forward(form, q, k, v, interval, tiles, ids):
    tile = form.tiles.forward
    grid, where, sizes, head = _over_queries(q, k, v, tile)
    (B, T, H, K), V = q.shape, v.shape[3]

    def rows(width):
        return (None, tile.q, None, flash.padded(width)), lambda i, h, b: (b, where(i), h, 0)

    return _launch(
        functools.partial(_forward_kernel, form=form, tile=tile, sizes=sizes), grid, tile, form.interpret,
        [(q, *rows(K)), head(k), head(v), *_seen_inputs(interval, tiles, ids, tile.q, None, where)],
        [(jax.ShapeDtypeStruct((B, T, H, V), q.dtype), *rows(V)),
         (jax.ShapeDtypeStruct((B, H, T), jnp.float32), (None, None, tile.q), lambda i, h, b: (b, h, where(i)))])


def _d_query(form, q, k, v, d_out, lse, delta, interval, tiles, ids):
    tile = form.tiles.d_query
    grid, where, sizes, head = _over_queries(q, k, v, tile)

    def rows(width):
        return (None, tile.q, None, flash.padded(width)), lambda i, h, b: (b, where(i), h, 0)

    places = (None, None, tile.q), lambda i, h, b: (b, h, where(i))
    [d_q] = _launch(
        functools.partial(_d_query_kernel, form=form, tile=tile, sizes=sizes), grid, tile, form.interpret,
        [(q, *rows(q.shape[3])), head(k), head(v), (d_out, *rows(v.shape[3])), (lse, *places), (delta, *places),
         *_seen_inputs(interval, tiles, ids, tile.q, None, where)],
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), *rows(q.shape[3]))])
    return d_q


def _d_key_value(form, q, k, v, d_out, lse, delta, interval, tiles, ids):
    (B, T, H, K), (S, G, V) = q.shape, v.shape[1:]
    tile, R = form.tiles.d_key_value, H // G

    def rows(width):
        return (None, tile.k, None, flash.padded(width)), lambda i, g, b: (b, i, g, 0)

    def heads(width):
        return (None, T, R, flash.padded(width)), lambda i, g, b: (b, 0, g, 0)

    places = (None, R, T), lambda i, g, b: (b, g, 0)
    return _launch(
        functools.partial(_d_key_value_kernel, form=form, tile=tile, sizes=(T, S, K, V, R)), (pl.cdiv(S, tile.k), G, B), tile,
        form.interpret,
        [(q, *heads(K)), (k, *rows(K)), (v, *rows(V)), (d_out, *heads(V)), (lse, *places), (delta, *places),
         *_seen_inputs(interval, tiles, ids, None, tile.k, lambda i: i)],
        [(jax.ShapeDtypeStruct(k.shape, k.dtype), *rows(K)), (jax.ShapeDtypeStruct(v.shape, v.dtype), *rows(V))])


ENGINE = flash.Engine(_forward, _d_query, _d_key_value)
