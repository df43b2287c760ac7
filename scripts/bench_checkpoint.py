"""What checkpoints cost: saving while training goes on, restoring, and the comparison with the checksums.

    python scripts/bench_checkpoint.py                the benchmark model of bench_step.py, 20 steps per save
    python scripts/bench_checkpoint.py --restore      restoring 1 GB against Orbax's own restore of the same tree, and memory

Saving: rounds of 20 steps with one save at their beginning, and of 20 steps without, in turn; the background write runs beside
the steps and counts. Restoring: a state of 1 GB in float32, in turn by this project and by Orbax alone, from a warm page cache.
Memory: the most that a fresh process needs during the restore beyond what it had before and the state itself.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

GIGABYTE = 10**9


def seconds(action) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def saving(flags) -> None:
    import jax
    from bench_step import MODEL

    from jaxlm.checkpoints import Checkpoints
    from jaxlm.commandline import load_config
    from jaxlm.config import CheckpointConfig
    from jaxlm.job import build_job
    from jaxlm.train import compile_train_step

    keys = {**{f"model.{k}": v for k, v in MODEL.items()}, "model.num_layers": 8, "model.max_positions": 512,
            "data.sequence_length": 512, "train.global_batch_size": 8, "optimizer.name": "adamw"}
    job = build_job(load_config("shakespeare", [(k, str(v)) for k, v in keys.items()]), 1).on_devices(jax.devices()[:1])
    step, state = compile_train_step(job), job.initialise()
    tokens = np.random.default_rng(0).integers(0, 8192, (8, 513)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((8, 512), bool), "example": np.arange(8)}
    batch = jax.device_put(batch, job.batch_shardings())
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    ratios, blocked = [], []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(pathlib.Path(folder, "checkpoints"), CheckpointConfig(keep=1))
        saved = 0

        def steps(save: bool) -> None:
            nonlocal state, saved
            if save:
                saved += 1
                blocked.append(seconds(lambda: checkpoints.save(saved, job.to_saved(state), {"format": 2})))
            for _ in range(flags.steps):
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)

        steps(True)
        checkpoints.wait()
        for i in range(flags.rounds):
            found = {}
            for save in (False, True) if i % 2 == 0 else (True, False):
                found[save] = seconds(lambda save=save: steps(save))
                checkpoints.wait()
            ratios.append(found[True] / found[False])
            print(f"round {i + 1}: {flags.steps} steps {found[False]:.2f} s, with a save {found[True]:.2f} s", flush=True)
        checkpoints.close()
    print(f"a save of {size / GIGABYTE:.2f} GB every {flags.steps} steps: {statistics.median(ratios):.3f} times the steps alone "
          f"(the loop waits {statistics.median(blocked):.2f} s for it)")


def tree(count: int = 25, rows: int = 10_000, columns: int = 1_000):
    """1 GB of float32 in `count` arrays."""
    rng = np.random.default_rng(0)
    return {"params": {f"array_{i}": rng.standard_normal((rows, columns), np.float32) for i in range(count)}}


def abstract(state):
    import jax

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)


def restoring(flags) -> None:
    import jax
    import orbax.checkpoint as ocp

    from jaxlm.checkpoints import Checkpoints
    from jaxlm.config import CheckpointConfig

    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder, "checkpoints")
        state = jax.device_put(tree())
        size = sum(x.nbytes for x in jax.tree.leaves(state)) / GIGABYTE
        writer = Checkpoints(place, CheckpointConfig())
        writer.save(1, state, {"format": 2})
        writer.close()
        shapes, reader, orbax = abstract(state), Checkpoints(place), ocp.StandardCheckpointer()
        del state
        ours, theirs, checks = [], [], []
        for i in range(flags.rounds):
            actions = [(ours, lambda: jax.block_until_ready(reader.restore(1, shapes))),
                       (theirs, lambda: jax.block_until_ready(orbax.restore(place / "1" / "state", shapes)))]
            for times, action in actions if i % 2 == 0 else actions[::-1]:
                times.append(seconds(action))
            checks.append(seconds(lambda: reader.damage(1)) / size)
            print(f"round {i + 1}: {ours[-1]:.2f} s, Orbax {theirs[-1]:.2f} s; checksums {checks[-1]:.2f} s per GB", flush=True)
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(f"restoring {size:.2f} GB: {statistics.median(ours):.2f} s, {ratio:.2f} times Orbax's own; "
              f"comparing with the checksums: {statistics.median(checks):.2f} s per GB")
        done = subprocess.run([sys.executable, __file__, f"--memory={place}"], capture_output=True, text=True, check=True)
        extra, largest = json.loads(done.stdout.splitlines()[-1])
        print(f"memory beyond the state: {extra / 2**20:.0f} MiB; the largest array has {largest / 2**20:.0f} MiB")


def peak_memory() -> int:
    """Bytes, of this process alone (`getrusage` would count its parent's)."""
    (line,) = (line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def memory(place: pathlib.Path) -> None:
    """In a fresh process: the peak of resident memory beyond what was there before, and the state."""
    import jax
    import jax.numpy as jnp

    from jaxlm.checkpoints import Checkpoints
    from partitioning.paths import unflatten

    reader = Checkpoints(place)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=device) for name, (shape, dtype) in reader.shapes(1).items()}
    size = [jnp.dtype(x.dtype).itemsize * int(np.prod(x.shape)) for x in shapes.values()]
    before = peak_memory()
    state = jax.block_until_ready(reader.restore(1, unflatten(shapes)))
    extra = peak_memory() - before - sum(size)
    del state
    print(json.dumps([extra, max(size)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--restore", action="store_true")
    parser.add_argument("--memory", metavar="FOLDER", type=pathlib.Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.memory:
        memory(flags.memory)
    else:
        (restoring if flags.restore else saving)(flags)


if __name__ == "__main__":
    main()
