"""Softmax attention: one contract, an ordered list of backends.

Every backend answers `is_supported(call)` with None or with the reason why it cannot serve that call. `attention` takes
the first that can and that has no reason against being taken unasked (`not_by_itself`), or the one that was asked for by name;
then a "no" is an error that carries the reason. What is masked is the same for all: no backend may ignore a window, a cap
or segment ids.
"""

import functools
import logging

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kernels.attention import chunked, cudnn, jax_triton, pallas, reference
from kernels.attention.call import Call, describe
from kernels.attention.flash import SAVED
from kernels.attention.mask import Mask
from kernels.placement import HERE, Placement

__all__ = ["BACKENDS", "SAVED", "UnsupportedError", "attention", "check_name", "choose"]

# In order of preference.
BACKENDS = {"pallas": pallas, "jax_triton": jax_triton, "cudnn": cudnn, "chunked": chunked, "reference": reference}

_log = logging.getLogger(__name__)


class UnsupportedError(ValueError):
    """The backend that was asked for by name does not exist or cannot serve this call."""


def attention(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGV: jax.Array, *, causal: bool = True, window=None, query_offset=0,
              q_segment_ids_BT: jax.Array | None = None, k_segment_ids_BS: jax.Array | None = None,
              softcap: float | None = None, sinks_H: jax.Array | None = None, scale: float | None = None,
              return_lse: bool = False, backend: str = "auto", placement: Placement = HERE, interpret: bool = False):
    """Scaled dot-product attention with grouped key and value heads.

    Query t stands at place `query_offset + t` of the keys' order; query head h reads key head h // (H / G). It attends
    to a key when all of these hold: the key's place is not later (causal), fewer than `window` places back, and both
    have the same segment id, at least 1. A query that attends to nothing gives 0. Where there are several queries, a key that
    nobody attends to has no effect whatever it holds, NaN too, and neither has a query that attends to nothing.

    Args:
      q_BTHK, k_BSGK, v_BSGV: float arrays of one dtype; G divides H. Values may be of another width than keys.
      causal: whether later keys are hidden.
      window: keys that a query sees, itself included: None (all), an int, or a traced int32 scalar. Needs `causal`.
      query_offset: an int, a traced int32 scalar or int32 [B]; for decoding, the number of keys before these queries.
      q_segment_ids_BT, k_segment_ids_BS: int32, both or neither. Ids below 1 are padding, which neither attends nor is attended.
      softcap: scores become cap * tanh(scores / cap), before masking (Gemma 2, arXiv:2408.00118, section 2).
      sinks_H: per head the score of a key that is attended to but has no value (attention sinks, as a learned logit).
      scale: factor on the scores; None is 1 / sqrt(K).
      return_lse: whether to return the log-sum-exp of each query's scores too.
      backend: a name in BACKENDS, or 'auto'.
      placement: the mesh and how the arrays lie on it; kernels run on each device's block.
      interpret: run kernels of our own interpreted, slowly, on any platform; for tests.

    Returns:
      [B, T, H, V] in the dtype of q. The softmax is float32. With `return_lse` (that, float32 [B, H, T]): natural logarithms,
      -inf for a query that sees nothing, without the sinks, and differentiable. Parts of the keys can be attended to apart
      and put together with it.

    Raises:
      UnsupportedError: no such backend, or it cannot serve this call (with the reason).
      ValueError: shapes or arguments that do not fit each other.
    """
    mask = Mask(causal, window, query_offset, q_segment_ids_BT, k_segment_ids_BS)
    call = describe(q_BTHK, k_BSGK, v_BSGV, mask, softcap=softcap, scale=scale, with_lse=return_lse or sinks_H is not None,
                    placement=placement, interpret=interpret)
    chosen = choose(call, backend)
    T, S, group = q_BTHK.shape[1], k_BSGK.shape[1], q_BTHK.shape[2] // k_BSGK.shape[2]
    idle_BT = None
    if call.leaves_out:
        idle_BT, unseen_BS = mask.unused(T, S)
        if T > 1:                              # a single query is decoding, where a pass over all keys costs as much as attention
            q_BTHK = jnp.where(idle_BT[..., None, None], 0, q_BTHK)
            k_BSGK, v_BSGV = (jnp.where(unseen_BS[..., None, None], 0, x) for x in (k_BSGK, v_BSGV))
    moving = {name: x for name, x in vars(mask).items() if isinstance(x, jax.Array)}

    batch, heads, kv_heads = (placement.axes(*which) or None for which in (("query", 0), ("query", 2), ("key", 2)))

    def run(q_BTHK, k_BSGK, v_BSGV, moving):
        if chosen.PER_DEVICE and k_BSGK.shape[2] != call.kv_heads:     # they lie whole where query heads are split
            first = jax.lax.axis_index(heads) * call.heads // group
            k_BSGK, v_BSGV = (jax.lax.dynamic_slice_in_dim(x, first, call.kv_heads, 2) for x in (k_BSGK, v_BSGV))
        out_BTHV, lse_BHT = chosen.attention(q_BTHK, k_BSGK, v_BSGV, Mask(**{**vars(mask), **moving}), call)
        return out_BTHV, lse_BHT if call.with_lse else None

    if chosen.PER_DEVICE:
        rows = {name: PartitionSpec(batch) if x.ndim else PartitionSpec() for name, x in moving.items()}
        queries, keys = PartitionSpec(batch, None, heads), PartitionSpec(batch, None, kv_heads)
        run = placement.per_device(run, (queries, keys, keys, rows),
                                   (queries, PartitionSpec(batch, heads) if call.with_lse else None))
    out_BTHV, lse_BHT = run(q_BTHK, k_BSGK, v_BSGV, moving)
    if idle_BT is not None:
        out_BTHV = jnp.where(idle_BT[..., None, None], 0, out_BTHV)
        lse_BHT = None if lse_BHT is None else jnp.where(idle_BT[:, None], -jnp.inf, lse_BHT)
    if sinks_H is not None:                    # of a query's attention, what the sink leaves to the keys
        share_BHT = jax.nn.sigmoid(lse_BHT - sinks_H.astype(jnp.float32)[None, :, None])
        out_BTHV = (out_BTHV * jnp.swapaxes(share_BHT, 1, 2)[..., None]).astype(out_BTHV.dtype)
    return (out_BTHV, lse_BHT) if return_lse else out_BTHV


def check_name(backend: str) -> None:
    """Raises UnsupportedError unless `backend` is 'auto' or one of BACKENDS."""
    if backend != "auto" and backend not in BACKENDS:
        raise UnsupportedError(f"there is no attention backend {backend!r}; expected one of: auto, {', '.join(BACKENDS)}.")


@functools.cache                               # so that each kind of call is logged once
def choose(call: Call, backend: str = "auto"):
    """The backend (a module) that serves `call`. Raises UnsupportedError."""
    check_name(backend)
    reasons = {}
    for name in BACKENDS if backend == "auto" else (backend,):
        one = BACKENDS[name]
        reasons[name] = one.is_supported(call) or (one.not_by_itself(call) if backend == "auto" else None)
        if reasons[name] is None:
            passed = "".join(f"; not {other}: {why}" for other, why in reasons.items() if why)
            _log.info("attention backend: %s for %s%s", name, call, passed)
            return one
    raise UnsupportedError("; ".join(f"attention backend {name!r} cannot serve this call: {why}" for name, why in reasons.items())
                           + ". Set kernels.attention to 'auto' or to another backend.")
