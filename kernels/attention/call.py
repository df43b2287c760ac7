"""What can be known of a call of `attention` before it runs: the facts on which a backend says yes or no."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Call:
    """The static facts. `window` is None, an int, or 'traced'; `decoding` means that queries may start past the first key."""
    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    window: int | str | None
    decoding: bool
    segments: bool
    softcap: float | None


def describe(q_BTHK, k_BSGK, v_BSGK, causal, window, query_offset, q_segment_ids_BT, k_segment_ids_BS, softcap) -> Call:
    """The Call with these arguments.

    Raises:
      ValueError: they do not fit each other.
    """
    (B, T, H, K), (_, S, G, _) = q_BTHK.shape, k_BSGK.shape
    if k_BSGK.shape != (B, S, G, K) or v_BSGK.shape != k_BSGK.shape or H % G:
        raise ValueError(f"query {q_BTHK.shape}, key {k_BSGK.shape} and value {v_BSGK.shape} do not fit; expected "
                         "[B, T, H, K] and twice [B, S, G, K] with G a divisor of H.")
    if not q_BTHK.dtype == k_BSGK.dtype == v_BSGK.dtype:
        raise ValueError(f"query, key and value have dtypes {q_BTHK.dtype}, {k_BSGK.dtype}, {v_BSGK.dtype}; expected one dtype.")
    if (q_segment_ids_BT is None) != (k_segment_ids_BS is None):
        raise ValueError("segment ids were given for queries or keys alone; give both or neither.")
    if q_segment_ids_BT is not None and (q_segment_ids_BT.shape != (B, T) or k_segment_ids_BS.shape != (B, S)):
        raise ValueError(f"segment ids have shapes {q_segment_ids_BT.shape} and {k_segment_ids_BS.shape}; expected "
                         f"{(B, T)} and {(B, S)}.")
    if window is not None and not causal:
        raise ValueError("a window looks back from each query: it needs causal=True.")
    if isinstance(window, int) and window < 1:
        raise ValueError(f"window = {window}; expected at least 1 (the query itself).")
    if isinstance(query_offset, int) and query_offset < 0:
        raise ValueError(f"query_offset = {query_offset}; expected 0 or more.")
    traced = isinstance(window, jax.Array)
    return Call(B, T, S, H, G, K, str(q_BTHK.dtype), causal, "traced" if traced else window,
                isinstance(query_offset, jax.Array) or query_offset != 0 or (causal and S != T),
                q_segment_ids_BT is not None, softcap)
