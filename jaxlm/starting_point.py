"""What a run starts from: its own newest checkpoint, else what `checkpoint.restore_from` names, else random parameters.

It is found and compared with the model and the data before anything compiles, and loaded while the step does.
"""

import dataclasses
import pathlib
from typing import Any

from jaxlm.checkpoints import Checkpoints, find_source, saved_steps, set_aside_names
from jaxlm.config import Config
from jaxlm.data.continuation import origin_of
from jaxlm.data.mixture import Origin
from jaxlm.errors import RunError
from jaxlm.huggingface.folder import is_folder
from jaxlm.run_directory import load_saved_config, model_differences
from jaxlm.selection import Selection
from jaxlm.train_step import SCALING, initial_counters
from partitioning.declaration import DeclarationError
from partitioning.paths import flatten, unflatten

# Facts about the data that decide which examples a step sees.
DATA_FACTS = ("tokenizer_sha256", "train_tokens", "train_sha256")


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """Attributes:
    step: steps done before the first one, 0 for a fresh start.
    run: the run directory to read from; None for random parameters.
    saved_step: the checkpoint to read.
    whole: whether optimizer, counters and data position are read too.
    words: the same, to be shown.
    seen: names of the checkpoints in the run directory.
    damaged: steps of those that are newer than the one to read, and damaged.
    passed: steps of those that are newer and whole, but behind which a rollback goes back.
    notes: lines to be shown: what is damaged.
    selection: which arrays to read, and their names there.
    reset: of a whole state, the parts that start anew: optimizer, step, data.
    weights: of a Hugging Face folder, where it is read in place of a run.
    """

    step: int
    run: pathlib.Path | None
    saved_step: int
    whole: bool
    words: str
    seen: tuple[str, ...] = ()
    damaged: tuple[int, ...] = ()
    passed: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    selection: Selection = Selection(leave=tuple(f"counters/{name}" for name in SCALING))
    reset: tuple[str, ...] = ()
    weights: Any = None

    def reader(self) -> Any:
        """What is read: the run's Checkpoints, or the folder's Weights, which are read alike."""
        return self.weights or Checkpoints(self.run / "checkpoints")


def find(config: Config, workdir: pathlib.Path, *, scheduled: bool = False) -> StartingPoint:
    """Where this run starts: reads the checkpoint that it is to go on from, to see whether it is as it was written, and if it is
    not, the one before. All processes of a job must ask.

    Args:
      scheduled: take the newest checkpoint at a multiple of checkpoint.every, if there is one, rather than one that was written
        because the run was stopped; so a run that goes back does so to the same step, whether it was ever stopped or not.

    Raises:
      DeclarationError: restore_from names no complete checkpoint.
      RunError: the run directory has checkpoints, and none is whole: never a reason to start anew.
    """
    names = tuple(saved_steps(workdir))
    rows = workdir / "metrics.jsonl"
    if not (workdir / "checkpoints").exists() and rows.exists() and rows.stat().st_size:
        raise RunError(
            f"{workdir} has logged steps, but its folder checkpoints is gone (moved, or on a disk that is not there?). Nothing "
            "was touched; put it back, or use another --workdir to start anew."
        )
    if names:
        every = config.checkpoint.every if scheduled else 0
        return _newest(workdir, names, every)
    aside = set_aside_names(workdir)
    if aside:
        raise RunError(
            f"{workdir / 'checkpoints'} holds {', '.join(aside)}, which were moved aside, and no checkpoint that is "
            "whole. Nothing was touched; put a checkpoint there from a copy, or move these away to start anew."
        )
    source = config.checkpoint.restore_from
    if not source:
        return StartingPoint(0, None, 0, False, f"random, seed {config.train.seed}")
    if is_folder(source):
        return _of_folder(config, source)
    path, step = find_source(source)
    reader = Checkpoints(path / "checkpoints")
    steps = reader.steps()
    if not steps or (step is not None and step not in steps):
        raise DeclarationError(
            f"config.checkpoint.restore_from = {source!r} is no complete checkpoint; complete ones of this run: "
            f"{', '.join(map(str, steps)) or 'none'}."
        )
    step = steps[-1] if step is None else step
    whole = config.checkpoint.restore == "all"
    note = verified(reader, step)
    selection = dataclasses.replace(StartingPoint.selection, include=config.checkpoint.include, rename=config.checkpoint.rename)
    words = f"{path}, step {step}{note}"
    reset = config.checkpoint.reset
    start = step if whole and "step" not in reset else 0
    return StartingPoint(start, path, step, whole, words, selection=selection, reset=reset)


def _of_folder(config: Config, source: str) -> StartingPoint:
    """A Hugging Face folder's weights."""
    from jaxlm.huggingface.weights import Weights

    if config.checkpoint.restore == "all":
        raise DeclarationError(f"config.checkpoint.restore_from = {source!r} is a Hugging Face folder, which has weights alone; "
                               "set restore = 'params'.")
    weights = Weights(source, "config.checkpoint.restore_from")
    selection = Selection(config.checkpoint.include, config.checkpoint.rename)
    return StartingPoint(0, weights.path, 0, False, f"{source} ({weights.family.model_type} of Hugging Face)",
                         selection=selection, weights=weights)


def _newest(workdir: pathlib.Path, names: tuple[str, ...], every: int) -> StartingPoint:
    """The newest checkpoint of a run directory that is as it was written; one at a multiple of `every`, if there is one."""
    reader = Checkpoints(workdir / "checkpoints")
    steps, damaged, notes = reader.steps(), [], []
    for step in sorted(steps, key=lambda step: (every > 0 and step % every == 0, step), reverse=True):
        found = reader.damage(step)
        if not found:
            words = f"the checkpoint of step {step} in the run directory" + (NOT_VERIFIED if found is None else "")
            passed = tuple(later for later in steps if later > step and later not in damaged)
            return StartingPoint(step, workdir, step, True, words, names, tuple(damaged), passed, tuple(notes))
        damaged.append(step)
        notes.append(f"damaged: {reader.directory / str(step)} is not used: {_listed(found)}")
    lines = "".join(f"\n  {note}" for note in notes)
    raise RunError(
        f"{reader.directory} holds {', '.join(names)}, but none of them is {'whole' if steps else 'complete'}. Nothing was "
        f"touched; put files back from a copy, or move them away to start anew.{lines}"
    )


def set_aside(point: StartingPoint, workdir: pathlib.Path) -> list[str]:
    """Gives checkpoints that are newer than the starting point another name, so that the run can write its own in their place;
    nothing is deleted. Returns a line for each. By the one process that holds the run directory."""
    lines = []
    for step, word in [*((step, "damaged") for step in point.damaged), *((step, "rolled_back") for step in point.passed)]:
        path, number = workdir / "checkpoints" / f"{step}.{word}", 1
        while path.exists():
            number += 1
            path = path.with_name(f"{step}.{word}-{number}")
        (workdir / "checkpoints" / str(step)).rename(path)
        lines.append(f"{word.replace('_', ' ')}: moved aside to {path}")
    return lines


NOT_VERIFIED = ", not verified: it was written without checksums"


def verified(reader: Checkpoints, step: int) -> str:
    """Words to add where a checkpoint that was asked for is named: none, or that nothing can be said of it.

    Raises:
      RunError: it is damaged.
    """
    found = reader.damage(step)
    if found:
        others = ", ".join(str(s) for s in reader.steps() if s != step) or "none"
        raise RunError(
            f"{reader.directory / str(step)} is damaged: {_listed(found)}. Nothing was changed. "
            f"Other checkpoints there: {others}."
        )
    return NOT_VERIFIED if found is None else ""


def _listed(damage: list[str]) -> str:
    return "; ".join(damage[:3]) + (f"; and {len(damage) - 3} more" if len(damage) > 3 else "")


def check(point: StartingPoint, job: Any, data: Any, allow_change: bool) -> str:
    """Compares the checkpoint with the model and, where the run goes on in its data, with the data. Reads no array.

    Returns:
      What was found, to be shown.

    Raises:
      DeclarationError: it is of another model, or of other data and `allow_change` is not given.
    """
    if point.run is None:
        return point.words
    reader = point.reader()
    saved = _wanted(point, job)
    try:
        found = reader.check(point.saved_step, saved, point.selection)
    except DeclarationError as error:
        if point.whole and not any(name.startswith("optimizer/") for name in reader.shapes(point.saved_step)):
            raise DeclarationError(
                f"{point.run} holds weights alone, as jaxlm.convert writes them, and cannot be gone on with; train in another "
                f"--workdir, with --config.checkpoint.restore_from={point.run}."
            ) from None
        keys = _differences(point, job)
        hint = ""
        if not point.seen and point.weights is None:   # another run's: a part of it may be what is wanted
            hint = ("\nTo take a part of it: config.checkpoint.restore=params (no optimizer), reset=optimizer (a new one, at its "
                    "step), or include=PATHS (some parameters).")
        raise DeclarationError(str(error) + "".join(f"\n{line}" for line in keys) + hint) from None
    anew = f" but for {', '.join(point.reset)}" if point.reset else ""
    words = f"{point.words} ({len(found)} arrays: {f'the whole state{anew}' if point.whole else 'parameters alone'})"
    if point.weights is not None and (keys := _differences(point, job)):
        words += "; otherwise than its config.json: " + ", ".join(keys)
    others = [path.removeprefix("params/") for path in flatten(saved) if path not in found]
    if others:
        words += f"; at random, seed {job.config.train.seed}: {', '.join(others)}"
    if not point.whole or allow_change or "data" in point.reset:
        return words
    saved = reader.about(point.saved_step)["data"]
    compared = DATA_FACTS[:1] if job.config.data.on_change == "continue" else DATA_FACTS
    changed = [f"{name}: {saved[name]} -> {data.facts[name]}" for name in compared if saved[name] != data.facts[name]]
    if changed:
        raise DeclarationError(
            f"the training data or the tokenizer is not what {point.run} was trained on up to step {point.saved_step}:\n  "
            + "\n  ".join(changed)
            + "\nPut it back, or pass --allow_change to go on with the new data from that position."
        )
    return words


def order(point: StartingPoint, data: Any, config: Config) -> tuple[Origin, int, list[str]]:
    """Where the order of the data is counted from, the first batch to take, and lines to be shown.

    Raises:
      DeclarationError: the order changes in a way that config.data.on_change refuses.
    """
    if not point.whole or "data" in point.reset:
        return Origin(), 0, []
    saved = point.reader().about(point.saved_step)["data"]
    origin, lines = origin_of(saved.get("order"), saved["next_batch"], data, config)
    return origin, saved["next_batch"], lines


def _differences(point: StartingPoint, job: Any) -> list[str]:
    """A line for each key of the model that differs from where it starts."""
    if point.weights is None:
        return model_differences(load_saved_config(point.run), job.config)
    return [f"config.model.{key}: {theirs!r} -> {ours!r}" for key, ours, theirs in point.weights.differences(job.config.model)]


def _wanted(point: StartingPoint, job: Any) -> dict[str, Any]:
    """Abstract arrays of what is read. Counters that the checkpoint does not have, since it was written before there were any,
    are not among them."""
    saved = job.abstract_saved()
    if not point.whole:
        return {"params": saved["params"]}
    there = point.reader().shapes(point.saved_step)
    counters = {name: x for name, x in saved["counters"].items() if f"counters/{name}" in there}
    return {name: group for name, group in {**saved, "counters": counters}.items() if name not in point.reset}


def load(point: StartingPoint, job: Any) -> dict[str, Any]:
    """The state to start from, on the job's devices."""
    if point.run is None:
        return job.initialise()
    reader, wanted = point.reader(), _wanted(point, job)
    if not point.whole:
        state = flatten(job.initialise())
        for path in reader.check(point.saved_step, wanted, point.selection):
            del state[path]                    # before its like is read: there is room for one
        return unflatten(state | flatten(job.from_saved(reader.restore(point.saved_step, wanted, point.selection))))
    found = reader.restore(point.saved_step, wanted, point.selection)
    initial = initial_counters(job.config)
    # A bad step of the past was dealt with as configured then.
    new = {name: value for name, value in initial.items() if name not in found["counters"] or name == "bad_step"}
    if "step" in point.reset:
        new = {**initial, "left_out": point.reader().about(point.saved_step)["data"]["next_batch"]}
        del new["updates"]                     # part of the optimizer's state, whose averages are corrected by their number
    if "data" in point.reset:  # step s takes batch s - 1 + left_out
        new["left_out"] = -point.step
    if "optimizer" in point.reset:
        new["updates"] = initial["updates"]
        found = {**found, "optimizer": job.to_saved({"optimizer": job.initialise()["optimizer"]})["optimizer"]}
    return job.set_counters(job.from_saved(found), new)
