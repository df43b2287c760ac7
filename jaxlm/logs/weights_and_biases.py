"""Weights & Biases, when config.log.wandb names a project. The id lies in the run directory: a resume goes on with the run."""

import importlib.util
import pathlib
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from partitioning.declaration import DeclarationError

ID_FILE = "wandb_id"


def check(project: str | None) -> None:
    """Raises DeclarationError if a project is named and the package is missing; before anything is made."""
    if project and not (sys.modules.get("wandb") or importlib.util.find_spec("wandb")):
        raise DeclarationError(f"config.log.wandb = {project!r} needs a package that is not installed: "
                               "pip install -e '.[wandb]' in the repository, or set config.log.wandb=None.")


class WeightsAndBiases:
    """A run on the project's page."""

    def __init__(self, directory: pathlib.Path, project: str, run_config: Mapping[str, Any] | None = None):
        """Starts the run, or goes on with the one whose id lies in `directory`.

        Raises:
          DeclarationError: the package is missing.
        """
        check(project)
        import wandb
        place = directory / ID_FILE
        run_id = place.read_text("utf-8").strip() if place.is_file() else ""
        if not run_id:
            run_id = secrets.token_hex(8)
            place.write_text(run_id + "\n", "utf-8")
        self._run = wandb.init(project=project, id=run_id, resume="allow", name=directory.resolve().name, dir=str(directory),
                               config=dict(run_config or {}))
        # W&B drops rows whose own step goes back, as it does on a resume from an older checkpoint: ours is the x axis instead.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def row(self, row: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in row.items() if value is not None})

    def text(self, step: int, sample: str) -> None:
        self._run.log({"step": step, "sample": sample})

    def close(self) -> None:
        self._run.finish()
