"""Flash attention through jax-triton: the kernels of `triton_kernels`, compiled by the Triton that is installed.

Interpreted, Triton's own interpreter runs them on the host, over numpy arrays.
"""

import importlib.util
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention import flash, triton_kernels
from kernels.attention.call import Call
from kernels.attention.chips import Tile

PER_DEVICE = True
_ONE_AT_A_TIME = threading.Lock()


def is_supported(call: Call) -> str | None:
    """As all kernels of ours, where Triton is installed, and to be compiled jax-triton too."""
    if triton_kernels.triton is None:
        return "triton is not installed (pip install 'jaxlm[gpu]')"
    if call.interpret and call.dtype == "bfloat16":
        return "Triton's interpreter multiplies bfloat16 wrongly"
    reason = flash.refusal(call)
    if reason is None and not call.interpret and importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed (pip install 'jaxlm[gpu]')"
    return reason


not_by_itself = flash.not_by_itself


def attention(q_BTHK, k_BSGK, v_BSGV, mask, call: Call):
    """Output and log-sum-exp; see `kernels.attention.attention`."""
    return flash.attention(ENGINE, q_BTHK, k_BSGK, v_BSGV, mask, call)


def _launch(kernel, tile: Tile, count: int, heads: int, form, q, k, v, more, interval, tiles, ids, outputs):
    """Runs a kernel on `count` tiles of `heads` heads. `more`: its arrays between the values and the interval."""
    (B, T, H, K), (S, G, V) = q.shape, v.shape[1:]
    ids = ids or (interval.start, interval.start)          # read by none
    arrays = [q, k, v, *more, interval.start, interval.end, tiles, *ids]
    constants = dict(T=T, S=S, H=H, G=G, K=K, V=V, KP=flash.padded(K), VP=flash.padded(V), MASKS=int(interval.start.shape[0] > 1),
                     TILES=int(tiles.shape[0] > 1), IDS=int(form.segments), LEFT=int(form.left), CAP=float(form.softcap or 0.0),
                     SCALE=float(form.scale), Q=tile.q, N=tile.k)
    grid = (count, heads, B)
    if form.interpret:
        def run(*arrays):
            return _interpreted(kernel, grid, constants, [np.asarray(x) for x in arrays], outputs)
        return jax.pure_callback(run, outputs, *arrays, vmap_method="sequential")
    import jax_triton
    return jax_triton.triton_call(*arrays, kernel=kernel, out_type=outputs, grid=grid, num_warps=tile.warps,
                                  num_stages=tile.stages, **constants)


class _Pointer:
    """A numpy array as Triton's interpreter takes it: an address and a type."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def _interpreted(kernel, grid, constants, arrays, outputs):
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction, _patch_lang

    class OnHost(GridExecutor):
        """Takes arguments that are on the host already."""

        def _init_args_hst(self, args_dev, kwargs):
            return args_dev, kwargs

        def _restore_args_dev(self, args_dev, args_hst, kwargs, kwargs_hst):
            pass

    results = [np.empty(x.shape, x.dtype) for x in outputs]
    function = InterpretedFunction(kernel.fn)
    held = [np.ascontiguousarray(x) for x in arrays]
    # What the language has written in itself was made for the compiler when it was imported.
    language = triton_kernels.tl
    compiled = {name: getattr(language, name) for name in ("max", "sum", "zeros")}
    with _ONE_AT_A_TIME:
        scopes = [_patch_lang(one.fn) for one in compiled.values()]         # it does so itself, but does not take it back
        try:
            for name, one in compiled.items():
                setattr(language, name, InterpretedFunction(one.fn))
            OnHost(function.rewrite(), function.arg_names, grid)(*map(_Pointer, (*held, *results)), **constants)
        finally:
            for name, one in compiled.items():
                setattr(language, name, one)
            for scope in reversed(scopes):
                scope.restore()
    return tuple(results)


def _forward(form, q, k, v, interval, tiles, ids):
    (B, T, H, _), V, tile = q.shape, v.shape[3], form.tiles.forward
    outputs = jax.ShapeDtypeStruct((B, T, H, V), q.dtype), jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    return _launch(triton_kernels.forward, tile, math.ceil(T / tile.q), H, form, q, k, v, (), interval, tiles, ids, outputs)


def _d_query(form, q, k, v, d_out, lse, delta, interval, tiles, ids):
    tile, (T, H) = form.tiles.d_query, q.shape[1:3]
    outputs = (jax.ShapeDtypeStruct(q.shape, q.dtype),)
    return _launch(triton_kernels.d_query, tile, math.ceil(T / tile.q), H, form, q, k, v, (d_out, lse, delta), interval, tiles,
                   ids, outputs)[0]


def _d_key_value(form, q, k, v, d_out, lse, delta, interval, tiles, ids):
    tile, (S, G) = form.tiles.d_key_value, k.shape[1:3]
    outputs = jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)
    return _launch(triton_kernels.d_key_value, tile, math.ceil(S / tile.k), G, form, q, k, v, (d_out, lse, delta), interval,
                   tiles, ids, outputs)


ENGINE = flash.Engine(_forward, _d_query, _d_key_value)
