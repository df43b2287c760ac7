"""Softmax attention: one contract, an ordered list of backends.

Every backend answers `is_supported(call)` with None or with the reason why it cannot serve that call. `attention` takes
the first that can, or the one that was asked for by name; in the latter case a "no" is an error that carries the reason.
What is masked is the same for all: no backend may ignore a window, a cap or segment ids.
"""

import functools
import logging

import jax

from kernels.attention import reference
from kernels.attention.call import Call, describe

BACKENDS = {"reference": reference}            # in order of preference

_log = logging.getLogger(__name__)


class UnsupportedError(ValueError):
    """The backend that was asked for by name does not exist or cannot serve this call."""


def attention(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, *, causal: bool = True, window=None, query_offset=0,
              q_segment_ids_BT: jax.Array | None = None, k_segment_ids_BS: jax.Array | None = None,
              softcap: float | None = None, scale: float | None = None, backend: str = "auto") -> jax.Array:
    """Scaled dot-product attention with grouped key and value heads.

    Query t stands at place `query_offset + t` of the keys' order; query head h reads key head h // (H / G). It attends
    to a key when all of these hold: the key's place is not later (causal), fewer than `window` places back, and both
    have the same segment id, at least 1. A query that attends to nothing gives 0.

    Args:
      q_BTHK, k_BSGK, v_BSGK: float arrays of one dtype; G divides H.
      causal: whether later keys are hidden.
      window: keys that a query sees, itself included: None (all), an int, or a traced int32 scalar. Needs `causal`.
      query_offset: an int, a traced int32 scalar or int32 [B]; for decoding, the number of keys before these queries.
      q_segment_ids_BT, k_segment_ids_BS: int32, both or neither. Ids below 1 are padding, which neither attends nor is attended.
      softcap: scores become cap * tanh(scores / cap), before masking (Gemma 2, arXiv:2408.00118, section 2).
      scale: factor on the scores; None is 1 / sqrt(K).
      backend: a name in BACKENDS, or 'auto'.

    Returns:
      [B, T, H, K] in the dtype of q. The softmax is float32.

    Raises:
      UnsupportedError: no such backend, or it cannot serve this call (with the reason).
      ValueError: shapes or arguments that do not fit each other.
    """
    call = describe(q_BTHK, k_BSGK, v_BSGK, causal, window, query_offset, q_segment_ids_BT, k_segment_ids_BS, softcap)
    return choose(call, backend).attention(
        q_BTHK, k_BSGK, v_BSGK, causal=causal, window=window, query_offset=query_offset,
        q_segment_ids_BT=q_segment_ids_BT, k_segment_ids_BS=k_segment_ids_BS, softcap=softcap,
        scale=q_BTHK.shape[-1] ** -0.5 if scale is None else scale)


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
        reasons[name] = BACKENDS[name].is_supported(call)
        if reasons[name] is None:
            _log.info("attention backend: %s for %s", name, call)
            return BACKENDS[name]
    raise UnsupportedError("; ".join(f"attention backend {name!r} cannot serve this call: {why}" for name, why in reasons.items())
                           + ". Set kernels.attention to 'auto' or to another backend.")
