"""What a query may see: one interval of keys for each query, and perhaps segment ids.

Causality, a window, an offset and a packed batch all come to an interval [start, end) per query, in memory that grows with
the length alone. A kernel visits the tiles of keys that meet the interval of any of its queries, and masks only where a tile
is not seen whole. Segment ids are compared as well wherever they are given: a segment need not be one run of places, and its
interval is then only what covers it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FAR = 2 ** 30                                  # past the end of any array


class Interval(NamedTuple):
    """Query t of row b sees no key outside [start, end); both int32 [B or 1, T]. Empty ones are [0, 0)."""
    start: jax.Array
    end: jax.Array


@dataclasses.dataclass(frozen=True)
class Mask:
    """The arguments of `kernels.attention.attention` with these names."""
    causal: bool
    window: Any
    query_offset: Any
    q_segment_ids_BT: jax.Array | None
    k_segment_ids_BS: jax.Array | None

    @property
    def segments(self) -> bool:
        return self.q_segment_ids_BT is not None

    def seen(self, start: int, stop: int, first: int, last: int) -> jax.Array:
        """Boolean [1 or B, queries, keys] for queries [start, stop) and keys [first, last)."""
        q_T1 = jnp.expand_dims(jnp.atleast_1d(self.query_offset), (1, 2)) + jnp.arange(start, stop)[None, :, None]
        distance = q_T1 - jnp.arange(first, last)
        seen = jnp.ones_like(distance, dtype=bool)
        if self.causal:
            seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        if self.segments:
            q_ids, k_ids = self.q_segment_ids_BT[:, start:stop, None], self.k_segment_ids_BS[:, None, first:last]
            seen = seen & (q_ids == k_ids) & (q_ids > 0)
        return seen

    def by_place(self, T: int, S: int) -> Interval:
        """The intervals that places alone give, [1, T], or [B, T] where each row has an offset of its own."""
        place = jnp.atleast_1d(jnp.asarray(self.query_offset, jnp.int32))[:, None] + jnp.arange(T, dtype=jnp.int32)
        end = jnp.minimum(place + 1, S) if self.causal else jnp.full_like(place, S)
        start = jnp.zeros_like(place) if self.window is None else jnp.maximum(place - (self.window - 1), 0)
        return _emptied(start.astype(jnp.int32), end.astype(jnp.int32))

    def interval(self, T: int, S: int) -> Interval:
        """The least intervals that hold what each query sees."""
        start, end = self.by_place(T, S)
        if not self.segments:
            return Interval(start, end)
        first, last = jax.vmap(_cover)(self.q_segment_ids_BT, self.k_segment_ids_BS)
        return _emptied(jnp.maximum(start, first), jnp.minimum(end, last))

    def leaves_out(self, T: int, S: int) -> bool:
        """Whether some key may be seen by no query, or some query may see no key."""
        if self.segments:
            return True
        if not self.causal:
            return False
        if isinstance(self.query_offset, jax.Array):
            return True
        return self.query_offset + T != S or self.window is not None and T < S

    def unused(self, T: int, S: int) -> tuple[jax.Array, jax.Array]:
        """(queries [1 or B, T] that see nothing, keys [1 or B, S] that nobody sees: all that are padding or lie outside of every
        query's interval)."""
        start, end = self.interval(T, S)
        low = jnp.min(jnp.where(end > start, start, FAR), axis=1, keepdims=True)
        key = jnp.arange(S, dtype=jnp.int32)
        keys = (key < low) | (key >= jnp.max(end, axis=1, keepdims=True))
        if self.segments:
            keys = keys | (self.k_segment_ids_BS < 1)
        return end <= start, keys


def _emptied(start: jax.Array, end: jax.Array) -> Interval:
    start, end = jnp.broadcast_arrays(start, end)
    return Interval(jnp.where(end > start, start, 0), jnp.where(end > start, end, 0))


def _cover(q_ids_T: jax.Array, k_ids_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From the first key with the id of each query to past the last; (0, 0) where there is none or the id is padding's."""
    order = jnp.argsort(k_ids_S, stable=True).astype(jnp.int32)
    in_order = k_ids_S[order]
    left, right = (jnp.searchsorted(in_order, q_ids_T, side=side) for side in ("left", "right"))
    found = (right > left) & (q_ids_T > 0)
    last = order[jnp.maximum(right - 1, 0)] + 1
    return jnp.where(found, order[jnp.minimum(left, order.size - 1)], 0), jnp.where(found, last, 0)


class Tiles(NamedTuple):
    """Of each tile of rows, the tiles of columns to visit: [first, inside) and [outside, last) need the mask, those of
    [inside, outside) are seen whole. All int32 [B or 1, number of tiles]."""
    first: jax.Array
    inside: jax.Array
    outside: jax.Array
    last: jax.Array

    def stacked(self) -> jax.Array:
        """int32 [B or 1, tiles, 4]."""
        return jnp.stack(self, axis=-1)


def key_tiles(interval: Interval, block_q: int, block_k: int, whole: bool) -> Tiles:
    """The tiles of keys for each tile of queries. `whole=False`: every tile needs the mask."""
    low, full_low, full_high, high = _bounds(interval, block_q)
    first, last = low // block_k, -(-high // block_k)
    if not whole:
        return Tiles(first, last, last, last)
    inside = jnp.clip(-(-full_low // block_k), first, last)
    return Tiles(first, inside, jnp.clip(full_high // block_k, inside, last), last)


def query_tiles(interval: Interval, S: int, block_q: int, block_k: int, whole: bool) -> Tiles:
    """The tiles of queries for each tile of keys; only complete tiles of queries are ever seen whole."""
    T = interval.start.shape[1]
    low, full_low, full_high, high = (bound[:, None] for bound in _bounds(interval, block_q))       # [B, 1, query tiles]
    key = jnp.arange(0, S, block_k, dtype=jnp.int32)[None, :, None]
    number = jnp.arange(low.shape[-1], dtype=jnp.int32)
    meets = (low < key + block_k) & (high > key)
    first, last = _span(meets, number)
    if not whole:
        return Tiles(first, last, last, last)
    full = (full_low <= key) & (full_high >= key + block_k) & (number < T // block_q)
    inside, outside = _span(full, number)
    none = outside <= inside
    return Tiles(first, jnp.where(none, last, inside), jnp.where(none, last, outside), last)


def _span(chosen: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first number chosen and the last plus one, over the last dim; (0, 0) if none is."""
    first = jnp.min(jnp.where(chosen, number, FAR), axis=-1)
    return jnp.where(first == FAR, 0, first), jnp.max(jnp.where(chosen, number + 1, 0), axis=-1)


def _bounds(interval: Interval, block: int) -> tuple[jax.Array, ...]:
    """Per tile of queries: where the first interval starts, where the last starts, where the first ends, where the last ends.
    Empty intervals count for the two in the middle only; what lies past the last query counts for none."""
    start, end = interval
    over = -start.shape[1] % block

    def tiles(x, fill):
        return jnp.pad(x, ((0, 0), (0, over)), constant_values=fill).reshape(x.shape[0], -1, block)

    low = jnp.min(tiles(jnp.where(end > start, start, FAR), FAR), axis=-1)
    high = jnp.max(tiles(end, 0), axis=-1)
    return jnp.minimum(low, high), jnp.max(tiles(start, 0), axis=-1), jnp.min(tiles(end, FAR), axis=-1), high
