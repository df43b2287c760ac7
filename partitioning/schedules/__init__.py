"""Pipeline schedules as tables: made by functions or read from a sheet, checked, measured, drawn, and laid out for an executor.

    table = make("one_f_one_b", num_stages=4, num_microbatches=16)      # checked
    print(schedule_text(table))
    arrays = plan(table)                                                # what to do when, and in which slots

Nothing here needs JAX. The names below are loaded when they are first asked for, as those of `partitioning` are.
"""

import importlib

_HOMES = {
    "Table": "table", "Work": "table", "folded": "table", "looped": "table", "laid_out": "table",
    "gpipe": "closed_form", "one_f_one_b": "closed_form", "one_f_one_b_alternating": "closed_form", "interleaved": "closed_form",
    "zero_bubble_paired": "closed_form", "zero_bubble": "split_backward", "zero_bubble_v": "split_backward",
    "SCHEDULES": "choose", "make": "choose", "from_csv": "sheet", "read_csv": "sheet", "to_csv": "sheet",
    "check": "checker", "live_counts": "checker",
    "Costs": "figures", "Figures": "figures", "measure": "figures", "timeline": "figures",
    "Plan": "arrays", "Slots": "arrays", "plan": "arrays",
    "schedule_text": "text", "schedule_html": "fragment",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'partitioning.schedules' has no attribute {name!r}")
    return getattr(importlib.import_module(f"partitioning.schedules.{_HOMES[name]}"), name)


def __dir__():
    return sorted(set(globals()) | set(__all__))
