"""Schedules by name, from a file, or from a function of the user's, all checked before anything is made of them.

    make("interleaved", num_stages=4, num_microbatches=16, num_chunks=2)
    make("mine.csv", num_stages=4, num_microbatches=8)              # a sheet
    make("mine.py:wave", num_stages=4, num_microbatches=8)          # a function in a file

A function takes `num_stages` and `num_microbatches`, and `num_chunks` and `latency` if it knows what to do with them.
"""

import dataclasses
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Callable

from partitioning.declaration import DeclarationError, nearest
from partitioning.schedules.checker import check
from partitioning.schedules.closed_form import gpipe, interleaved, one_f_one_b, one_f_one_b_alternating, zero_bubble_paired
from partitioning.schedules.sheet import read_csv
from partitioning.schedules.table import Table
from partitioning.schedules.split_backward import zero_bubble, zero_bubble_v

SCHEDULES: dict[str, Callable[..., Table]] = {function.__name__: function for function in (
    gpipe, one_f_one_b, one_f_one_b_alternating, interleaved, zero_bubble, zero_bubble_paired, zero_bubble_v)}


def make(schedule: str | Callable[..., Table], num_stages: int, num_microbatches: int, num_chunks: int | None = None,
         latency: int | None = None) -> Table:
    """A valid table for these sizes.

    Args:
      schedule: a name of SCHEDULES, a path that ends with `.csv`, `path.py:function`, or a function.
      num_stages, num_microbatches: at least 1.
      num_chunks: positions of each stage; None leaves it to the schedule.
      latency: ticks that a result takes to another stage; None leaves it to the schedule, and most say 1.

    Raises:
      DeclarationError: there is no such schedule, it does not suit these sizes, or its table is not valid.
    """
    for key, number in (("mesh.pipe", num_stages), ("pipeline.num_microbatches", num_microbatches),
                        ("pipeline.chunks_per_stage", 1 if num_chunks is None else num_chunks)):
        if number < 1:
            raise DeclarationError(f"config.{key} = {number} is out of range; expected a value at least 1.")
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        table = read_csv(schedule)
    else:
        function = _function(schedule) if isinstance(schedule, str) else schedule
        table = _call(schedule, function, num_stages, num_microbatches, num_chunks=num_chunks, latency=latency)
    check(table)
    table = _frozen(table)
    for key, wanted, found in (("mesh.pipe", num_stages, table.num_stages),
                               ("pipeline.num_microbatches", num_microbatches, table.num_microbatches),
                               ("pipeline.chunks_per_stage", num_chunks, table.num_chunks)):
        if wanted is not None and wanted != found:
            raise DeclarationError(f"config.{key} = {wanted}, but the schedule {table.name} is for {found}; set it to {found} or "
                                   "choose another schedule.")
    if latency not in (None, table.latency):
        raise DeclarationError(f"the schedule {table.name} has latency {table.latency}; asked for was {latency}.")
    return table


def _frozen(table: Table) -> Table:
    """The table with tuples where a function may have left lists, which are easier to fill."""
    ticks = tuple(tuple(map(tuple, stages)) for stages in table.ticks)
    placement, live = tuple(map(tuple, table.placement)), None if table.live is None else tuple(table.live)
    return dataclasses.replace(table, placement=placement, ticks=ticks, live=live)


def _call(schedule: str | Callable[..., Table], function: Callable[..., Table], *sizes: int, **options: int | None) -> Table:
    """What a function returns; what goes wrong in one of the user's is said in one message."""
    try:
        known = inspect.signature(function).parameters
        table = function(*sizes, **{key: value for key, value in options.items() if value is not None and key in known})
    except DeclarationError:
        raise
    except (Exception, SystemExit) as error:
        if function in SCHEDULES.values():
            raise
        raise DeclarationError(f"the schedule {schedule} failed for {sizes[0]} stages and {sizes[1]} microbatches: "
                               f"{type(error).__name__}: {error}. It is called with these two numbers, and returns a Table of "
                               "partitioning.schedules.") from error
    if not isinstance(table, Table):
        raise DeclarationError(f"the schedule {schedule} returned {type(table).__name__}; expected a Table of "
                               "partitioning.schedules.")
    return table


def _function(schedule: str) -> Callable[..., Table]:
    path, colon, name = schedule.rpartition(":")
    if not colon or not path.endswith(".py"):
        if schedule not in SCHEDULES:
            raise DeclarationError(f"config.pipeline.schedule = {schedule!r} is no schedule; "
                                   f"{nearest(schedule, SCHEDULES, 'schedule')} "
                                   "One of your own is a sheet (mine.csv) or a function in a file (mine.py:function).")
        return SCHEDULES[schedule]
    if not pathlib.Path(path).is_file():
        raise DeclarationError(f"config.pipeline.schedule = {schedule!r}: there is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"schedule_{pathlib.Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module            # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise DeclarationError(f"config.pipeline.schedule = {schedule!r}: {path} cannot be loaded: "
                               f"{type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise DeclarationError(f"config.pipeline.schedule = {schedule!r}: {path} has no function {name!r}; "
                               f"{nearest(name, own, 'function')}")
    return getattr(module, name)
