"""The attention kernels for GPUs that are not here: they lower for each generation, and compile without spills to wgmma."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kernels.attention import attention, choose, chunked, cudnn, pallas
from kernels.attention.call import describe
from kernels.attention.chips import TABLE, capability, tiles_for
from kernels.attention.mask import Mask
from kernels.placement import HERE
from scripts import compile_kernels

A100, H200 = (AbstractDevice(device_kind=f"NVIDIA {name}", num_cores=cores, platform="gpu") for name, cores in (
    ("A100-SXM4-80GB", 108), ("H200", 132)))
VARIANTS = {                                   # sizes T, S, H, G, K, V; options; whether there are segment ids
    "causal": ((512, 512, 8, 2, 128, 128), {}, False),
    "full, unequal lengths": ((65, 200, 4, 4, 64, 64), dict(causal=False), False),
    "one key head, widths of no power of two": ((257, 257, 8, 1, 80, 96), {}, False),
    "narrow": ((64, 64, 2, 2, 32, 32), {}, False),
    "wide": ((200, 200, 2, 1, 256, 256), {}, False),
    "window": ((300, 300, 4, 2, 64, 64), dict(window=100), False),
    "packed": ((300, 300, 4, 2, 64, 64), {}, True),
    "packed, window, cap, sinks": ((300, 300, 4, 2, 128, 128), dict(window=100, softcap=30.0, sinks=True), True),
    "one query of many keys": ((1, 4096, 8, 2, 128, 128), dict(query_offset=4000), False),
}


def lowered(device, variant, dtype):
    """The module for a GPU, as text."""
    (T, S, H, G, K, V), options, packed = VARIANTS[variant]
    options = dict(options)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, T, H, K), (2, S, G, K), (2, S, G, V))]
    ids = {"q_segment_ids_BT": T, "k_segment_ids_BS": S} if packed else {}
    more = {name: jax.ShapeDtypeStruct((2, length), jnp.int32) for name, length in ids.items()}
    if options.pop("sinks", False):
        more["sinks_H"] = jax.ShapeDtypeStruct((H,), jnp.float32)

    def total(q, k, v, more):
        out, lse = attention(q, k, v, return_lse=True, backend="pallas", **options, **more)
        return out.astype(jnp.float32).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        step = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
        return step.trace(*shapes, more).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("device", [A100, H200], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("variant, dtype", [*((variant, dtype) for variant in VARIANTS for dtype in ("bfloat16", "float32")),
                                            ("causal", "float16")])
def test_forward_and_backward_lower_for_each_generation(variant, dtype, device):
    text = lowered(device, variant, jnp.dtype(dtype))
    names = set(re.findall(r'name = "(_\w+_kernel)"', text))
    assert names == set(compile_kernels.KERNELS), names


def test_auto_takes_no_kernel_that_has_not_run_on_a_gpu_yet():
    shapes = [jax.ShapeDtypeStruct((1, 2048, 2, 64), jnp.bfloat16)] * 3
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        for backend, ours in (("auto", False), ("pallas", True)):
            call = jax.jit(functools.partial(attention, backend=backend))
            text = call.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
            assert ("_forward_kernel" in text) == ours


@pytest.mark.parametrize("flags, taken", [("", chunked), ("--xla_gpu_exclude_nondeterministic_ops=true", cudnn),
                                          ("--a=b --xla_gpu_deterministic_ops", cudnn),
                                          ("--xla_gpu_exclude_nondeterministic_ops=false", chunked)])
def test_auto_takes_cudnn_only_where_xla_has_it_repeat_its_gradients(flags, taken, monkeypatch):
    monkeypatch.setattr(cudnn, "_is_installed", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", flags)
    x = jax.ShapeDtypeStruct((1, 2048, 2, 64), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        call = describe(x, x, x, Mask(True, None, 0, None, None), softcap=None, scale=None, with_lse=False, placement=HERE,
                        interpret=False)
    assert choose.__wrapped__(call) is taken


def test_offsets_are_64_bits_wide_where_an_array_has_more_than_2_to_the_31_elements(monkeypatch, capsys):
    monkeypatch.setattr(pallas.pl, "pallas_call", functools.partial(pallas.pl.pallas_call, debug=True))

    def offsets(batch):
        """How wide the numbers are that are added to pointers to 16 bits, in the three kernels."""
        x = jax.ShapeDtypeStruct((batch, 4096, 64, 128), jnp.bfloat16)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
            step = jax.grad(lambda *x: attention(*x, backend="pallas").astype(jnp.float32).sum(), (0, 1, 2))
            jax.jit(step).trace(x, x, x).lower(lowering_platforms=("cuda",))
        written = capsys.readouterr().out
        assert written.count("tt.func public") == 3
        return set(re.findall(r"tt\.addptr [^:]*: (?:tensor<[\dx]*)?!tt\.ptr<bf16>>?, (?:tensor<[\dx]*)?(i\d+)", written))

    assert offsets(1) == {"i32"}
    assert offsets(2 ** 31 // (4096 * 64 * 128) + 1) == {"i64"}


needs_jax_triton = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None,
                                      reason="jax-triton is not installed (pip install '.[gpu]')")
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None,
                                    reason="XLA's compiler for NVIDIA GPUs is not installed (pip install '.[compile]')")


def figures(backend, target, width, dtype):
    form = dict(backend=backend, tiles="", dtype=dtype, groups=4, window=None, softcap=None, segments=False, full=False)
    return compile_kernels.figures(target, width, form)


@needs_compiler
@pytest.mark.parametrize("width, dtype", [(64, "bfloat16"), (128, "bfloat16"), (64, "float32")])
@pytest.mark.parametrize("target, shared", [("a100", 163 * 1024), ("h200", 227 * 1024)])
@pytest.mark.parametrize("backend", ["pallas", pytest.param("jax_triton", marks=needs_jax_triton)])
def test_compiled_they_spill_nothing_fit_into_shared_memory_and_use_what_hopper_has(backend, target, shared, width, dtype):
    """In float32 there is nothing to use: tensor cores would multiply TF32."""
    rows = figures(backend, target, width, dtype)
    assert {row["kernel"] for row in rows} == set(compile_kernels.KERNELS.values())
    for row in rows:
        assert row["spills"] == 0 and 0 < row["shared"] <= shared and not row["tf32"], row
        assert (row["wgmma"] > 0) == (target == "h200" and dtype == "bfloat16"), row
        assert (row["mma"] > 0) == (target == "a100" and dtype == "bfloat16"), row


def test_chips_are_known_by_the_names_that_jax_gives_them():
    known = {"NVIDIA A100-SXM4-80GB": 8.0, "NVIDIA H200": 9.0, "NVIDIA H100 80GB HBM3": 9.0, "NVIDIA L40S": 8.9, "Tesla T4": 7.5,
             "NVIDIA GeForce RTX 4090": 8.9, "NVIDIA A1000": None, "NVIDIA X9": None}
    assert {name: capability(name) for name in known} == known


def test_every_chip_dtype_width_and_mask_has_tiles_of_its_own():
    for chip in ("NVIDIA A100", "NVIDIA H200", "NVIDIA X9"):
        for itemsize in (2, 4):
            for width in (1, 40, 64, 65, 128, 256):
                assert all(tiles_for(chip, itemsize, width, causal) for causal in (True, False))
    assert len({tiles_for(chip, 2, width, True) for chip in ("NVIDIA A100", "NVIDIA H200") for width in (64, 128, 256)}) == 6
    assert len(TABLE) == 8
