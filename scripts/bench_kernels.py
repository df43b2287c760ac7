"""Every attention backend that runs here, side by side: values checked first, then times, forwards and backwards.

    python scripts/bench_kernels.py                     on a GPU: TFLOP/s at lengths 1k to 16k and widths 64, 128, 256
    python scripts/bench_kernels.py --step              a training step with each backend of this machine, length 2,048
    python scripts/bench_kernels.py --sweep             values and gradients over many shapes and masks (interpreted on a CPU,
                                                        with the tiles of --tiles='NVIDIA H200')

All backends run in turn, several rounds; figures are medians. A causal matrix counts half, recomputation does not count: forward
4 * B * H * T * S * K / 2 operations, backward 2.5 times that.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from unittest import mock

import numpy as np

BACKENDS = ("cudnn", "pallas", "jax_triton", "chunked", "reference")
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-3}     # of an error, relative where the value is above 1


def make(backend, interpret=False, **options):
    """The loss's gradient function and the forward function, jitted."""
    import jax
    import jax.numpy as jnp

    from kernels.attention import attention
    call = functools.partial(attention, backend=backend, interpret=interpret, **options)
    forward = jax.jit(call)

    def loss(q, k, v, d_out):
        return jnp.sum(call(q, k, v).astype(jnp.float32) * d_out.astype(jnp.float32))

    return forward, jax.jit(jax.grad(loss, (0, 1, 2)))


def arrays(rng, batch, T, S, H, G, K, V, dtype):
    import jax.numpy as jnp
    return [jnp.asarray(rng.standard_normal((batch, n, h, w)), dtype) for n, h, w in ((T, H, K), (S, G, K), (S, G, V), (T, H, V))]


def check(backend, dtype, width, rounds=2):
    """Whether a backend's values and gradients are those of plain XLA in float32, and the same bits every time."""
    import jax
    import jax.numpy as jnp
    q, k, v, d_out = arrays(np.random.default_rng(0), 1, 1000, 1000, 8, 2, width, width, dtype)
    forward, gradient = make(backend)
    with jax.default_matmul_precision("highest"):
        want_forward, want_gradient = make("reference")
        wide = [x.astype(jnp.float32) for x in (q, k, v, d_out)]
        want = jax.device_get((want_forward(*wide[:3]), *want_gradient(*wide)))
    results = [jax.device_get((forward(q, k, v), *gradient(q, k, v, d_out))) for _ in range(rounds)]
    error = max(float(np.max(np.abs(a.astype(np.float32) - b) / np.maximum(1, np.abs(b)))) for a, b in zip(results[0], want))
    same = all(np.array_equal(a, b) for other in results[1:] for a, b in zip(results[0], other))
    return error, same


def timed(function, given, calls):
    import jax
    start = time.perf_counter()
    for _ in range(calls):
        out = function(*given)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def first_line(reason):
    return (str(reason).splitlines() or [""])[0] or type(reason).__name__


def throughput(flags):
    """TFLOP/s of each backend, forward and backward: 1 if any gives wrong values, or not the same bits twice.

    One that cannot serve a call, does not compile or runs out of memory is said and left out: the others' figures still count.
    """
    import jax
    import jax.numpy as jnp
    print("device:", jax.devices()[0].device_kind, flush=True)
    usable, wrong = [], 0
    for backend, width in itertools.product(flags.backends.split(","), map(int, flags.widths.split(","))):
        try:
            error, same = check(backend, jnp.dtype(flags.dtype), width)
        except Exception as reason:            # whatever a compiler may throw
            print(f"{backend}, width {width}: left out: {first_line(reason)}", flush=True)
            continue
        right = error <= BOUNDS[flags.dtype]   # False for a NaN
        wrong += not (right and same)
        usable.append((backend, width))
        print(f"{backend}, width {width}: largest error {error:.1e} of plain XLA in float32"
              f"{'' if right else ', which is WRONG'}, "
              f"{'the same bits twice' if same else 'NOT the same bits twice'}", flush=True)
    rows = []
    for length, width in itertools.product(map(int, flags.lengths.split(",")), map(int, flags.widths.split(","))):
        heads = flags.embed // width
        batch = max(1, flags.tokens // length)
        given = arrays(np.random.default_rng(1), batch, length, length, heads, heads // flags.group, width, width, flags.dtype)
        work = 4 * batch * heads * length * length * width / 2
        functions = {}
        for backend in (name for name, fits in usable if fits == width):
            if backend == "reference" and length > 4096:
                continue                       # holds a quarter of all scores
            forward, gradient = make(backend)
            try:
                jax.block_until_ready((forward(*given[:3]), gradient(*given)))
            except Exception as reason:
                print(f"length {length:6d}  width {width:3d}  {backend:10s}  left out: {first_line(reason)}", flush=True)
                continue
            functions[backend] = forward, gradient
        times = {backend: ([], []) for backend in functions}
        for _ in range(flags.rounds):
            for backend, (forward, gradient) in functions.items():
                times[backend][0].append(timed(forward, given[:3], flags.calls))
                times[backend][1].append(timed(gradient, given, flags.calls))
        for backend, (forward, both) in times.items():
            ahead, whole = statistics.median(forward), statistics.median(both)
            row = {"length": length, "width": width, "backend": backend, "forward": work / ahead / 1e12,
                   "backward": 2.5 * work / max(whole - ahead, 1e-9) / 1e12}
            rows.append(row)
            print(f"length {length:6d}  width {width:3d}  {backend:10s}  forward {row['forward']:7.1f}  "
                  f"backward {row['backward']:7.1f} TFLOP/s", flush=True)
    if flags.json:
        print(json.dumps(rows))
    return int(wrong > 0)


def step(flags):
    """A training step with each backend, in turn."""
    import jax

    from jaxlm.commandline import load_config
    from jaxlm.job import build_job
    from jaxlm.train import compile_train_step
    keys = {"model.num_layers": 4, "model.embed_dim": 512, "model.num_heads": 8, "model.num_kv_heads": 4, "model.mlp_dim": 1408,
            "model.max_positions": 2048, "data.sequence_length": 2048, "train.global_batch_size": 1, "optimizer.name": "adamw"}
    programs = {}
    for backend in ("chunked", "reference"):
        config = load_config("shakespeare", [(key, str(value)) for key, value in (keys | {"kernels.attention": backend}).items()])
        job = build_job(config, 1).on_devices(jax.devices()[:1])
        rng = np.random.default_rng(0)
        batch = {name: rng.integers(0, 200, x.shape).astype(x.dtype) for name, x in job.abstract_batch().items()}
        batch["mask"] = np.ones_like(batch["mask"], bool)
        compiled = compile_train_step(job)
        programs[backend] = [compiled, job.initialise(), jax.device_put(batch, job.batch_shardings())]
        print(f"{backend}: {compiled.memory_analysis().temp_size_in_bytes / 2**20:.0f} MiB of temporary memory", flush=True)
    times = {backend: [] for backend in programs}
    for _ in range(flags.rounds + 1):
        for backend, program in programs.items():
            start = time.perf_counter()
            program[1], metrics = program[0](*program[1:])
            jax.block_until_ready(metrics)
            times[backend].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(times["chunked"][1:], times["reference"][1:])]
    for backend, found in times.items():
        print(f"{backend}: {statistics.median(found[1:]):.2f} s a step")
    print(f"chunked against plain XLA: {statistics.median(ratios):.3f} (median of {len(ratios)} rounds, "
          f"{min(ratios):.3f} to {max(ratios):.3f})")


def sweep(flags):
    """Values and gradients of a backend in float32 over a grid of shapes and masks, against float64: 1 if any is wrong."""
    import jax

    from kernels.attention import chips, flash
    from tests.kernels import grid
    interpret = jax.devices()[0].platform == "cpu" and flags.backend in ("pallas", "jax_triton")
    cases, worst, wrong = grid.whole()[flags.first::flags.every], {}, 0
    tiles = flags.tiles or jax.devices()[0].device_kind
    with mock.patch.object(flash, "tiles_for", lambda kind, *what: chips.tiles_for(tiles, *what)):
        for number, case in enumerate(cases, 1):
            errors = grid.errors(case, flags.backend, interpret)
            worst = {name: max(error, worst.get(name, 0.0)) for name, error in ({**worst, **errors}).items()}
            if not grid.is_right(errors):
                wrong += 1
                print(f"WRONG: {case}: {errors}", flush=True)
            if number % 50 == 0 or number == len(cases):
                largest = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
                print(f"{flags.backend}: {number} of {len(cases)} cases, {wrong} wrong; largest errors {largest}", flush=True)
                jax.clear_caches()             # or thousands of programs stay in memory
    return int(wrong > 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--backend", default="pallas", help="of --sweep")
    parser.add_argument("--first", type=int, default=0, help="case that --sweep begins with")
    parser.add_argument("--every", type=int, default=1, help="--sweep does one case of so many")
    parser.add_argument("--tiles", help="device_kind whose tiles --sweep takes; default: of the device")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384")
    parser.add_argument("--widths", default="64,128,256")
    parser.add_argument("--dtype", default="bfloat16", choices=BOUNDS)
    parser.add_argument("--embed", type=int, default=2048, help="heads times width")
    parser.add_argument("--group", type=int, default=1, help="query heads to one key head")
    parser.add_argument("--tokens", type=int, default=16384, help="of a call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    return (step if flags.step else sweep if flags.sweep else throughput)(flags)


if __name__ == "__main__":
    sys.exit(main())
