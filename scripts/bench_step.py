"""Step time and time to the first loss of the trainer, against a bare JAX loop, in interleaved rounds.

    python scripts/bench_step.py                    one CPU device
    python scripts/bench_step.py --mesh=2,2,2       data=2 fsdp=2 tensor=2 on 8 simulated devices
    python scripts/bench_step.py --depth            seconds of compilation at 8 and 32 layers

Each round runs one loop after the other in fresh processes without a compile cache; the figures are medians over the
rounds, and of the ratio of each round. 32.0 M parameters: 8 layers, width 512, 8 heads, 4 KV heads, gated MLP 1,408,
vocabulary 8,192, length 512, batch 8, float32, AdamW, clipping.
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

HERE = pathlib.Path(__file__).parent
MODEL = dict(vocab_size=8192, embed_dim=512, num_heads=8, num_kv_heads=4, head_dim=64, mlp_dim=1408)


def environment() -> dict[str, str]:
    hidden = ("JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    return {k: v for k, v in os.environ.items() if k not in hidden} | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


def run_trainer(flags, layers: int) -> dict:
    """One run of the training command; the time to the first loss is that of its first row on the console."""
    sizes = dict(zip(("data", "fsdp", "tensor"), flags.mesh.split(","), strict=True)) if flags.mesh else {}
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            **{f"model.{k}": v for k, v in MODEL.items()},
            "model.num_layers": layers,
            "model.max_positions": 512,
            "data.sequence_length": 512,
            "data.eval_fraction": 0.0,
            "train.global_batch_size": 8,
            "train.steps": flags.steps,
            "train.log_every": 1,
            "train.remat": flags.remat,
            "optimizer.learning_rate": 3e-4,
            "optimizer.name": "adamw",
            "optimizer.schedule": "constant",
            "optimizer.warmup_steps": 0,
            "optimizer.weight_decay": 0.1,
            "model.dropout": 0.0,
            "model.qk_norm": False,
            "model.activation": "swiglu",
            "model.tie_embeddings": False,
            "log.tensorboard": False,
            "checkpoint.every": 0,
            **{f"mesh.{axis}": size for axis, size in sizes.items()},
        }
        devices = [f"--simulate_devices={int(sizes['data']) * int(sizes['fsdp']) * int(sizes['tensor'])}"] if sizes else []
        command = [
            sys.executable,
            "-m",
            "jaxlm.train",
            "--config=shakespeare",
            f"--workdir={folder}/run",
            *devices,
            *(f"--config.{key}={value}" for key, value in keys.items()),
        ]
        began, first = time.time(), None
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 1/"):
                first = time.time() - began
        if process.wait():
            raise SystemExit("the trainer failed:\n" + "".join(lines))
        rows = [json.loads(line) for line in pathlib.Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return {"first_loss_seconds": first, "step_seconds": [row["step_seconds"] for row in rows if "loss" in row]}


def run_bare(flags, layers: int) -> dict:
    command = [
        sys.executable,
        str(HERE / "bare_loop.py"),
        f"--layers={layers}",
        f"--steps={flags.steps}",
        f"--remat={flags.remat}",
    ]
    out = subprocess.run(
        command + ([f"--mesh={flags.mesh}"] if flags.mesh else []), env=environment(), capture_output=True, text=True
    )
    if out.returncode:
        raise SystemExit("the bare loop failed:\n" + out.stderr)
    return json.loads(out.stdout.splitlines()[-1])


def compile_seconds(layers: int, remat: str) -> float:
    """Seconds to trace, lower and compile the trainer's step at a depth."""
    code = (
        "import time, jax; from jaxlm.commandline import load_config; from jaxlm.job import build_job; "
        "from jaxlm.train import compile_train_step\n"
        f"over = [('model.num_layers', '{layers}'), ('train.remat', '{remat}'), ('train.global_batch_size', '8'), "
        f"('data.sequence_length', '512')] + [('model.' + k, str(v)) for k, v in {MODEL}.items()]\n"
        "job = build_job(load_config('shakespeare', over), 1).on_devices()\n"
        "start = time.perf_counter(); compile_train_step(job); print(time.perf_counter() - start)"
    )
    return float(
        subprocess.run(
            [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
        ).stdout.split()[-1]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--mesh", default="", help="data,fsdp,tensor")
    parser.add_argument("--depth", action="store_true")
    flags = parser.parse_args()
    if flags.depth:
        pairs = [(compile_seconds(8, flags.remat), compile_seconds(32, flags.remat)) for _ in range(flags.rounds)]
        shallow, deep = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        print(
            f"compile, 8 layers: {shallow:.2f} s; 32 layers: {deep:.2f} s; ratio {statistics.median(b / a for a, b in pairs):.3f}"
        )
        return
    rounds = []
    for i in range(flags.rounds):
        # in turn first and second, so that a drift of the machine's speed favours neither
        order = (run_trainer, run_bare) if i % 2 == 0 else (run_bare, run_trainer)
        results = {run: run(flags, 8) for run in order}
        step = {run: statistics.median(r["step_seconds"][flags.warmup :]) for run, r in results.items()}
        first = {run: r["first_loss_seconds"] for run, r in results.items()}
        rounds.append((step[run_trainer], step[run_bare], first[run_trainer], first[run_bare]))
        print(
            f"round {i + 1}: step {step[run_trainer]:.3f} s against {step[run_bare]:.3f} s, "
            f"first loss {first[run_trainer]:.1f} s against {first[run_bare]:.1f} s",
            flush=True,
        )
    middle = [statistics.median(column) for column in zip(*rounds, strict=True)]
    print(f"step: trainer {middle[0]:.3f} s, bare {middle[1]:.3f} s, ratio {statistics.median(r[0] / r[1] for r in rounds):.3f}")
    print(
        f"first loss: trainer {middle[2]:.1f} s, bare {middle[3]:.1f} s, "
        f"ratio {statistics.median(r[2] / r[3] for r in rounds):.3f}"
    )


if __name__ == "__main__":
    main()
