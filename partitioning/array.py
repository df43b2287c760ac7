"""An array before it exists: its shape, its dtype, and what each of its dimensions means.

A model describes its parameters, an optimizer its state and a step its activations as such specs; everything about
sharding is decided on them, so that deciding needs neither memory nor devices.
"""

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """One array. It is a leaf of a pytree, not a node.

    Attributes:
      shape: sizes, whole (never a device's share).
      dtype: anything that names a dtype: 'bfloat16', np.float32, jnp.float32.
      dims: the logical name of each dimension; None for one that means nothing to sharding.
    """
    shape: tuple[int, ...]
    dtype: Any
    dims: tuple[str | None, ...]

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dims", tuple(self.dims))
        if len(self.shape) != len(self.dims):
            raise ValueError(f"an array of shape {self.shape} has {len(self.shape)} dims, but names were given for "
                             f"{len(self.dims)}: {self.dims}.")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dtype_name(self) -> str:
        """The dtype's one name, such as 'bfloat16'."""
        return _dtype(self.dtype).name

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * _dtype(self.dtype).itemsize


def _dtype(dtype: Any) -> np.dtype:
    import ml_dtypes  # noqa: F401             numpy learns the names bfloat16 and float8 from it
    return np.dtype(dtype)
