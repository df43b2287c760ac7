"""Attention: its values and gradients against numpy in float64, and what must never be attended to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kernels.attention
from kernels.attention import UnsupportedError, choose
from kernels.attention.reference import visible_blocks
from kernels.placement import Placement
from tests.kernels import grid, oracle

OURS = ("reference", "chunked", "pallas")      # what runs on a CPU
B, T, H, G, K = 2, 160, 4, 2, 16               # long enough for several blocks of queries


@pytest.fixture
def qkv():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((B, T, n, K)).astype(np.float32) for n in (H, G, G))


def attention(q, k, v, *, backend="auto", **options):
    """Jitted, as it is used; ints stay static. Kernels run interpreted."""
    fixed = {n: x for n, x in options.items() if not isinstance(x, (jax.Array, np.ndarray))}
    moving = {n: x for n, x in options.items() if n not in fixed}
    call = functools.partial(kernels.attention.attention, backend=backend, interpret=backend == "pallas", **fixed)
    return jax.jit(lambda q, k, v, moving: call(q, k, v, **moving))(q, k, v, moving)


@pytest.mark.parametrize("case", grid.covering(), ids=str)
@pytest.mark.parametrize("backend", OURS)
def test_values_and_gradients_are_those_of_numpy_in_float64(backend, case):
    errors = grid.errors(case, backend, interpret=backend == "pallas")
    assert grid.is_right(errors), errors


def test_the_cases_leave_out_no_pair_of_a_size_and_a_feature():
    cases = grid.covering()
    for feature in ("full", "window", "packed", "pieces", "cap", "sinks", "later"):
        having = [case for case in cases if feature in case.features]
        assert {case.lengths for case in having} == set(grid.LENGTHS) and {case.width for case in having} == set(grid.WIDTHS)
        assert {case.group for case in having} == set(grid.GROUPS)


def assert_close(got, want, tolerance):
    error = np.abs(np.asarray(got, np.float64) - want) / np.maximum(1, np.abs(want))
    assert got.shape == want.shape and np.max(error) <= tolerance, np.max(error)


@pytest.mark.parametrize("backend", OURS[1:])
def test_bfloat16_loses_no_more_than_twice_what_plain_xla_loses(backend):
    rng = np.random.default_rng(1)
    q, k, v, d_out = (jnp.asarray(rng.standard_normal((1, 200, h, 64)), jnp.bfloat16) for h in (4, 2, 2, 4))
    want = oracle.attend(*(np.asarray(x, np.float64) for x in (q, k, v, d_out)), np.zeros((1, 4, 200)))

    def errors(backend):
        @jax.jit
        def step(*x):
            out, pull = jax.vjp(lambda *x: attention(*x, backend=backend), *x)
            return out, *pull(d_out)

        results = step(q, k, v)
        assert all(x.dtype == jnp.bfloat16 for x in results)
        wanted = want.out, want.d_q, want.d_k, want.d_v
        return [np.sqrt(np.mean(np.square(np.asarray(x, np.float64) - y))) for x, y in zip(results, wanted)]

    assert all(ours <= 2 * plain for ours, plain in zip(errors(backend), errors("reference")))


@pytest.mark.parametrize("backend", OURS)
def test_a_traced_window_equals_a_static_one(qkv, backend):
    traced = jax.jit(lambda w: attention(*qkv, window=w, backend=backend))(jnp.int32(7))
    np.testing.assert_allclose(traced, attention(*qkv, window=7, backend=backend), atol=1e-6)


@pytest.mark.parametrize("backend, offsets", [("reference", 3), ("chunked", 2), ("pallas", 2)])
def test_queries_that_start_later_equal_the_tail_of_the_whole(qkv, backend, offsets):
    q, k, v = qkv
    whole = attention(q, k, v, window=5, backend=backend)
    for offset in (jnp.int32(100), jnp.full((B,), 100, jnp.int32), 100)[:offsets]:
        tail = attention(q[:, 100:], k, v, window=5, query_offset=offset, backend=backend)
        np.testing.assert_allclose(tail, whole[:, 100:], atol=1e-6)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("count", [1, 3])
def test_decoding_sees_each_rows_own_cache_and_nothing_behind_it(backend, count):
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((2, n, h, 64)).astype(np.float32) for n, h in ((count, 8), (1024, 2), (1024, 2)))
    offsets = np.array([3, 900], np.int32)
    got, lse = attention(q, k, v, query_offset=jnp.asarray(offsets), return_lse=True, backend=backend)
    want = oracle.attend(q, k, v, np.zeros((2, count, 8, 64)), np.zeros((2, 8, count)), query_offset=offsets)
    assert_close(got, want.out, 1e-5)
    assert_close(lse, want.lse, 1e-5)


def segments(pad):
    ids = np.full((B, T), pad, np.int32)
    ids[:, :50], ids[:, 50:130] = 1, 2
    return ids


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("pad", [0, -1])
@pytest.mark.parametrize("causal", [True, False])
def test_changing_one_segment_leaves_the_bits_of_the_others(qkv, backend, pad, causal):
    ids = segments(pad)
    f = jax.jit(lambda q, k, v: attention(q, k, v, causal=causal, q_segment_ids_BT=ids, k_segment_ids_BS=ids, backend=backend))
    before = f(*qkv)
    assert not np.any(before[ids < 1])
    for changed in ((1,), (2,), (pad,)):
        inside = np.isin(ids, changed)
        after = f(*(np.where(inside[:, :, None, None], 3 * x + 1, x) for x in qkv))
        assert np.array_equal(before[~inside], after[~inside])
        assert (pad in changed) == np.array_equal(before[inside], after[inside])


@pytest.mark.parametrize("backend", OURS)
def test_nan_in_padding_reaches_nobody_neither_forwards_nor_backwards(qkv, backend):
    ids = segments(0)
    d_out = np.random.default_rng(3).standard_normal((B, T, H, K)).astype(np.float32)

    @jax.jit
    def step(q, k, v, d_out):
        out, pull = jax.vjp(lambda *x: attention(*x, q_segment_ids_BT=ids, k_segment_ids_BS=ids, backend=backend), q, k, v)
        return out, pull(d_out)

    clean = step(*qkv, d_out)
    poisoned = step(*(np.where(ids[..., None, None] < 1, np.nan, x) for x in (*qkv, d_out)))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(poisoned)):
        b = np.asarray(b)
        assert np.array_equal(np.asarray(a)[ids > 0], b[ids > 0]) and not np.any(b[ids < 1])


@pytest.mark.parametrize("backend", OURS)
def test_nan_behind_all_queries_reaches_nobody(qkv, backend):
    q, k, v = qkv
    behind = (np.arange(T) >= 90)[:, None, None]
    poisoned = attention(q[:, :60], np.where(behind, np.nan, k), np.where(behind, np.nan, v), query_offset=30, backend=backend)
    assert np.array_equal(poisoned, attention(q[:, :60], np.where(behind, 0, k), np.where(behind, 0, v), query_offset=30,
                                              backend=backend))


@pytest.mark.parametrize("backend", OURS)
def test_huge_scores_neither_overflow_nor_lose_the_maximum(qkv, backend):
    q, k, v = qkv
    got = attention(1e4 * q, 1e4 * k, v, backend=backend)
    want = oracle.attend(1e4 * q, 1e4 * k, v, np.zeros(q.shape), np.zeros((B, H, T)))
    sure = np.sort(np.where(oracle.seen(B, T, T)[:, None], np.einsum("bthk,bshk->bhts", q, np.repeat(k, 2, 2)), -9e9))[..., -2:]
    clear = np.moveaxis(sure[..., 1] - sure[..., 0] > 1e-3, 1, 2)          # float32 products leave ties undecided
    assert np.mean(clear) > 0.9
    np.testing.assert_allclose(np.asarray(got)[clear], want.out[clear], atol=1e-5)


@pytest.mark.parametrize("kv_heads, key", [(4, PartitionSpec("rows", None, "heads")), (2, PartitionSpec("rows")),
                                           (1, PartitionSpec("rows"))], ids=["as queries", "whole", "one, whole"])
@pytest.mark.parametrize("backend", OURS[1:])
def test_on_a_mesh_each_device_attends_with_its_rows_and_heads(backend, kv_heads, key):
    rng = np.random.default_rng(4)
    given = [rng.standard_normal((B, 100, n, K)).astype(np.float32) for n in (8, kv_heads, kv_heads)]
    mesh = jax.make_mesh((2, 4), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)
    placement = Placement(mesh, PartitionSpec("rows", None, "heads"), key)

    def step(backend, *arrays, **options):
        def loss(*x):
            return jnp.sum(jnp.sin(kernels.attention.attention(*x, window=9, backend=backend, **options)))
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)

    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, (placement.query, key, key))]
    got = step(backend, *placed, placement=placement, interpret=backend == "pallas")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, step("reference", *given))


@pytest.mark.parametrize("query, key, reason", [
    (PartitionSpec(None, "heads"), PartitionSpec(), "split the query's length along heads"),
    (PartitionSpec("rows"), PartitionSpec(), "split the batch of queries along rows and of keys along nothing"),
    (PartitionSpec(), PartitionSpec(None, None, "heads"), "split the heads of queries along nothing and of keys along heads"),
    (PartitionSpec(None, None, ("rows", "heads")), PartitionSpec(), "3 query heads of a device do not read a whole number")])
def test_what_no_device_can_attend_to_by_itself_is_refused_with_the_reason(query, key, reason):
    mesh = jax.make_mesh((2, 4), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)
    x = [np.zeros((B, 8, n, K), np.float32) for n in (24, 12, 12)]
    with pytest.raises(UnsupportedError, match=reason):
        kernels.attention.attention(*x, placement=Placement(mesh, query, key), backend="chunked")
    assert kernels.attention.attention(*x, placement=Placement(mesh, query, key)).shape == x[0].shape


@pytest.mark.parametrize("backend", OURS)
def test_parts_of_the_keys_are_put_together_by_their_log_sum_exp(qkv, backend):
    q, k, v = qkv
    whole = attention(q, k, v, causal=False, backend=backend)
    parts = [attention(q, k[:, part], v[:, part], causal=False, return_lse=True, backend=backend)
             for part in (slice(0, 50), slice(50, T))]
    shares = jax.nn.softmax(jnp.stack([lse for _, lse in parts]), axis=0)
    together = sum(out * jnp.swapaxes(share, 1, 2)[..., None] for (out, _), share in zip(parts, shares))
    np.testing.assert_allclose(together, whole, atol=2e-6)


@pytest.mark.parametrize("backend", OURS[1:])
def test_memory_grows_with_the_length_and_not_with_its_square(backend):
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        step = jax.jit(jax.grad(lambda *x: attention(*x, backend=backend).sum(), (0, 1, 2)))
        return step.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(16384) < 2.6 * temporary(8192)


def test_blocks_hold_all_that_is_visible_and_skip_a_third_of_the_square():
    for t, window in ((512, None), (512, 60), (65, 3), (1, None), (257, 300)):
        see = oracle.seen(1, t, t, window=window)[0]
        covered = np.zeros((t, t), bool)
        for start, stop, first, last in visible_blocks(t, t, True, window, 0):
            covered[start:stop, first:last] = True
        assert not np.any(see & ~covered)
    assert sum((b - a) * (d - c) for a, b, c, d in visible_blocks(512, 512, True, None, 0)) == 0.625 * 512 ** 2


def test_asking_for_a_backend_that_cannot_serve_is_an_error_with_its_reason(qkv, monkeypatch):
    class Never:
        @staticmethod
        def is_supported(call):
            return f"heads of width {call.head_dim} are not built"

    monkeypatch.setattr(kernels.attention, "BACKENDS", {"never": Never})
    with pytest.raises(UnsupportedError, match="'never'.*heads of width 16 are not built"):
        attention(*qkv, backend="never")
    monkeypatch.setattr(kernels.attention, "choose", choose.__wrapped__)
    with pytest.raises(UnsupportedError, match="heads of width 16 are not built"):
        attention(*qkv)


@pytest.mark.parametrize("backend, reason", [("pallas", "not for cpu.*interpret"), ("cudnn", "not on cpu")])
def test_a_kernel_for_gpus_is_refused_on_a_cpu(qkv, backend, reason):
    with pytest.raises(UnsupportedError, match=reason):
        kernels.attention.attention(*qkv, backend=backend)


def test_an_unknown_backend_is_an_error_that_lists_those_there_are(qkv):
    with pytest.raises(UnsupportedError, match="'flash'.*auto, pallas"):
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
