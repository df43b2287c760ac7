"""What is known of GPUs by name, and the sizes of tiles that suit them.

The table is frozen: which sizes a program has does not depend on what was timed when. Its figures come from what the compiler
makes of each size (registers, spills, shared memory, use of the tensor cores' asynchronous products; docs/kernels.md).
"""

import dataclasses
import re

# Compute capability by JAX's device_kind.
CAPABILITIES = {"A100": 8.0, "A30": 8.0, "A10": 8.6, "L4": 8.9, "L40": 8.9, "RTX 4090": 8.9, "H100": 9.0, "H200": 9.0,
                "GH200": 9.0, "B200": 10.0, "GB200": 10.0, "B300": 10.3, "GB300": 10.3, "T4": 7.5, "V100": 7.0}


def capability(kind: str) -> float | None:
    """The compute capability of a GPU of NVIDIA by its device_kind; None if the name is unknown."""
    words = re.sub(r"^(NVIDIA|Tesla)\s+(GeForce\s+)?", "", kind)
    known = [name for name in CAPABILITIES if re.match(rf"{re.escape(name)}(?![0-9])", words)]
    return CAPABILITIES[max(known, key=len)] if known else None


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows of queries and of keys that one program works on at a time, its warps, and how many loads ahead it is."""
    q: int
    k: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels."""
    forward: Tile
    d_query: Tile
    d_key_value: Tile


HOPPER, AMPERE = "hopper", "ampere"
# (generation, bytes of an element, widest head, causal); the first entry whose head is wide enough.
TABLE: dict[tuple[str, int, bool], dict[int, Tiles]] = {}
for _causal in (True, False):
    TABLE[HOPPER, 2, _causal] = {
        64: Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
        128: Tiles(Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
        256: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), Tile(16, 64, 8, 2)),
    }
    TABLE[AMPERE, 2, _causal] = {
        64: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
        128: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        256: Tiles(Tile(64, 64, 8, 1), Tile(64, 32, 8, 1), Tile(16, 64, 8, 1)),
    }
    TABLE[HOPPER, 4, _causal] = {
        64: Tiles(Tile(64, 32, 8, 1), Tile(64, 32, 8, 1), Tile(16, 64, 8, 1)),
        128: Tiles(Tile(32, 16, 8, 1), Tile(32, 16, 8, 1), Tile(16, 32, 4, 1)),
        256: Tiles(Tile(32, 32, 8, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    }
    TABLE[AMPERE, 4, _causal] = {
        64: Tiles(Tile(64, 32, 8, 1), Tile(64, 16, 8, 1), Tile(16, 64, 8, 1)),
        128: Tiles(Tile(32, 32, 8, 1), Tile(32, 16, 8, 1), Tile(32, 32, 8, 1)),
        256: Tiles(Tile(32, 16, 8, 1), Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
    }


def tiles_for(kind: str, itemsize: int, width: int, causal: bool) -> Tiles:
    """The tiles for a chip ('NVIDIA H200'), bytes of an element, and a width of heads up to 256."""
    generation = HOPPER if (capability(kind) or 0.0) >= 9.0 else AMPERE
    sizes = TABLE[generation, itemsize, causal]
    return sizes[min(size for size in sizes if size >= width)]
