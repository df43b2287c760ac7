"""What it costs to load a Hugging Face folder: time against copying the memory-mapped bytes, and memory.

    python scripts/bench_huggingface.py --gigabytes=4               onto 8 simulated devices, fsdp=8
    python scripts/bench_huggingface.py --gigabytes=4 --mesh=4,2    fsdp=4 tensor=2
    python scripts/bench_huggingface.py --gigabytes=4 --processes=4 one of four processes of two devices, its share

A synthetic model of Llama's shape is written first (or found: --folder), and read once so that it is in the page cache.
Every figure is of a fresh process: `copy` copies each tensor of the files, or as many of its bytes as a process would hold, into
a fresh array, `load` is the project's own (of several processes the first, alone). They take turns; the figure is the median of
the rounds' ratios. Memory is the peak of resident memory beyond what the process had before, pages of the files included.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

SHAPE = dict(vocab_size=32_000, embed_dim=2048, num_heads=16, num_kv_heads=8, head_dim=128, mlp_dim=5632, max_positions=2048)


def write_model(folder: pathlib.Path, gigabytes: float, dtype: str) -> None:
    """A model of about so many GB: as many layers as it takes."""
    from jaxlm.config import ModelConfig
    from jaxlm.huggingface.architecture import config_json
    from jaxlm.huggingface.families import FAMILIES
    from jaxlm.huggingface.folder import DTYPES, Writer
    from jaxlm.huggingface.weights import sources
    from jaxlm.models import build_model, count_parameters
    from partitioning.paths import flatten

    size = 2 if dtype == "BF16" else 4
    one, two = (count_parameters(build_model(ModelConfig(**SHAPE, num_layers=n)).specs) * size for n in (1, 2))
    model = ModelConfig(**SHAPE, num_layers=round((gigabytes * 1e9 - one) / (two - one)) + 1)
    where = sources(FAMILIES["llama"], model, flatten(build_model(model).specs), "model.")
    folder.mkdir(parents=True, exist_ok=True)
    kind = np.dtype(DTYPES[dtype])
    writer = Writer(folder, {name: (bound.shape, kind) for _, names, bound in where.values() for name in names})
    noise = np.random.default_rng(0).standard_normal(2**20, np.float32).astype(DTYPES[dtype])
    for _, names, _ in where.values():
        for name in names:
            flat = writer.array(name).reshape(-1)
            for start in range(0, flat.size, noise.size):
                flat[start:start + noise.size] = noise[:flat.size - start]
    writer.flush()
    (folder / "config.json").write_text(json.dumps(config_json(model, FAMILIES["llama"])))


def resident(peak: bool) -> int:
    """Bytes of this process's memory, now or at its highest."""
    name = "VmHWM" if peak else "VmRSS"
    (line,) = (line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def measure(action, bytes: int) -> dict:
    """Seconds and peak memory beyond the start of an action, whose result is kept until both are known. As much memory as it
    takes is used and given back before: where the machine is a virtual one, what nobody used of late is slow at first."""
    np.ones(int(1.1 * bytes), np.uint8)
    pathlib.Path("/proc/self/clear_refs").write_text("5")          # the peak starts from here
    before, start = resident(peak=False), time.perf_counter()
    result = action()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "memory": resident(peak=True) - before, "bytes": result}


def copying(flags) -> dict:
    """Every tensor into a fresh array, or the first of `processes` equal parts of each."""
    from jaxlm.huggingface.folder import Tensors

    tensors = Tensors(flags.folder)

    def copy():
        kept.extend(np.array(x[:len(x) // flags.processes]) for x in map(tensors.array, tensors.entries))
        return sum(x.nbytes for x in kept)

    kept: list[np.ndarray] = []
    return measure(copy, sum(entry.end - entry.start for entry in tensors.entries.values()) // flags.processes)


def loading(flags) -> dict:
    """The project's own, onto all devices of all processes."""
    import jax

    from jaxlm import distributed
    from jaxlm.commandline import load_config
    from jaxlm.huggingface.weights import Weights
    from jaxlm.job import build_job

    fsdp, _, tensor = flags.mesh.partition(",")
    keys = [("mesh.data", "1"), ("mesh.fsdp", fsdp), ("mesh.tensor", tensor or "1"), ("train.global_batch_size", "8")]
    config = load_config(str(flags.folder), keys)
    distributed.join(config.distributed)
    weights = Weights(flags.folder)
    dtype = str(weights.dtypes()["embed/embedding"])
    config = load_config(str(flags.folder), [*keys, ("precision.params", dtype)])
    wanted = build_job(config, jax.device_count()).on_devices().abstract_saved()["params"]
    jax.block_until_ready(jax.device_put(np.ones(8), jax.local_devices()[0]))
    if jax.process_index():
        return {"seconds": 0, "memory": 0, "bytes": 0}
    kept = []

    def load():
        kept.append(weights.restore(0, {"params": wanted}))
        return sum(shard.data.nbytes for x in jax.tree.leaves(kept[0]) for shard in x.addressable_shards)

    return measure(load, sum(entry.end - entry.start for entry in weights.entries.values()) // flags.processes)


def fresh(flags, what: str) -> dict:
    """One measurement in a process of its own; of several processes, of the one that loads."""
    words = [sys.executable, __file__, f"--folder={flags.folder}", f"--mesh={flags.mesh}", f"--processes={flags.processes}"]
    count = flags.processes if what == "load" else 1
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(8 // flags.processes)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    many = [f"{sys.executable}", str(pathlib.Path(__file__).with_name("launch_local.py")), "-n", str(count), "--cpu-devices",
            str(8 // count), "--"] if count > 1 else []
    done = subprocess.run([*many, *words, f"--do={what}"], env=environment, capture_output=True, text=True)
    found = [json.loads(line[line.index("{"):]) for line in done.stdout.splitlines() if '"seconds"' in line]
    if len(found) != count:
        raise SystemExit(done.stdout + done.stderr)
    return {key: max(one[key] for one in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--dtype", choices=("F32", "BF16"), default="F32")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--mesh", default="8", help="fsdp, or fsdp,tensor; 8 in all")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--do", choices=("copy", "load"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.do:
        print(json.dumps((copying if flags.do == "copy" else loading)(flags)), flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        flags.folder = flags.folder or pathlib.Path(temporary, "model")
        if not (flags.folder / "config.json").exists():
            write_model(flags.folder, flags.gigabytes, flags.dtype)
        fresh(flags, "copy")
        ratios, memory = [], []
        for i in range(flags.rounds):
            found = {what: fresh(flags, what) for what in (("copy", "load") if i % 2 else ("load", "copy"))}
            ratios.append(found["load"]["seconds"] / found["copy"]["seconds"])
            memory.append(found["load"]["memory"] / found["load"]["bytes"])
            copy, load = (f"{found[what]['bytes'] / 1e9:.2f} GB {found[what]['seconds']:.2f} s" for what in ("copy", "load"))
            print(f"round {i + 1}: copying {copy}; loading {load}, memory {memory[-1]:.3f} of it", flush=True)
        print(f"loading: {statistics.median(ratios):.2f} times the copying, peak memory {max(memory):.3f} times what is held")


if __name__ == "__main__":
    main()
