"""What the compiler makes of the attention kernels for a GPU that is not here: registers, spills, shared memory, wgmma.

    python scripts/compile_kernels.py [--targets=a100,h200] [--widths=64,128] [--tiles=FORWARD,DQ,DKV each q.k.warps.stages]
    python scripts/compile_kernels.py --backend=jax_triton     the kernels in Triton's own language (pip install '.[gpu]', too)
    python scripts/compile_kernels.py --elementwise     what XLA makes of RMSNorm, RoPE and SwiGLU

Needs the CUDA compile wheels (pip install '.[compile]') and no GPU. Prints a row for each kernel, and with --json a list.
"""

import argparse
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = {"_forward_kernel": "forward", "_d_query_kernel": "dq", "_d_key_value_kernel": "dk, dv"}
TRITON_KERNELS = {"forward": "forward", "d_query": "dq", "d_key_value": "dk, dv"}
ARCHITECTURES = {"a100": "sm_80", "h200": "sm_90a"}


def compiler() -> str:
    """ptxas of the wheels, or the machine's."""
    import importlib.util
    for folder in getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or ():
        for path in pathlib.Path(folder).glob("*/bin/ptxas"):
            return str(path)
    found = shutil.which("ptxas")
    if found is None:
        sys.exit("ptxas is not installed: pip install -c requirements.lock -e '.[compile]'")
    return found


def compile_attention(target: str, width: int, form: dict) -> None:
    """In this process: attention and its gradient, for one device of the target. Who compiles it writes it to a folder: XLA, or
    jax-triton, which does so when it lowers."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from kernels.attention import attention, chips
    from partitioning import target as find

    if form["tiles"]:
        tiles = chips.Tiles(*(chips.Tile(*map(int, one.split("."))) for one in form["tiles"].split(",")))
        for key in chips.TABLE:
            chips.TABLE[key] = {256: tiles}
    chip = find(target)
    topology = topologies.get_topology_desc(platform="cuda", target_config=chip.description, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("one",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    length, heads, groups = 4096, 8, form["groups"]
    q = jax.ShapeDtypeStruct((1, length, heads, width), jnp.dtype(form["dtype"]), sharding=spec)
    k = jax.ShapeDtypeStruct((1, length, heads // groups, width), q.dtype, sharding=spec)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=spec)

    def total(q, k, v, ids):
        given = dict(q_segment_ids_BT=ids, k_segment_ids_BS=ids) if form["segments"] else {}
        return attention(q, k, v, causal=not form["full"], window=form["window"], softcap=form["softcap"],
                         backend=form["backend"], **given).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(jax.value_and_grad(total, (0, 1, 2))).lower(q, k, k, ids)
        if form["backend"] == "pallas":
            lowered.compile()


def figures(target: str, width: int, form: dict) -> list[dict]:
    """One dict for each kernel: registers, spills (bytes), shared (bytes), wgmma, mma and tf32 (their number)."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx --xla_gpu_dump_llvmir=true"
        code = f"import scripts.compile_kernels as c; c.compile_attention({target!r}, {width!r}, {form!r})"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false",
                       "JAX_TRITON_DUMP_DIR": folder, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return list(_read(pathlib.Path(folder), target, width))


def elementwise(target: str) -> list[dict]:
    """One dict for each operation, forward and backward: kernels, and bytes moved as a multiple of reading each input and writing
    each output once."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from jaxlm.models import rope
    from partitioning import target as find

    def norm(x, branch, gain):
        total = x + branch
        wide = total.astype(jnp.float32)
        return total, (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5) * gain).astype(x.dtype)

    def rotated(x, cos, sin):
        return rope.rotate(x, (cos, sin))

    def swiglu(gate, up):
        return jax.nn.silu(gate) * up

    topology = topologies.get_topology_desc(platform="cuda", target_config=find(target).description, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("one",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=spec)

    wide, angles = of(4, 4096, 14336), of(4096, 1, 64, dtype=jnp.float32)
    cases = {"RMSNorm and residual": (norm, (of(4, 4096, 4096), of(4, 4096, 4096), of(4096, dtype=jnp.float32)), 3),
             "RoPE": (rotated, (of(4, 4096, 32, 128), angles, angles), 1), "SwiGLU": (swiglu, (wide, wide), 2)}
    rows = []
    for name, (function, given, moving) in cases.items():
        def backward(given, cotangents, function=function, moving=moving):
            fixed = given[moving:]
            return jax.vjp(lambda *x: function(*x, *fixed), *given[:moving])[1](cotangents)

        results = jax.eval_shape(function, *given)
        cotangents = jax.tree.map(lambda x: of(*x.shape, dtype=x.dtype), results)
        def forward(given, function=function):
            return function(*given)

        for way, step, inputs in (("forward", forward, (given,)), ("backward", backward, (given, cotangents))):
            kernels, moved = _moved(jax.jit(step).lower(*inputs).compile().as_text())
            least = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((inputs, jax.eval_shape(step, *inputs))))
            rows.append({"target": target, "operation": name, "way": way, "kernels": kernels,
                         "times least": round(moved / least, 3)})
    return rows


def _moved(text: str) -> tuple[int, int]:
    """(kernels, bytes of their operands and results) in the entry computation of an optimised program."""
    from numpy import dtype
    lines = re.search(r"^ENTRY .*?\{\n(.*?)^\}", text, re.S | re.M)[1].splitlines()
    sizes, kernels, moved = {}, 0, 0
    for line in lines:
        name, shape, kind, rest = re.match(r"\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)", line).groups()
        sizes[name] = sum(int(dtype(_DTYPES.get(one, one)).itemsize) * math.prod(int(n) for n in dims.split(",") if n)
                          for one, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape))
        if kind not in ("parameter", "constant", "tuple", "get-tuple-element", "bitcast"):
            kernels += 1
            moved += sizes[name] + sum(sizes[operand] for operand in re.findall(r"%([\w.-]+)", rest.split(")")[0]))
    return kernels, moved


_DTYPES = {"bf16": "uint16", "f16": "float16", "f32": "float32", "s32": "int32", "pred": "bool"}


def _read(folder: pathlib.Path, target: str, width: int) -> Iterator[dict]:
    for name, path, shared in _compiled(folder):
        text, out = path.read_text(), folder / "out.cubin"
        said = subprocess.run([compiler(), "-v", f"-arch={ARCHITECTURES[target]}", str(path), "-o", str(out)],
                              capture_output=True, text=True)
        if said.returncode:
            raise RuntimeError(said.stderr[-2000:])
        entry = re.search(r"\.entry (\w+)\(", text)[1]
        report = said.stderr[said.stderr.index(entry):]
        stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report).groups())
        yield {"target": target, "width": width, "kernel": name, "registers": int(re.search(r"Used (\d+) reg", report)[1]),
               "spills": stores + loads, "shared": shared, "wgmma": len(re.findall(r"wgmma\.mma_async", text)),
               "mma": len(re.findall(r"\bmma\.sync", text)), "tf32": len(re.findall(r"tf32", text))}


def _compiled(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path, int]]:
    """Each kernel's name, the file of its PTX, and its shared memory in bytes."""
    thunks = "".join(path.read_text() for path in folder.glob("*.thunk_sequence.txt"))
    found = set()
    for path in sorted(folder.glob("*.ptx")):          # XLA's
        entry = re.search(r"\.entry (\w+)\(", path.read_text())
        name = next((label for part, label in KERNELS.items() if entry and part.strip("_") in entry[1]), None)
        if name is not None and name not in found:
            found.add(name)
            yield name, path, int(re.search(rf" {re.escape(entry[1])} grid.*?shared_memory: (\d+)", thunks)[1])
    for path in sorted(folder.glob("*/*.ptx")):        # jax-triton's
        yield TRITON_KERNELS[path.stem], path, int(re.search(r"shared_mem_bytes:\s*(\d+)",
                                                             path.with_suffix(".compile_info").read_text())[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="pallas", choices=("pallas", "jax_triton"))
    parser.add_argument("--targets", default="a100,h200")
    parser.add_argument("--widths", default="64,128")
    parser.add_argument("--tiles", default="", help="of the three kernels, q.k.warps.stages each, instead of the table's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--window", type=int)
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--segments", action="store_true")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--elementwise", action="store_true")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    parts = ("backend", "tiles", "dtype", "groups", "window", "softcap", "segments", "full")
    form = {name: getattr(flags, name) for name in parts}
    targets = flags.targets.split(",")
    if flags.elementwise:
        os.environ["JAX_PLATFORMS"] = "cpu"
        sys.path.insert(0, str(ROOT))
        rows = [row for target in targets for row in elementwise(target)]
    else:
        rows = [row for target in targets for width in map(int, flags.widths.split(",")) for row in figures(target, width, form)]
    if flags.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)


if __name__ == "__main__":
    main()
