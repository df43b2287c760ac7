#!/usr/bin/env python3
"""Kills a training run again and again at random moments, resumes it each time, and checks that nothing is lost.

    python scripts/fault_injection.py --kills 60 --seed 0

Runs of a very small model, with saves every few steps, are alternately one process and several. Each attempt to train is
killed (SIGKILL to one or all of its processes, or SIGTERM) while it starts, restores and compiles, saves, or trains; the next
attempt must go on from the newest checkpoint that was committed when the last one died. When a run has come to its end, its
parameters, optimizer state, counters and losses are compared, bit by bit, with those of a run that nobody disturbed.

Prints a line per kill and the figures at the end; exit status 0 if every check held. Needs a few hundred MB of disk.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SAVE_EVERY = 3
SMALL = ("--config=shakespeare", "--config.model.num_layers=1", "--config.model.embed_dim=16", "--config.model.num_heads=2",
         "--config.model.mlp_dim=32", "--config.data.sequence_length=16", "--config.train.global_batch_size=4",
         "--config.optimizer.name=adamw", "--config.optimizer.warmup_steps=2", "--config.model.dropout=0.1",
         "--config.log.tensorboard=False", "--config.train.eval_steps=1", "--config.mesh.data=1", "--config.mesh.fsdp=-1",
         "--config.distributed.heartbeat_timeout=10", "--config.distributed.start_timeout=30")
MOMENTS = {"start": 2, "restore and compile": 2, "save": 4, "training": 3}     # with their weights
PATIENCE = 120                                 # seconds for anything that must happen


class Broken(Exception):
    """A promise that was not kept."""


@dataclasses.dataclass
class Kill:
    """What was done to an attempt, and what came of it."""
    aim: str
    signal: str
    victims: str
    processes: int
    stage: str = ""                            # where it found the attempt, which may have been faster than the aim
    committed: int = 0
    left_unfinished: bool = False
    seconds: float = 0.0


class Attempt:
    """The processes of one attempt to train, watched."""

    def __init__(self, folder: pathlib.Path, count: int, steps: int, cache: pathlib.Path, *arguments: str):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONUNBUFFERED": "1",
                       "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(cache),
                       "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                       "JAXLM_COORDINATOR": f"localhost:{port}", "JAXLM_NUM_PROCESSES": str(count)}
        command = [sys.executable, "-m", "jaxlm.train", *SMALL, f"--config.train.steps={steps}", f"--workdir={folder}",
                   *arguments]
        self.processes = [subprocess.Popen(command, env=environment | {"JAXLM_PROCESS_ID": str(i)}, text=True, cwd=ROOT,
                                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                          for i in range(count)]
        self.lines: list[list[str]] = [[] for _ in range(count)]
        self.restored: int | None = None       # the step that it says it went on from
        self.seen = {"weights": threading.Event(), "step": threading.Event()}
        self._pumps = [threading.Thread(target=self._pump, args=(i,), daemon=True) for i in range(count)]
        for pump in self._pumps:
            pump.start()

    def _pump(self, index: int) -> None:
        for line in self.processes[index].stdout:
            self.lines[index].append(line)
            if index == 0 and line.startswith("weights:"):
                self.restored = int(line.split("step ")[1].split()[0]) if "checkpoint of step" in line else 0
                self.seen["weights"].set()
            if index == 0 and line.startswith("step "):
                self.seen["step"].set()

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def stage(self) -> str:
        """What process 0 is doing, as its lines tell."""
        seen = {name for name, event in self.seen.items() if event.is_set()}
        return "training" if "step" in seen else "restore and compile" if "weights" in seen else "start"

    def wait_for(self, event: str) -> None:
        """Until process 0 has printed such a line, or the attempt has ended by itself."""
        deadline = time.monotonic() + PATIENCE
        while not self.seen[event].wait(0.02) and not self.ended():
            if time.monotonic() > deadline:
                raise Broken(f"no line {event!r} within {PATIENCE} s")

    def finish(self, patience: float = PATIENCE) -> list[int]:
        """The exit statuses, when all have ended."""
        deadline = time.monotonic() + patience
        try:
            codes = [process.wait(max(deadline - time.monotonic(), 0.01)) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise Broken(f"not all processes ended within {patience:g} s") from None
        finally:
            for process in self.processes:
                process.kill()
        for pump in self._pumps:
            pump.join(10)
        return codes

    def words(self) -> str:
        return "".join(f"[{i}] {line}" for i, lines in enumerate(self.lines) for line in lines[-15:])


def committed(folder: pathlib.Path) -> int:
    """The newest checkpoint that is there under its own name; 0 if there is none."""
    return max((int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdigit()), default=0)


def unfinished(folder: pathlib.Path) -> set[tuple[str, int]]:
    """Saves that are under way, or were when their process died: the folder of each."""
    out = set()
    for path in (folder / "checkpoints").glob("*tmp*"):
        with contextlib.suppress(FileNotFoundError):       # it is done
            out.add((path.name, path.stat().st_ino))
    return out


def disturb(attempt: Attempt, folder: pathlib.Path, kill: Kill, rng: random.Random) -> float:
    """Waits for the moment and sends the signal. Returns when it was sent."""
    if kill.aim == "start":
        time.sleep(rng.uniform(0, 3))
    elif kill.aim == "restore and compile":
        attempt.wait_for("weights")
        time.sleep(rng.uniform(0, 1.2))
    else:
        attempt.wait_for("step")
        time.sleep(rng.uniform(0, 1))
        deadline = time.monotonic() + PATIENCE
        while kill.aim == "save" and not unfinished(folder) and not attempt.ended() and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.03) if kill.aim == "save" else 0)
    chosen = attempt.processes if kill.victims == "all" else [attempt.processes[int(kill.victims)]]
    for process in chosen:
        process.send_signal(getattr(signal, kill.signal))
    return time.monotonic()


def choose(rng: random.Random, count: int) -> Kill:
    moment = rng.choices(list(MOMENTS), MOMENTS.values())[0]
    return Kill(moment, "SIGTERM" if rng.random() < 0.2 else "SIGKILL", rng.choice(["all", *map(str, range(count))]), count)


def check_restored(attempt: Attempt, expected: int) -> None:
    if attempt.restored is not None and attempt.restored != expected:
        raise Broken(f"it went on from step {attempt.restored}, though step {expected} was committed")


def run_through(folder: pathlib.Path, count: int, steps: int, cache: pathlib.Path, kills: int, rng: random.Random) -> list[Kill]:
    """Trains to the end with up to so many kills on the way."""
    done: list[Kill] = []
    newest = 0
    while True:
        before = unfinished(folder)            # of the last attempt
        attempt = Attempt(folder, count, steps, cache, f"--config.checkpoint.every={SAVE_EVERY}", "--config.train.log_every=5")
        try:
            if len(done) == kills:
                codes = attempt.finish(10 * PATIENCE)
                check_restored(attempt, newest)
                if any(codes):
                    raise Broken(f"undisturbed, it ended with {codes}")
                return done
            kill = choose(rng, count)
            sent = disturb(attempt, folder, kill, rng)
            kill.stage = attempt.stage()
            codes = attempt.finish()
            kill.seconds = time.monotonic() - sent
            check_restored(attempt, newest)
            if not any(codes):                 # it was faster
                return done
            if kill.signal == "SIGTERM" and not set(codes) <= {3, -signal.SIGTERM}:
                raise Broken(f"after SIGTERM it ended with {codes}")
            if kill.signal == "SIGKILL" and 0 in codes and committed(folder) < steps:
                raise Broken(f"after the loss of a process it ended with {codes}")
            kill.committed, kill.left_unfinished = committed(folder), bool(unfinished(folder) - before)
            if kill.stage == "training" and kill.left_unfinished:
                kill.stage = "save"
            if kill.committed < newest:
                raise Broken(f"step {newest} was committed, and now the newest is {kill.committed}")
            newest = kill.committed
        except Broken as error:
            for process in attempt.processes:
                process.kill()
            raise Broken(f"{error}\n{attempt.words()}") from None
        done.append(kill)
        print(f"{count} process(es): {kill.signal} to {kill.victims} during {kill.stage}: all ended in {kill.seconds:.1f} s, "
              f"step {newest} is safe{', a save was left unfinished' if kill.left_unfinished else ''}", flush=True)


def arrays(folder: pathlib.Path, step: int) -> dict[str, bytes]:
    """Path to the bytes of everything in a checkpoint."""
    import jax
    import numpy as np

    from jaxlm.checkpoints import Checkpoints

    reader = Checkpoints(folder / "checkpoints")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract: dict = {}
    for path, (shape, dtype) in reader.shapes(step).items():
        *parents, name = path.split("/")
        inner = abstract
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    found = jax.tree_util.tree_leaves_with_path(reader.restore(step, abstract))
    return {jax.tree_util.keystr(keys): np.asarray(x).tobytes() for keys, x in found}


def losses(folder: pathlib.Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    if [row["step"] for row in rows] != sorted({row["step"] for row in rows}):
        raise Broken(f"the rows of {folder / 'metrics.jsonl'} are out of order")
    return {row["step"]: row["loss"] for row in rows}


def compare(ours: pathlib.Path, reference: pathlib.Path, steps: int) -> None:
    a, b = arrays(ours, steps), arrays(reference, steps)
    different = [path for path in b if a.get(path) != b[path]]
    if a.keys() != b.keys() or different:
        raise Broken(f"{ours}: {len(different)} of {len(b)} arrays differ from the undisturbed run's, such as {different[:3]}")
    found, expected = losses(ours), losses(reference)
    wrong = [step for step in found if found[step] != expected[step]]
    if wrong or len(found) < steps // 5:
        raise Broken(f"{ours}: the losses of steps {wrong[:5]} differ from the undisturbed run's")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="at least so many (default 60)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], metavar="N", help="of the runs in turn (default 1 2)")
    parser.add_argument("--kills-per-run", type=int, default=10, help="of each run on its way to the end (default 10)")
    parser.add_argument("--steps", type=int, default=400, help="of each run (default 400)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims (default 0)")
    flags = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)      # Orbax tells that it only reads
    rng, kills, runs, started = random.Random(flags.seed), [], 0, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        try:
            references = {}
            for count in dict.fromkeys(flags.processes):
                references[count] = scratch / f"undisturbed{count}"
                calm = Attempt(references[count], count, flags.steps, scratch / "cache", "--config.checkpoint.every=0",
                               "--config.train.log_every=1")
                if any(calm.finish(10 * PATIENCE)):
                    raise Broken(f"the undisturbed run failed\n{calm.words()}")
            while len(kills) < flags.kills:
                count = flags.processes[runs % len(flags.processes)]
                folder = scratch / f"run{runs}"
                kills += run_through(folder, count, flags.steps, scratch / "cache",
                                     min(flags.kills_per_run, flags.kills - len(kills)), rng)
                compare(folder, references[count], flags.steps)
                runs += 1
                print(f"run {runs} of {count} process(es): finished, every array and loss has the bits of the undisturbed run",
                      flush=True)
        except Broken as error:
            print(f"FAILED after {len(kills)} kills of finished runs: {error}", file=sys.stderr)
            return 1

    def tally(name: str) -> str:
        return ", ".join(f"{value} {n}" for value, n in collections.Counter(getattr(k, name) for k in kills).most_common())
    together = [k.seconds for k in kills if k.processes > 1 and k.victims != "all"]
    print(f"{len(kills)} kills of {runs} runs in {time.monotonic() - started:.0f} s, each resumed from the newest committed "
          f"step; {runs} of {runs} ends equal to the bit")
    print(f"moments: {tally('stage')} (save: it was left unfinished)")
    print(f"signals: {tally('signal')}; processes: {tally('processes')}; victims: {tally('victims')}")
    if together:
        print(f"one of several killed: the others had ended after {statistics.median(together):.1f} s (median), "
              f"{max(together):.1f} s (largest)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
