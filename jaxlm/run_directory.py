"""A run directory: where it is, which configuration it was started with, and what a resume may change.

config.json       the resolved configuration, which `--config` reads again
metrics.jsonl     one JSON object per logged step
checkpoints/      one folder per saved step
tensorboard/, sharding.txt
"""

import contextlib
import fcntl
import json
import os
import pathlib
import time
from typing import Any

from jaxlm.config import Config, to_config, to_dict
from partitioning.declaration import DeclarationError

# A resume is free to change these: none of them changes what is computed.
FREE = (
    "mesh",
    "sharding",
    "pipeline",
    "kernels",
    "log",
    "checkpoint",
    "distributed",
    "train.steps",
    "train.stop_at",
    "train.log_every",
    "train.eval_every",
    "train.eval_steps",
    "train.sample_every",
    "train.sample_prompt",
    "train.remat",
    "faults.max_rollbacks",
    "faults.replica_check_every",
    "model.scan_layers",
    "data.epochs",
    "data.on_change",
    "data.workers",
)
# These, too, where config.data.on_change says how the order goes on.
ORDER = ("data.train", "data.sequence_length", "data.pack", "data.seed", "data.temperature", "data.stages")
# Of the model's keys, those that a user may change knowingly; any other makes another model.
CHANGEABLE_MODEL = ("model.dropout", "model.max_positions")


def default_workdir(name: str) -> pathlib.Path:
    """runs/NAME-TIME, not yet taken."""
    base = pathlib.Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def check_name(workdir: pathlib.Path) -> None:
    """Raises DeclarationError for a path in which checkpoints cannot be written: the library that puts the parts of one together
    takes these characters for a pattern, and would find no part, or another run's."""
    found = sorted(set("[]*?\\") & set(str(workdir.absolute())))
    if found:
        raise DeclarationError(
            f"--workdir={workdir}: checkpoints cannot be written below a path with {' '.join(found)} in it "
            f"({workdir.absolute()}); give another."
        )


def make_folder(path: pathlib.Path, key: str) -> None:
    """Makes a folder that was given as `key`, if it is not there.

    Raises:
      DeclarationError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeclarationError(f"{key}={path} cannot be made: {error.strerror or error}; give another folder.") from None


@contextlib.contextmanager
def sole_writer(workdir: pathlib.Path):
    """Keeps a second run out of a run directory, as long as it is entered. Makes the directory.

    Raises:
      DeclarationError: another process writes there, or the directory cannot be made.
    """
    make_folder(workdir, "--workdir")
    try:
        handle = open(workdir / ".lock", "w")
    except OSError as error:
        raise DeclarationError(f"--workdir={workdir} cannot be made: {error.strerror or error}; give another folder.") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeclarationError(f"another run is writing in {workdir}; wait for its end, or give another --workdir.") from None
        except OSError:
            pass  # a file system without locks
        yield


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new text, never a part."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text, "utf-8")
    os.replace(draft, path)


def save_config(workdir: pathlib.Path, config: Config) -> None:
    """Writes the resolved configuration; distributed is this job's own business and stays out."""
    values = to_dict(config)
    values.pop("distributed")
    write_atomically(workdir / "config.json", json.dumps(values, indent=1) + "\n")


def load_saved_config(workdir: pathlib.Path) -> Config | None:
    """The configuration that the run was started with, or None when there is none."""
    path = workdir / "config.json"
    if not path.is_file():
        return None
    try:
        return to_config(json.loads(path.read_text("utf-8")))
    except ValueError as error:  # not JSON, or not of this version's keys
        raise DeclarationError(f"{path} cannot be read: {error}") from None


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of every leaf that differs."""

    def walk(a, b, prefix):
        for name in a:
            key = f"{prefix}{name}"
            if isinstance(a[name], dict) and isinstance(b[name], dict) and key.count(".") == 0:
                yield from walk(a[name], b[name], key + ".")
            elif a[name] != b[name]:
                yield key, a[name], b[name]

    return list(walk(to_dict(old), to_dict(new), ""))


def model_differences(old: Config, new: Config) -> list[str]:
    """A line for each key of the model that differs and makes it another one."""
    kept = FREE + CHANGEABLE_MODEL
    changed = [change for change in differences(old, new) if change[0].startswith("model.") and change[0] not in kept]
    return [f"config.{key}: {a!r} -> {b!r}" for key, a, b in changed]


def check_resume(workdir: pathlib.Path, old: Config, new: Config, allow_change: bool) -> list[str]:
    """Says whether a run may go on with another configuration.

    Returns:
      A line for each difference, to be shown.

    Raises:
      DeclarationError: it is another model, or keys that change the result differ without --allow_change.
    """
    changed = differences(old, new)
    lines = [f"config.{key}: {a!r} -> {b!r}" for key, a, b in changed]
    model = model_differences(old, new)
    if model:
        raise DeclarationError(
            f"{workdir} belongs to another model:\n  "
            + "\n  ".join(model)
            + "\nUse another --workdir, or the model that this run was started with."
        )
    free = FREE + (ORDER if new.data.on_change == "continue" else ())
    guarded = [line for line, (key, *_) in zip(lines, changed, strict=True) if key not in free and key.split(".")[0] not in free]
    if guarded and not allow_change:
        of_order = new.data.on_change != "continue" and any(key in ORDER for key, *_ in changed)
        raise DeclarationError(
            f"{workdir} was started with other values of keys that change the result:\n  "
            + "\n  ".join(guarded)
            + "\nTake them back, use another --workdir, or pass --allow_change to go on with the new ones."
            + (" (config.data.on_change='continue' goes on with the data in another order.)" if of_order else "")
        )
    return lines
