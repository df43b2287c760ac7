"""What can be known of a call of `attention` before it runs: the facts on which a backend says yes or no."""

import dataclasses
import math

import jax

from kernels.attention.mask import Mask
from kernels.placement import Placement


@dataclasses.dataclass(frozen=True)
class Call:
    """The static facts, sizes being those that one device has (of key heads, those that its query heads read).

    Attributes:
      window: None, an int, or 'traced'.
      decoding: queries may start past the first key, or do not end at the last.
      leaves_out: some query may see no key, or some key be seen by no query.
      with_lse: the log-sum-exp is wanted as well.
      platform, chip: of the devices, 'gpu' and 'NVIDIA H200'.
      refusal: why no kernel can run on each device's block, if so.
      interpret: kernels of our own run interpreted.
    """
    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    causal: bool
    window: int | str | None
    decoding: bool
    segments: bool
    softcap: float | None
    scale: float
    leaves_out: bool
    with_lse: bool
    platform: str
    chip: str
    refusal: str | None
    interpret: bool

    @property
    def group(self) -> int:
        """Query heads to one key head."""
        return self.heads // self.kv_heads


def describe(q_BTHK, k_BSGK, v_BSGV, mask: Mask, *, softcap: float | None, scale: float | None, with_lse: bool,
             placement: Placement, interpret: bool) -> Call:
    """The Call with these arguments.

    Raises:
      ValueError: they do not fit each other.
    """
    (B, T, H, K), (_, S, G, _) = q_BTHK.shape, k_BSGK.shape
    if k_BSGK.shape != (B, S, G, K) or v_BSGV.shape[:3] != (B, S, G) or H % G:
        raise ValueError(f"query {q_BTHK.shape}, key {k_BSGK.shape} and value {v_BSGV.shape} do not fit; expected "
                         "[B, T, H, K], [B, S, G, K] and [B, S, G, V] with G a divisor of H.")
    if not q_BTHK.dtype == k_BSGK.dtype == v_BSGV.dtype:
        raise ValueError(f"query, key and value have dtypes {q_BTHK.dtype}, {k_BSGK.dtype}, {v_BSGV.dtype}; expected one dtype.")
    q_ids, k_ids, window, offset = mask.q_segment_ids_BT, mask.k_segment_ids_BS, mask.window, mask.query_offset
    if (q_ids is None) != (k_ids is None):
        raise ValueError("segment ids were given for queries or keys alone; give both or neither.")
    if q_ids is not None and (q_ids.shape != (B, T) or k_ids.shape != (B, S)):
        raise ValueError(f"segment ids have shapes {q_ids.shape} and {k_ids.shape}; expected {(B, T)} and {(B, S)}.")
    if window is not None and not mask.causal:
        raise ValueError("a window looks back from each query: it needs causal=True.")
    if isinstance(window, int) and window < 1:
        raise ValueError(f"window = {window}; expected at least 1 (the query itself).")
    if isinstance(offset, int) and offset < 0:
        raise ValueError(f"query_offset = {offset}; expected 0 or more.")
    refusal = placement.refusal()
    if refusal is None and placement.mesh is not None:
        parts, heads = placement.parts("query", 0), placement.parts("query", 2)
        own, R, split = H // heads, H // G, placement.parts("key", 2)
        if B % parts or H % heads or G % split:
            refusal = f"a batch of {B}, {H} heads and {G} key heads cannot be split into {parts}, {heads} and {split} parts"
        elif own % R and R % own:
            refusal = f"the {own} query heads of a device do not read a whole number of key heads, {R} of them reading each"
        else:
            B, H, G = B // parts, own, max(1, own // R)
    platform, chip = placement.device()
    return Call(B, T, S, H, G, K, v_BSGV.shape[3], str(q_BTHK.dtype), mask.causal,
                "traced" if isinstance(window, jax.Array) else window,
                isinstance(offset, jax.Array) or offset != 0 or (mask.causal and S != T), mask.segments, softcap,
                1 / math.sqrt(K) if scale is None else scale, mask.leaves_out(T, S), with_lse, platform, chip, refusal, interpret)
