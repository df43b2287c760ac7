"""Declarative sharding: meshes, rules, ZeRO, and a report of what they come to.

    sizes = resolve_sizes(MeshConfig(fsdp=-1, tensor=2), num_devices=8)
    layout = resolve(sizes, ShardingConfig(zero=3), params, optimizer, activations)   # nested dicts of ArraySpec
    print(text(layout))                                  # no device was needed so far
    layout = layout.on(make_mesh(sizes))
    ...                                                  # inside a jitted step:
    weights = layout.use(params["mlp"], "mlp", "bfloat16")
    x = layout.constrain(x, ("batch", "length", "embed"))

It knows arrays with logical dims, and no model in particular. Importing it initialises no backend; the names below are
loaded when they are first asked for, so that reading a declaration does not wait for JAX.
"""

import importlib

_HOMES = {
    "ArraySpec": "array",
    "DeclarationError": "declaration",
    "AXES": "mesh", "MeshConfig": "mesh", "make_mesh": "mesh", "resolve_sizes": "mesh",
    "Machine": "machine", "links": "machine", "machine_of": "machine", "simulated": "machine",
    "DEFAULT_RULES": "tables", "ShardingConfig": "tables",
    "Layout": "layout", "Row": "layout", "resolve": "layout",
    "UNSHARDED": "unsharded",
    "PipelineConfig": "pipeline", "read_table": "pipeline", "Stages": "executor", "pipelined": "executor",
    "check_compiled": "executor",
    "multiples": "padding", "next_multiple": "padding", "filled": "padding", "trimmed": "padding", "trimmed_abstract": "padding",
    "Collective": "collectives", "group": "collectives", "read_collectives": "collectives",
    "Memory": "memory",
    "Target": "targets", "target": "targets",
    "memory_per_device": "report", "text": "report", "to_json": "report",
    "html": "page",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'partitioning' has no attribute {name!r}")
    return getattr(importlib.import_module(f"partitioning.{_HOMES[name]}"), name)


def __dir__():
    return sorted(set(globals()) | set(__all__))
