"""Attention: its values against plain numpy in float64, and what must never be attended to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels.attention
from kernels.attention import BACKENDS, UnsupportedError, choose
from kernels.attention.call import describe
from kernels.attention.reference import visible_blocks

B, T, H, G, K = 2, 160, 4, 2, 8                # long enough for several blocks of queries


@pytest.fixture
def qkv():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((B, T, n, K)).astype(np.float32) for n in (H, G, G))


def attention(q, k, v, **options):
    """Jitted, as it is used; ints stay static."""
    fixed = {n: x for n, x in options.items() if not isinstance(x, (jax.Array, np.ndarray))}
    moving = {n: x for n, x in options.items() if n not in fixed}
    return jax.jit(lambda q, k, v, moving: kernels.attention.attention(q, k, v, **fixed, **moving))(q, k, v, moving)


def expected(q, k, v, seen, softcap=None):
    """Float64, one query at a time; `seen` is boolean [B, T, S]."""
    out = np.zeros(q.shape)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            keys = np.flatnonzero(seen[b, t])
            for h in range(H):
                if not keys.size:
                    continue
                g = h // (H // G)
                scores = k[b, keys, g].astype(np.float64) @ q[b, t, h] / np.sqrt(K)
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights / weights.sum() @ v[b, keys, g]
    return out


def places(window=None, T=T, S=T, offset=0):
    distance = offset + np.arange(T)[:, None] - np.arange(S)
    return np.broadcast_to((distance >= 0) & (distance < (window or 10 ** 9)), (B, T, S))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 7, 70])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_values_are_those_of_numpy(qkv, backend, window, softcap):
    got = attention(*qkv, window=window, softcap=softcap, backend=backend)
    np.testing.assert_allclose(got, expected(*qkv, places(window), softcap), atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_causality_every_key_is_seen(qkv, backend):
    got = attention(*qkv, causal=False, backend=backend)
    np.testing.assert_allclose(got, expected(*qkv, np.ones((B, T, T), bool)), atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_traced_window_equals_a_static_one(qkv, backend):
    traced = jax.jit(lambda w: attention(*qkv, window=w, backend=backend))(jnp.int32(7))
    np.testing.assert_allclose(traced, attention(*qkv, window=7, backend=backend), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 5])
def test_queries_that_start_later_equal_the_tail_of_the_whole(qkv, backend, window):
    q, k, v = qkv
    whole = attention(q, k, v, window=window, backend=backend)
    for offset in (100, jnp.int32(100), jnp.full((B,), 100, jnp.int32)):
        tail = attention(q[:, 100:], k, v, window=window, query_offset=offset, backend=backend)
        np.testing.assert_allclose(tail, whole[:, 100:], atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_has_its_own_offset_and_sees_nothing_behind_its_cache(qkv, backend):
    q, k, v = qkv
    offsets = np.array([3, 50], np.int32)
    got = attention(q[:, :1], k, v, query_offset=jnp.asarray(offsets), backend=backend)
    seen = np.stack([places(T=1, offset=o)[0] for o in offsets])
    np.testing.assert_allclose(got, expected(q[:, :1], k, v, seen), atol=2e-6)


def segments(pad):
    ids = np.full((B, T), pad, np.int32)
    ids[:, :50], ids[:, 50:130] = 1, 2
    return ids


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pad", [0, -1])
def test_segments_attend_to_themselves_alone_and_padding_to_nothing(qkv, backend, pad):
    ids = segments(pad)
    got = attention(*qkv, q_segment_ids_BT=ids, k_segment_ids_BS=ids, backend=backend)
    seen = places() & (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, :, None]
    np.testing.assert_allclose(got, expected(*qkv, seen), atol=2e-6)
    assert not np.any(got[:, 130:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pad", [0, -1])
@pytest.mark.parametrize("causal", [True, False])
def test_changing_one_segment_leaves_the_bits_of_the_others(qkv, backend, pad, causal):
    ids = segments(pad)
    f = jax.jit(lambda q, k, v: attention(q, k, v, causal=causal, q_segment_ids_BT=ids, k_segment_ids_BS=ids, backend=backend))
    before = f(*qkv)
    for changed in ((1,), (2,), (pad,)):
        inside = np.isin(ids, changed)
        after = f(*(np.where(inside[:, :, None, None], 3 * x + 1, x) for x in qkv))
        assert np.array_equal(before[~inside], after[~inside])
        assert (pad in changed) == np.array_equal(before[inside], after[inside])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_rows_that_see_nothing_are_zero_and_finite(qkv, backend):
    ids = np.zeros((B, T), np.int32)

    def total(*x):
        return attention(*x, q_segment_ids_BT=ids, k_segment_ids_BS=ids, backend=backend).sum()

    grads = jax.jit(jax.grad(total, (0, 1, 2)))(*qkv)
    assert all(not np.any(g) for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_equal_those_of_the_textbook(qkv, backend):
    def textbook(q, k, v):
        k, v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(K)
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
        return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)

    got, want = (jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)))(*qkv)
                 for f in (lambda *x: attention(*x, backend=backend), textbook))
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_stays_bfloat16_forwards_and_backwards_with_a_float32_softmax(qkv, backend):
    low = [jnp.asarray(x, jnp.bfloat16) for x in qkv]
    out = attention(*low, backend=backend)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), expected(*(np.asarray(x, np.float32) for x in low), places()), atol=0.02)
    grads = jax.eval_shape(jax.grad(lambda *x: attention(*x, backend=backend).sum(), (0, 1, 2)), *low)
    assert all(g.dtype == jnp.bfloat16 for g in grads)


def test_blocks_hold_all_that_is_visible_and_skip_a_third_of_the_square():
    for t, window in ((512, None), (512, 60), (65, 3), (1, None), (257, 300)):
        seen = places(window, t, t)[0]
        covered = np.zeros((t, t), bool)
        for start, stop, first, last in visible_blocks(t, t, True, window, 0):
            covered[start:stop, first:last] = True
        assert not np.any(seen & ~covered)
    assert sum((b - a) * (d - c) for a, b, c, d in visible_blocks(512, 512, True, None, 0)) == 0.625 * 512 ** 2


def test_asking_for_a_backend_that_cannot_serve_is_an_error_with_its_reason(qkv, monkeypatch):
    class Never:
        @staticmethod
        def is_supported(call):
            return f"heads of width {call.head_dim} are not built"

    monkeypatch.setitem(BACKENDS, "never", Never)
    with pytest.raises(UnsupportedError, match="'never'.*heads of width 8 are not built"):
        attention(*qkv, backend="never")
    monkeypatch.delitem(BACKENDS, "reference")
    with pytest.raises(UnsupportedError, match="heads of width 8 are not built"):
        choose.__wrapped__(describe(*qkv, True, None, 0, None, None, None), "auto")


def test_an_unknown_backend_is_an_error_that_lists_those_there_are(qkv):
    with pytest.raises(UnsupportedError, match="'flash'.*auto, reference"):
        attention(*qkv, backend="flash")


@pytest.mark.parametrize("change, message", [
    (dict(window=0), "at least 1"), (dict(window=3, causal=False), "causal"), (dict(query_offset=-1), "0 or more"),
    (dict(q_segment_ids_BT=np.ones((B, T), np.int32)), "both or neither"),
    (dict(q_segment_ids_BT=np.ones((B, 3), np.int32), k_segment_ids_BS=np.ones((B, T), np.int32)), "shapes")])
def test_arguments_that_do_not_fit_are_refused(qkv, change, message):
    with pytest.raises(ValueError, match=message):
        attention(*qkv, **change)


def test_heads_that_are_no_multiple_of_key_heads_are_refused(qkv):
    q, k, v = qkv
    with pytest.raises(ValueError, match="divisor"):
        attention(q[:, :, :3], k, v)
