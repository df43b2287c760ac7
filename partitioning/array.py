"""An array before it exists: its shape, its dtype, and what each of its dimensions means.

A model describes its parameters, an optimizer its state and a step its activations as such specs; everything about
sharding is decided on them, so that deciding needs neither memory nor devices.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """One array. It is a leaf of a pytree, not a node.

    Attributes:
      shape: sizes, whole (never a device's share).
      dtype: anything that names a dtype: 'bfloat16', np.float32, jnp.float32.
      dims: the logical name of each dimension; None for one that means nothing to sharding.
      true_shape: sizes without padding. None, as it is read by, is `shape`: nothing is padded.
    """
    shape: tuple[int, ...]
    dtype: Any
    dims: tuple[str | None, ...]
    true_shape: tuple[int, ...] | None = None

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dims", tuple(self.dims))
        if len(self.shape) != len(self.dims):
            raise ValueError(f"an array of shape {self.shape} has {len(self.shape)} dims, but names were given for "
                             f"{len(self.dims)}: {self.dims}.")
        object.__setattr__(self, "true_shape", self.shape if self.true_shape is None else tuple(self.true_shape))
        if len(self.true_shape) != len(self.shape) or any(t > n for t, n in zip(self.true_shape, self.shape)):
            raise ValueError(f"an array of shape {self.shape} cannot hold one of shape {self.true_shape}.")

    @property
    def size(self) -> int:
        """Number of elements, padding included."""
        return math.prod(self.shape)

    @property
    def true_size(self) -> int:
        """Number of elements without padding."""
        return math.prod(self.true_shape)

    @property
    def is_padded(self) -> bool:
        """Whether some dim is larger than it is in truth."""
        return self.shape != self.true_shape

    def padded(self, sizes: Mapping[str, int]) -> "ArraySpec":
        """This array with the dims that `sizes` names as large as it says."""
        return dataclasses.replace(self, shape=tuple(sizes.get(dim, size) for dim, size in zip(self.dims, self.shape)))

    def without(self, dim: int) -> "ArraySpec":
        """This array without dimension number `dim`."""
        def rest(x):
            return x[:dim] + x[dim + 1:]
        return ArraySpec(rest(self.shape), self.dtype, rest(self.dims), rest(self.true_shape))

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
