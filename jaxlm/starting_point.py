"""What a run starts from: its own newest checkpoint, else what `checkpoint.restore_from` names, else random parameters.

It is found and compared with the model and the data before anything compiles, and loaded while the step does.
"""

import dataclasses
import pathlib
from typing import Any

from jaxlm.checkpoint import Checkpoints, find_source, saved_steps
from jaxlm.config import Config
from jaxlm.errors import RunError
from jaxlm.run_directory import load_saved_config, model_differences
from partitioning.declaration import DeclarationError

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
    """

    step: int
    run: pathlib.Path | None
    saved_step: int
    whole: bool
    words: str

    def reader(self) -> Checkpoints:
        return Checkpoints(self.run / "checkpoints", read_only=True)


def find(config: Config, workdir: pathlib.Path) -> StartingPoint:
    """Where this run starts.

    Raises:
      DeclarationError: restore_from names no complete checkpoint.
      RunError: the run directory has checkpoints, and none is complete: never a reason to start anew.
    """
    names = saved_steps(workdir)
    if names:
        steps = Checkpoints(workdir / "checkpoints", read_only=True).steps()
        if not steps:
            raise RunError(
                f"{workdir / 'checkpoints'} holds {', '.join(names)}, but none of them is complete. Nothing was touched; "
                "move them away to start anew."
            )
        return StartingPoint(steps[-1], workdir, steps[-1], True, f"the checkpoint of step {steps[-1]} in the run directory")
    source = config.checkpoint.restore_from
    if not source:
        return StartingPoint(0, None, 0, False, f"random, seed {config.train.seed}")
    path, step = find_source(source)
    reader = Checkpoints(path / "checkpoints", read_only=True)
    steps = reader.steps()
    if not steps or (step is not None and step not in steps):
        raise DeclarationError(
            f"config.checkpoint.restore_from = {source!r} is no complete checkpoint; complete ones of this run: "
            f"{', '.join(map(str, steps)) or 'none'}."
        )
    step = steps[-1] if step is None else step
    whole = config.checkpoint.restore == "all"
    count = sum(whole or name.startswith("params/") for name in reader.shapes(step))
    words = f"{path}, step {step} ({count} arrays: {'the whole state' if whole else 'parameters alone'})"
    return StartingPoint(step if whole else 0, path, step, whole, words)


def check(point: StartingPoint, job: Any, data: Any, allow_change: bool) -> None:
    """Compares the checkpoint with the model and, where the run goes on in its data, with the data. Reads no array.

    Raises:
      DeclarationError: it is of another model, or of other data and `allow_change` is not given.
    """
    if point.run is None:
        return
    reader = point.reader()
    try:
        saved = job.abstract_saved()
        reader.check(point.saved_step, saved if point.whole else {"params": saved["params"]})
    except DeclarationError as error:
        keys = model_differences(load_saved_config(point.run), job.config)
        raise DeclarationError(str(error) + "".join(f"\n{line}" for line in keys)) from None
    if not point.whole or allow_change:
        return
    saved = reader.about(point.saved_step)["data"]
    changed = [f"{name}: {saved[name]} -> {data.facts[name]}" for name in DATA_FACTS if saved[name] != data.facts[name]]
    if changed:
        raise DeclarationError(
            f"the training data or the tokenizer is not what {point.run} was trained on up to step {point.saved_step}:\n  "
            + "\n  ".join(changed)
            + "\nPut it back, or pass --allow_change to go on with the new data from that position."
        )


def load(point: StartingPoint, job: Any) -> dict[str, Any]:
    """The state to start from, on the job's devices."""
    if point.run is None:
        return job.initialise()
    if not point.whole:
        params = point.reader().restore_params(point.saved_step, job.abstract_saved()["params"])
        return {**job.initialise(), **job.from_saved({"params": params})}
    state = job.from_saved(point.reader().restore(point.saved_step, job.abstract_saved()))
    # A bad step of the past was dealt with as configured then.
    return {**state, "counters": {**state["counters"], "bad_step": job.initial_counters()["bad_step"]}}
