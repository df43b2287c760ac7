"""The mesh: six named axes over the devices, outermost (slowest links) first."""

import dataclasses

from partitioning.declaration import leaf

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. One may be -1: what is left of the devices; `data` is, unless another one is."""
    pipe: int = leaf(1, "pipeline stages", at_least=-1)
    data: int | None = leaf(None, "replicas of everything that no other axis shards (None: -1 unless another axis is -1)", at_least=-1)
    fsdp: int = leaf(1, "devices that share parameters and optimizer state and split the batch", at_least=-1)
    expert: int = leaf(1, "devices that share experts", at_least=-1)
    context: int = leaf(1, "devices that share one sequence in attention", at_least=-1)
    tensor: int = leaf(1, "devices that split each matmul", at_least=-1)
