"""The memory that a compiled training step needs on one device, against what the device has."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the compiler says of one step; all sizes are bytes per device.

    Attributes:
      platform: the chip that it was compiled for, in words: 'NVIDIA H200', 'cpu'.
      state: of the step's arguments: parameters, optimizer state, the batch.
      temporary: of what the compiler keeps while the step runs: activations, gradients, gathered weights.
      output: of the results that do not take the place of arguments.
      capacity: of one device, None where it is not known.
      suggestions: (declaration, bytes needed with it) of changes that were compiled as well.
    """
    platform: str
    state: int
    temporary: int
    output: int
    capacity: int | None = None
    suggestions: tuple[tuple[str, int], ...] = ()

    @property
    def needed(self) -> int:
        """What must be there at the step's peak."""
        return self.state + self.temporary + self.output

    @property
    def room(self) -> int | None:
        """What is left of the device; below zero, what is missing. None where the capacity is not known."""
        return None if self.capacity is None else self.capacity - self.needed

    @property
    def fits(self) -> bool | None:
        """Whether the device has what is needed. None where the capacity is not known."""
        return None if self.room is None else self.room >= 0

    @property
    def helpful(self) -> tuple[tuple[str, int], ...]:
        """The suggestions that need less than now, those that need least first."""
        return tuple(sorted((one for one in self.suggestions if one[1] < self.needed), key=lambda one: one[1]))
