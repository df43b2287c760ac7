"""The declaration of a pipeline: which schedule its stages follow, and in how many pieces a batch goes through them."""

import dataclasses

from partitioning.declaration import DeclarationError, leaf
from partitioning.schedules import Costs, Table, make, measure
from partitioning.schedules.words import bubble_line, size_line

RESIDUALS = ("recompute", "saved")
# What the executor's work takes, in forwards, where nothing in the layers is computed again. Of a backward that is split, the
# input half alone computes the stage again.
COSTS = {"recompute": Costs(forward=1, input=2, weight=1), "saved": Costs(forward=1, input=1, weight=1)}


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Read where mesh.pipe is larger than 1; the number of stages is that size."""
    schedule: str = leaf("one_f_one_b", "a schedule's name, a sheet (mine.csv) or a function of one's own (mine.py:function)")
    num_microbatches: int | None = leaf(
        None, "pieces of a batch in one pass through the stages (None: 2 x mesh.pipe)", at_least=1)
    chunks_per_stage: int | None = leaf(None, "parts of the model on each stage (None: as the schedule has it)", at_least=1)
    residuals: str = leaf("recompute", "what a forward leaves for its backward: its input alone, or all that train.remat keeps",
                          choices=RESIDUALS)


def read_table(config: PipelineConfig, num_stages: int, num_layers: int) -> Table | None:
    """The schedule of a pipeline; None for a single stage, where nothing is to be scheduled.

    Raises:
      DeclarationError: no such schedule, one that does not suit these sizes, or layers that it cannot share out.
    """
    if num_stages == 1:
        return None
    table = make(config.schedule, num_stages, config.num_microbatches or 2 * num_stages, config.chunks_per_stage)
    parts = table.num_positions
    if num_layers % parts:
        near = sorted({n for n in (num_layers // parts * parts, -(-num_layers // parts) * parts) if n})
        raise DeclarationError(
            f"config.model.num_layers = {num_layers} cannot be shared out evenly: mesh.pipe = {num_stages} stages with "
            f"{table.num_chunks} part{'s' if table.num_chunks > 1 else ''} each (schedule {table.name}) are {parts} parts. "
            f"What works: num_layers = {' or '.join(map(str, near))}, or another size of mesh.pipe.")
    return table


def note(config: PipelineConfig, table: Table) -> str:
    """The schedule in a line, for opening lines and reports."""
    costs = COSTS[config.residuals]
    return f"pipeline: {size_line(table)}; {bubble_line(measure(table, costs), costs, table)}."
