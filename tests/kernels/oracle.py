"""Attention in float64 numpy, forwards and backwards: what every backend is compared with."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Answer:
    out: np.ndarray
    lse: np.ndarray
    d_q: np.ndarray
    d_k: np.ndarray
    d_v: np.ndarray
    d_sinks: np.ndarray


def seen(B, T, S, causal=True, window=None, query_offset=0, q_segment_ids_BT=None, k_segment_ids_BS=None):
    """Boolean [B, T, S], from the contract's words."""
    place = np.broadcast_to(np.asarray(query_offset).reshape(-1, 1, 1), (B, 1, 1)) + np.arange(T)[None, :, None]
    distance = place - np.arange(S)
    see = np.ones((B, T, S), bool)
    if causal:
        see &= distance >= 0
    if window is not None:
        see &= distance < int(window)
    if q_segment_ids_BT is not None:
        q_ids, k_ids = np.asarray(q_segment_ids_BT), np.asarray(k_segment_ids_BS)
        see &= (q_ids[:, :, None] == k_ids[:, None]) & (q_ids > 0)[:, :, None]
    return see


def attend(q, k, v, d_out, d_lse, *, softcap=None, sinks=None, scale=None, **mask) -> Answer:
    """All results for the loss sum(out * d_out) + sum(lse * d_lse), the latter over queries that see something."""
    q, k, v, d_out, d_lse = (np.asarray(x, np.float64) for x in (q, k, v, d_out, d_lse))
    (B, T, H, K), (S, G) = q.shape, k.shape[1:3]
    scale = K ** -0.5 if scale is None else scale
    see = seen(B, T, S, **mask)[:, None]
    keys, values = (np.repeat(x, H // G, axis=2) for x in (k, v))
    raw = scale * np.einsum("bthk,bshk->bhts", q, keys)
    capped = raw if softcap is None else softcap * np.tanh(raw / softcap)
    scores = np.where(see, capped, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True)
    safe = np.where(np.isfinite(top), top, 0)
    total = np.sum(np.exp(scores - safe), axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = safe + np.log(total)
    own = np.where(np.isfinite(lse), lse, 0)
    weights = np.where(see, np.exp(scores - own), 0)        # of keys alone
    share = np.ones_like(total)
    if sinks is not None:
        share = np.where(np.isfinite(lse), 1 / (1 + np.exp(np.asarray(sinks, np.float64)[None, :, None, None] - own)), 0)
    plain = np.einsum("bhts,bshv->bhtv", weights, values)
    out = np.einsum("bhtv->bthv", plain * share)
    d_weighted = np.einsum("bthv->bhtv", d_out)
    d_share = np.sum(d_weighted * plain, axis=-1, keepdims=True) * share * (1 - share)
    d_weights = np.einsum("bthv,bshv->bhts", d_out, values) * share
    d_total = np.where(np.isfinite(lse), d_lse[..., None] + (d_share if sinks is not None else 0), 0)
    d_scores = weights * (d_weights - np.sum(weights * d_weights, axis=-1, keepdims=True) + d_total)
    if softcap is not None:
        d_scores = d_scores * (1 - np.square(capped / softcap))
    d_keys = scale * np.einsum("bhts,bthk->bshk", d_scores, q)
    d_values = np.einsum("bhts,bthv->bshv", weights * share, d_out)
    return Answer(out, lse[..., 0], scale * np.einsum("bhts,bshk->bthk", d_scores, keys),
                  d_keys.reshape(B, S, G, -1, K).sum(3), d_values.reshape(B, S, G, -1, v.shape[3]).sum(3),
                  -d_share.sum((0, 2, 3)))
