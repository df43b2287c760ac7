"""`python -m jaxlm.convert`: Hugging Face weights in and out.

    from-hf DIR OUT          a folder of Hugging Face's into a run directory, whose step 0 it becomes
    to-hf SOURCE OUT         a run directory or checkpoint into such a folder

Both go tensor by tensor between memory-mapped files and the blocks of a sharded checkpoint. The folder's other files (its
config.json, tokenizer, chat template) are carried along in OUT/huggingface and come out again. DIR stays as it is, and nothing is
looked up anywhere else.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxlm import commandline, distributed
from jaxlm.checkpoints import FORMAT, Checkpoints, find_source
from jaxlm.config import CheckpointConfig, Config, DataConfig, to_dict
from jaxlm.data.encoder import declared_tokenizer
from jaxlm.huggingface import folder
from jaxlm.huggingface.architecture import config_json, find_family, mismatches
from jaxlm.huggingface.configured import tokenizer_of
from jaxlm.huggingface.families import FAMILIES, Family
from jaxlm.huggingface.tensors import workers, write_from
from jaxlm.huggingface.weights import Weights, sources
from jaxlm.models import build_model, count_parameters
from jaxlm.restored import choose_step
from jaxlm.run_directory import make_folder, save_config
from jaxlm.starting_point import verified
from partitioning import MeshConfig
from partitioning.declaration import DeclarationError, nearest
from partitioning.paths import flatten, unflatten

CARRIED = "huggingface"                        # in a run directory: the files that are no weights
SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
TERMS = ("LICENSE", "NOTICE")                  # in any spelling, with or without an ending
TOO_LARGE = "{} has numbers that float16 does not hold; give --dtype=bfloat16 or float32."
DTYPES = ("float32", "bfloat16", "float16")


def from_hf(flags: argparse.Namespace) -> int:
    """A Hugging Face folder into a run directory."""
    weights, out = Weights(flags.dir, "the folder to convert"), pathlib.Path(flags.out)
    if (out / "checkpoints").exists() or (out / "config.json").exists():
        raise DeclarationError(f"{out} is a run directory already; give one that is not there yet.")
    if (out / CARRIED).exists():
        raise DeclarationError(f"{out / CARRIED} is there already; give a run directory that is not there yet.")
    config = commandline.load_config(str(flags.dir), flags.overrides)
    with distributed.join(config.distributed) or contextlib.nullcontext():
        return _from_hf(flags, weights, config, out)


def _from_hf(flags: argparse.Namespace, weights: Weights, config: Config, out: pathlib.Path) -> int:
    import jax

    from jaxlm.job import build_job

    devices, first = jax.device_count(), jax.process_index() == 0
    if not any(key.startswith("mesh.") for key, _ in flags.overrides):
        config = dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=devices))
    rows = -(-config.train.global_batch_size // devices) * devices      # no batch is ever made; it has to fit any mesh
    job = build_job(dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=rows)), devices)
    shapes = flatten(job.on_devices().abstract_saved()["params"])
    dtypes = dict.fromkeys(shapes, flags.dtype) if flags.dtype else weights.dtypes()
    make_folder(out, "OUT")
    wanted = {path: jax.ShapeDtypeStruct(x.shape, dtypes[path], sharding=x.sharding) for path, x in shapes.items()}
    params = weights.restore(0, {"params": unflatten(wanted)})["params"]
    if flags.dtype == "float16":
        for path, x in flatten(params).items():
            if not bool(jax.numpy.isfinite(x).all()):
                raise DeclarationError(TOO_LARGE.format(path))
    largest = max(math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize for x in wanted.values())
    checkpoints = Checkpoints(out / "checkpoints", CheckpointConfig(asynchronous=False), gigabytes_at_once=1 + largest // 10**9)
    about = {"format": FORMAT, "step": 0, "config": to_dict(config), "mesh": dict(job.layout.sizes),
             "data": {"next_batch": 0, "seed": config.data.seed}}
    checkpoints.save(0, {"params": params}, about)
    checkpoints.close()
    if first:
        carry(weights.path, out / CARRIED)
        data = dataclasses.replace(config.data, **tokenizer_of(out / CARRIED))
        save_config(out, dataclasses.replace(config, data=data))
        print(f"{weights.family.model_type} of {count_parameters(job.model.specs):,} parameters: {flags.dir} -> step 0 of {out}\n"
              f"  python -m jaxlm.evaluate {out}\n"
              f"  python -m jaxlm.train --config={out / 'config.json'} --config.checkpoint.restore_from={out} --workdir=...")
    return 0


def to_hf(flags: argparse.Namespace) -> int:
    """A checkpoint's parameters into a Hugging Face folder."""
    path, step = find_source(flags.source)
    step, out = choose_step(path, flags.step) if step is None else step, pathlib.Path(flags.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DeclarationError(f"{out} is there already; give a folder that is new or empty.")
    config, reader = commandline.load_config(str(path / "config.json")), Checkpoints(path / "checkpoints")
    verified(reader, step)
    tokenizer = pathlib.Path(os.path.expanduser(config.data.tokenizer))       # of a run from a folder, it is that folder
    came_with = path / CARRIED if folder.is_folder(path / CARRIED) else tokenizer
    family, described = describe(config.model, came_with, flags.family, ends(config.data))
    stored = {name.removeprefix("params/"): (shape, np.dtype(flags.dtype or dtype)) for name, (shape, dtype) in
              reader.shapes(step).items() if name.startswith("params/")}
    where = sources(family, config.model, flatten(build_model(config.model).specs), family.prefix)
    narrower = flags.dtype == "float16"
    tensors = {name: (bound.shape, stored[member][1]) for member, (_, names, bound) in where.items() for name in names}
    make_folder(out, "OUT")
    writer = folder.Writer(out, dict(sorted(tensors.items(), key=lambda item: _natural(item[0]))))
    for member, (stacked, names, bound) in where.items():
        array = reader.open(step, f"params/{member}")
        for index in pieces(array):
            block = array[index].read().result()
            layers = range(index[0].start, index[0].stop) if stacked else (None,)

            def put(layer, block=block, index=index, member=member, stacked=stacked, names=names, bound=bound):
                own, rest = (block[layer - index[0].start], index[1:]) if stacked else (block, index)
                name = names[layer or 0]
                write_from(own, bound, member, writer.array(name), rest)
                if narrower and not np.isfinite(writer.array(name)).all():
                    raise DeclarationError(TOO_LARGE.format(name) + f" What was written to {out} is not whole; remove it.")
                writer.release(name)

            list(workers().map(put, layers))
    writer.flush()
    _carry_tokenizer(path, config, out)
    described["torch_dtype" if "dtype" not in described else "dtype"] = str(max(stored.values(), key=lambda s: np.prod(s[0]))[1])
    (out / folder.CONFIG).write_text(json.dumps(described, indent=2) + "\n", "utf-8")
    print(f"step {step} of {path} -> {out}: {family.architecture}, {len(tensors)} tensors")
    return 0


def ends(data: DataConfig) -> dict[str, int | None]:
    """The ids that begin, end and pad a text in a config.json: the tokenizer's, and none where it is not there any more."""
    try:
        tokenizer = declared_tokenizer(data)
    except DeclarationError:
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": None}


def describe(
    model: Any, came_with: pathlib.Path, name: str | None, ids: dict[str, int | None]
) -> tuple[Family, dict[str, Any]]:
    """The family of a model, and its config.json: the one that it came with, if that is still true; else one with `ids`, for
    the families' own defaults are ids of their own tokenizers.

    Raises:
      DeclarationError: no family has such models, or not the one that was asked for.
    """
    if name is not None and name not in FAMILIES:
        raise DeclarationError(f"--family={name}: {nearest(name, FAMILIES)}")
    if folder.is_folder(came_with):
        given = folder.read_config(came_with, "the folder that the model came with")
        if name in (None, given["model_type"]) and not mismatches(model, given):
            return FAMILIES[given["model_type"]], given
        name = name or (given["model_type"] if given["model_type"] in FAMILIES else None)
    family = FAMILIES[name] if name else find_family(model)
    return family, config_json(model, family) | ids


def pieces(array: Any) -> Iterator[tuple[slice, ...]]:
    """The blocks that a stored array was written in."""
    size = array.chunk_layout.read_chunk.shape
    starts = [range(0, n, step) for n, step in zip(array.shape, size, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(a, min(a + step, n)) for a, step, n in zip(corner, size, array.shape, strict=True))


def carry(source: pathlib.Path, out: pathlib.Path) -> None:
    """Copies what is no weights."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        described = path.suffix in SUFFIXES or path.name.upper().startswith(TERMS)
        if path.is_file() and described and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)


def _carry_tokenizer(run: pathlib.Path, config: Config, out: pathlib.Path) -> None:
    tokenizer = pathlib.Path(os.path.expanduser(config.data.tokenizer))
    if (run / CARRIED).is_dir():
        carry(run / CARRIED, out)
    elif tokenizer.is_dir():
        carry(tokenizer, out)
    elif tokenizer.is_file():
        shutil.copyfile(tokenizer, out / tokenizer.name)


def _natural(name: str) -> list[Any]:
    """A key that sorts 'layers.2' before 'layers.10'."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def arguments() -> argparse.ArgumentParser:
    out = commandline.parser("jaxlm.convert", "Hugging Face weights in and out. --config.mesh.* lays the checkpoint on a mesh.",
                             config=False)
    commands = out.add_subparsers(metavar="from-hf|to-hf", required=True)
    one = commands.add_parser("from-hf", help="a Hugging Face folder into a run directory", allow_abbrev=False)
    one.set_defaults(action=from_hf)
    one.add_argument("dir", metavar="DIR", help="a folder with config.json and safetensors")
    one.add_argument("out", metavar="OUT", help="a run directory that is not there yet")
    one.add_argument("--dtype", choices=DTYPES, help="of the checkpoint's numbers (default: as in the files)")
    one = commands.add_parser("to-hf", help="a checkpoint into a Hugging Face folder", allow_abbrev=False)
    one.set_defaults(action=to_hf)
    one.add_argument("source", metavar="SOURCE", help="a run directory or one of its checkpoints")
    one.add_argument("out", metavar="OUT", help="a folder that is not there yet")
    one.add_argument("--step", default="latest", metavar="N|latest|best", help="which checkpoint")
    one.add_argument("--family", metavar="NAME", help=f"the family to write it as (default: found; {', '.join(FAMILIES)})")
    one.add_argument("--dtype", choices=DTYPES, help="of the files' numbers (default: as in the checkpoint)")
    for one in commands.choices.values():
        one.add_argument("--simulate_devices", type=int, metavar="N", default=argparse.SUPPRESS,
                         help="run on N simulated CPU devices")
    return out


def main(flags: argparse.Namespace) -> int:
    return flags.action(flags)


if __name__ == "__main__":
    sys.exit(commandline.run(main, arguments()))
