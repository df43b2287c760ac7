"""A finished or running run, opened to be used: its configuration, its job on today's devices, its parameters."""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

from jaxlm.checkpoints import Checkpoints, find_source
from jaxlm.commandline import load_config
from jaxlm.config import Config
from jaxlm.huggingface.folder import is_folder
from jaxlm.huggingface.weights import Weights
from jaxlm.logs import read_rows
from jaxlm.starting_point import verified
from partitioning import MeshConfig
from partitioning.declaration import DeclarationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say which parameters to open."""
    parser.add_argument("source", metavar="SOURCE", help="a run directory, one of its checkpoints, or a Hugging Face folder")
    parser.add_argument(
        "--step", default="latest", metavar="N|latest|best", help="which checkpoint (best: lowest eval_loss in metrics.jsonl)"
    )


def open_config(flags: argparse.Namespace) -> tuple[pathlib.Path, int | None, Config]:
    """The run directory, the step and the configuration (with --config.* overrides) that the flags ask for; a Hugging Face folder
    has no step.

    Raises:
      DeclarationError: there is no such run or checkpoint, or an override is wrong.
    """
    folder = is_folder(flags.source)
    path, step = (pathlib.Path(flags.source), None) if folder else find_source(flags.source)
    config = load_config(str(path if folder else path / "config.json"), flags.overrides)
    import jax

    why = "is a pipeline, which only training uses" if config.mesh.pipe != 1 else None
    why = why or (None if fits(config.mesh, jax.device_count()) else f"does not fit {jax.device_count()} device(s)")
    if why and not any(key.startswith("mesh.") for key, _ in flags.overrides):
        print(f"the run's mesh {why}; using fsdp={jax.device_count()}", file=sys.stderr)
        config = dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=jax.device_count()))
    # The figures do not depend on the batch, and so not on whether training's suits these devices.
    rows = -(-config.train.global_batch_size // jax.device_count()) * jax.device_count()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=rows, gradient_accumulation=1))
    if folder:
        return path, None, config
    return path, step if step is not None else choose_step(path, flags.step), config


def fits(mesh: MeshConfig, num_devices: int) -> bool:
    from partitioning import resolve_sizes

    try:
        resolve_sizes(mesh, num_devices)
    except DeclarationError:
        return False
    return True


def choose_step(path: pathlib.Path, wanted: str) -> int:
    """The step that 'latest', 'best' or a number stands for, among the complete checkpoints."""
    reader = Checkpoints(path / "checkpoints")
    steps = reader.steps()
    if not steps:
        raise DeclarationError(f"{path} has no complete checkpoint yet.")
    if wanted == "latest":
        return steps[-1]
    if wanted == "best":
        rows = read_rows(path / "metrics.jsonl")
        scored = {row["step"]: row["eval_loss"] for row in rows if row.get("eval_loss") is not None and row["step"] in steps}
        if not scored:
            raise DeclarationError(
                f"--step=best: none of the saved steps ({', '.join(map(str, steps))}) has an eval_loss in "
                f"{path / 'metrics.jsonl'}; give a number or latest."
            )
        return min(scored, key=scored.get)
    if wanted not in map(str, steps):
        raise DeclarationError(f"--step={wanted}: expected latest, best or one of the saved steps: {', '.join(map(str, steps))}.")
    return int(wanted)


def load_params(path: pathlib.Path, step: int | None, job: Any) -> Any:
    """The parameters of a checkpoint or, without a step, of a Hugging Face folder, laid out as the job says."""
    wanted = {"params": job.abstract_saved()["params"]}
    if step is None:
        return job.from_saved(Weights(path).restore(0, wanted))["params"]
    reader = Checkpoints(path / "checkpoints")
    note = verified(reader, step)
    if note:
        print(f"step {step}{note}", file=sys.stderr)
    return job.from_saved(reader.restore(step, wanted))["params"]
