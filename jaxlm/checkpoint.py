"""`python -m jaxlm.checkpoint`: what a run has saved, whether it is whole, and ways to take it elsewhere.

    list RUN                 every checkpoint: step, size, time, the mesh it was written on
    show RUN                 one checkpoint's arrays and what is written beside them
    verify RUN               reads every byte and compares it with the checksums
    copy RUN TO              one checkpoint into another run directory, which can be trained on, evaluated and so on
    export RUN FOLDER        the parameters as safetensors files, under their plain names

None of them needs an accelerator, or changes anything in RUN.
"""

import argparse
import dataclasses
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from jaxlm import commandline, manifest
from jaxlm.checkpoints import Checkpoints, find_source, set_aside_names
from jaxlm.errors import RunError
from jaxlm.restored import choose_step
from jaxlm.starting_point import verified
from partitioning.declaration import DeclarationError

FILE_BYTES = 4 * 2**30         # to one exported file, unless a single array is larger


@dataclasses.dataclass(frozen=True)
class Facts:
    """One checkpoint, as `list` shows it. `written` is in seconds since 1970; `mesh` holds the axes larger than 1."""
    step: int
    bytes: int
    written: float
    mesh: dict[str, int]
    metrics: dict[str, float]
    checksums: bool


def facts(reader: Checkpoints, step: int) -> Facts:
    """What can be said of a checkpoint without reading its arrays."""
    folder, about = reader.directory / str(step), reader.about(step)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    mesh = {axis: number for axis, number in about["mesh"].items() if number > 1}
    return Facts(step, size, folder.stat().st_mtime, mesh, about.get("metrics") or {}, (folder / manifest.NAME).exists())


def list_(path: pathlib.Path, reader: Checkpoints, flags: argparse.Namespace) -> int:
    found, unreadable = [], []
    for step in reader.steps():
        try:
            found.append(facts(reader, step))
        except (RunError, KeyError, OSError, AttributeError):   # damaged, or deleted half-way
            unreadable.append(step)
    aside = set_aside_names(path)
    if flags.json:
        print(json.dumps({"run": str(path), "checkpoints": [dataclasses.asdict(one) for one in found],
                          "unreadable": unreadable, "aside": aside}))
        return 0
    rows = [("step", "size", "written", "mesh", "checksums", "metrics")]
    for one in found:
        rows.append((str(one.step), _size(one.bytes), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.written)),
                     _mesh(one.mesh), "yes" if one.checksums else "none", _metrics(one.metrics)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    for step in unreadable:
        print(f"cannot be read: {step} (`verify` says more)")
    for name in aside:
        print(f"moved aside: {name}")
    return 0


def show(path: pathlib.Path, reader: Checkpoints, flags: argparse.Namespace) -> int:
    step = choose_step(path, flags.step)
    one, about, arrays = facts(reader, step), reader.about(step), reader.shapes(step)
    if flags.json:
        listed = [{"path": name, "shape": shape, "dtype": dtype} for name, (shape, dtype) in arrays.items()]
        print(json.dumps({**dataclasses.asdict(one), "format": about["format"], "data": about["data"], "arrays": listed}))
        return 0
    width = max(map(len, arrays))
    for name, (shape, dtype) in arrays.items():
        print(f"{name:{width}}  {dtype:8}  {' x '.join(map(str, shape)) or 'scalar'}")
    print(f"\nstep {step} of {path}: {len(arrays)} arrays, {_size(one.bytes)}, format {about['format']}")
    print(f"written on {_mesh(one.mesh)}; next batch {about['data']['next_batch']} of the data with seed {about['data']['seed']}")
    return 0


def verify(path: pathlib.Path, reader: Checkpoints, flags: argparse.Namespace) -> int:
    steps = reader.steps() if flags.step == "all" else [choose_step(path, flags.step)]
    found = {step: reader.damage(step) for step in steps}
    if flags.json:
        words = {step: "unknown" if damage is None else "damaged" if damage else "whole" for step, damage in found.items()}
        print(json.dumps({"run": str(path), "checkpoints": [
            {"step": step, "state": words[step], "damage": damage or []} for step, damage in found.items()]}))
    else:
        for step, damage in found.items():
            print(f"step {step}: " + ("written without checksums: nothing can be said" if damage is None else
                                      "DAMAGED" if damage else "whole"))
            for line in damage or []:
                print(f"  {line}")
    return 1 if any(found.values()) else 0


def copy(path: pathlib.Path, reader: Checkpoints, flags: argparse.Namespace) -> int:
    step, to = choose_step(path, flags.step), pathlib.Path(flags.to)
    if (to / "checkpoints").exists() or (to / "config.json").exists():
        raise DeclarationError(f"{to} is a run directory already; give one that is not there yet.")
    verified(reader, step)
    draft = to / "checkpoints" / f"{step}.draft"
    shutil.copytree(reader.directory / str(step), draft)
    shutil.copy(path / "config.json", to / "config.json")
    if (draft / manifest.NAME).exists() and manifest.verify(draft):
        raise OSError(f"the copy in {draft} is not what was read: {manifest.verify(draft)[0]}")
    draft.rename(draft.with_name(str(step)))
    print(f"copied step {step} of {path} to {to}")
    return 0


def export(path: pathlib.Path, reader: Checkpoints, flags: argparse.Namespace) -> int:
    step, to = choose_step(path, flags.step), pathlib.Path(flags.to)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DeclarationError(f"{to} is there already; give a folder that is new or empty.")
    verified(reader, step)
    import numpy as np
    from safetensors.numpy import save_file

    to.mkdir(parents=True, exist_ok=True)
    files = list(_files({name: array for name, array in reader.shapes(step).items() if name.startswith("params/")}))
    places: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        arrays = {key.removeprefix("params/"): np.asarray(x) for key, x in reader.read(step, names).items()}
        save_file(arrays, to / name, {"step": str(step)})
        places |= dict.fromkeys(arrays, name)
    if len(files) > 1:
        (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}, indent=1) + "\n", "utf-8")
    shutil.copy(path / "config.json", to / "config.json")
    print(f"exported {len(places)} arrays of step {step} of {path} to {to}")
    return 0


def _files(arrays: dict[str, tuple]) -> Iterator[list[str]]:
    """The arrays' names, split into files of at most FILE_BYTES, if one array is not larger by itself."""
    import jax.numpy as jnp

    names, total = [], 0
    for name, (shape, dtype) in arrays.items():
        size = jnp.dtype(dtype).itemsize
        for n in shape:
            size *= n
        if names and total + size > FILE_BYTES:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names


def _size(number: int) -> str:
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 else f"{number / 2**20:,.2f} MiB"


def _mesh(mesh: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one device"


def _metrics(metrics: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()) or "-"


def main(flags: argparse.Namespace) -> int:
    path, step = find_source(flags.run)
    if step is not None and hasattr(flags, "step"):
        flags.step = str(step)
    reader = Checkpoints(path / "checkpoints")
    if not reader.steps():
        raise DeclarationError(f"{path} has no complete checkpoint.")
    return flags.action(path, reader, flags)


def arguments() -> argparse.ArgumentParser:
    what = "Lists, shows, verifies, copies and exports the checkpoints of a run."
    out = commandline.parser("jaxlm.checkpoint", what, config=False)
    commands = out.add_subparsers(metavar="list|show|verify|copy|export", required=True)
    for name, action, meaning, step in (("list", list_, "every checkpoint", None),
                                        ("show", show, "one checkpoint's arrays", "latest"),
                                        ("verify", verify, "compare every byte with the checksums", "all"),
                                        ("copy", copy, "one checkpoint into another run directory", "latest"),
                                        ("export", export, "the parameters as safetensors files", "latest")):
        one = commands.add_parser(name, help=meaning, description=meaning[0].upper() + meaning[1:] + ".", allow_abbrev=False)
        one.set_defaults(action=action)
        one.add_argument("run", metavar="RUN", help="a run directory or one of its checkpoints")
        if name in ("copy", "export"):
            one.add_argument("to", metavar="TO", help="a folder that is not there yet")
        if step:
            one.add_argument("--step", default=step, metavar=f"N|latest|best{'|all' if step == 'all' else ''}", help="which one")
        if name not in ("copy", "export"):
            one.add_argument("--json", action="store_true", help="print one JSON object")
    return out


if __name__ == "__main__":
    sys.exit(commandline.run(main, arguments()))
